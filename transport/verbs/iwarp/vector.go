package iwarp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vector describes b, which is not empty, for readv or sendmsg.
func vector(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

func advance(p *byte, n int) *byte { return (*byte)(unsafe.Add(unsafe.Pointer(p), n)) }
