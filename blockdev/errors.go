package blockdev

import (
	"errors"
	"syscall"
)

// Outcomes of a request. Test with errors.Is; a device wraps them with what it knows (the NVMe status).
var (
	ErrRange     = errors.New("outside the device")
	ErrAlignment = errors.New("not a multiple of the block size")
	ErrReadOnly  = errors.New("the device is read-only")
	ErrNoSpace   = errors.New("no space left on the device")
	ErrMedia     = errors.New("media error")
	// ErrLost says that the connection to the device is gone and the request may or may not have happened.
	ErrLost        = errors.New("connection lost")
	ErrClosed      = errors.New("the device is closed")
	ErrUnsupported = errors.New("operation not supported by the device")
	ErrChanged     = errors.New("the device is not the one that was connected")
)

// Errno maps an outcome to the error number that an application should see: EIO for media and path errors.
func Errno(err error) syscall.Errno {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, ErrRange), errors.Is(err, ErrAlignment):
		return syscall.EINVAL
	case errors.Is(err, ErrReadOnly):
		return syscall.EPERM
	case errors.Is(err, ErrNoSpace):
		return syscall.ENOSPC
	case errors.Is(err, ErrUnsupported):
		return syscall.EOPNOTSUPP
	default:
		return syscall.EIO
	}
}
