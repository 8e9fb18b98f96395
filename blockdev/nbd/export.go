package nbd

import (
	"errors"
	"sync/atomic"

	"farblk/blockdev"
)

// Export is a device under a name.
type Export struct {
	Name        string // what clients ask for; UTF-8
	Description string // for people
	Device      blockdev.Device
	// ReadOnly refuses writes also to a device that takes them.
	ReadOnly bool
}

// export is an Export being served.
type export struct {
	Export
	info        atomic.Pointer[blockdev.Info]
	unwatch     func()
	connections atomic.Int64 // ever made; chooses a queue
	// maxPayload is the longest Read or Write in bytes: what is promised, or what the pool can hold twice.
	maxPayload int
}

func newExport(e Export) *export {
	x := &export{Export: e}
	x.maxPayload = max(blockdev.MaxLease, min(maxPayload, e.Device.Pool().Size()/2&^(blockdev.MaxLease-1)))
	mine := func(i blockdev.Info) *blockdev.Info {
		i.ReadOnly = i.ReadOnly || e.ReadOnly
		return &i
	}
	x.unwatch = e.Device.Watch(func(i blockdev.Info) { x.info.Store(mine(i)) })
	x.info.CompareAndSwap(nil, mine(e.Device.Info())) // unless it changed in the meantime
	return x
}

// flags are the transmission flags (proto.md, "Transmission flags"). FLUSH and FUA are offered whether or not
// the device has a volatile cache now: it may be switched on later, when clients cannot be told any more.
func (e *export) flags(structured bool) uint16 {
	info := e.info.Load()
	f := uint16(transHasFlags | transCanMultiConn | transCache)
	if structured {
		f |= transDF
	}
	if info.ReadOnly {
		return f | transReadOnly
	}
	f |= transFlush | transFUA
	if info.Discard {
		f |= transTrim
	}
	if info.WriteZeroes {
		f |= transWriteZeroes | transFastZero
	}
	return f
}

func preferredBlock(i *blockdev.Info) int {
	p := max(i.OptimalIO, i.BlockSize, 4096)
	if p&(p-1) != 0 || p > 32<<20 { // must be a power of two
		return max(i.BlockSize, 4096)
	}
	return p
}

// errnoOf maps the outcome of an operation to NBD's error number.
func errnoOf(err error) uint32 {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, blockdev.ErrReadOnly):
		return errnoPerm
	case errors.Is(err, blockdev.ErrNoSpace):
		return errnoNoSpace
	case errors.Is(err, blockdev.ErrRange), errors.Is(err, blockdev.ErrAlignment):
		return errnoInval
	case errors.Is(err, blockdev.ErrUnsupported):
		return errnoNotSup
	case errors.Is(err, blockdev.ErrClosed):
		return errnoShutdown
	default:
		return errnoIO
	}
}
