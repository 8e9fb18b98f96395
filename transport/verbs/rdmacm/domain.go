//go:build cgo && linux

package rdmacm

/*
#include <errno.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"syscall"
	"unsafe"

	"farblk/transport/verbs"
)

// domain implements verbs.PD.
type domain struct {
	pd     *C.struct_ibv_pd
	device string
	link   verbs.Link
	// held keeps the library from closing the device when the last connection over it has gone before us.
	held **C.struct_ibv_context

	mu sync.Mutex
	// lingering counts queue pairs that are closed but that the kernel still holds; the last one ends a domain
	// that was closed meanwhile.
	lingering int
	closed    bool
}

func newDomain(v *C.struct_ibv_context, device verbs.Device) (*domain, error) {
	d := &domain{device: device.Name, link: device.Link}
	if r := C.farblk_alloc_pd(v, &d.pd); r != 0 {
		return nil, callError("ibv_alloc_pd", int(-r), "protection domain on "+d.device)
	}
	d.held = C.rdma_get_devices(nil)
	return d, nil
}

// Close frees the domain.
func (d *domain) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	if d.lingering > 0 {
		return nil
	}
	return d.free()
}

func (d *domain) free() error {
	if r := C.ibv_dealloc_pd(d.pd); r != 0 {
		d.closed = false
		return callError("ibv_dealloc_pd", int(r), "protection domain on "+d.device)
	}
	if d.held != nil {
		C.rdma_free_devices(d.held)
	}
	return nil
}

// linger lets the domain outlive its own Close until q is destroyed, if it is not yet.
func (d *domain) linger(q *queuePair) {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-q.destroyed:
	default:
		if !q.lingers {
			q.lingers = true
			d.lingering++
		}
	}
}

// gone tells that q is destroyed.
func (d *domain) gone(q *queuePair) {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(q.destroyed)
	if !q.lingers {
		return
	}
	if d.lingering--; d.lingering == 0 && d.closed {
		_ = d.free()
	}
}

// Register pins b and gives it keys.
func (d *domain) Register(b []byte, access verbs.Access) (verbs.MR, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("register memory on %s: no bytes given", d.device)
	}
	if err := checkMemlock(uint64(len(b)), false); err != nil {
		return nil, err
	}
	access = granted(access, d.link)
	flags := 0
	if access&verbs.LocalWrite != 0 {
		flags |= C.IBV_ACCESS_LOCAL_WRITE
	}
	if access&verbs.RemoteRead != 0 {
		flags |= C.IBV_ACCESS_REMOTE_READ
	}
	if access&verbs.RemoteWrite != 0 {
		flags |= C.IBV_ACCESS_REMOTE_WRITE
	}
	m := &region{device: d.device}
	if r := C.farblk_reg_mr(d.pd, C.uintptr_t(address(b)), C.uint64_t(len(b)), C.int(flags), &m.mr); r != 0 {
		if syscall.Errno(-r) == syscall.ENOMEM {
			if err := checkMemlock(uint64(len(b)), true); err != nil {
				return nil, err
			}
		}
		return nil, callError("ibv_reg_mr", int(-r), fmt.Sprintf("register %d bytes on %s", len(b), d.device))
	}
	m.lkey, m.rkey = uint32(m.mr.lkey), uint32(m.mr.rkey)
	m.close = sync.OnceValue(func() error {
		if r := C.ibv_dereg_mr(m.mr); r != 0 {
			return callError("ibv_dereg_mr", int(r), "memory region on "+m.device)
		}
		return nil
	})
	return m, nil
}

// NewWindow is not supported: software devices cannot use memory windows for remote invalidation in user space,
// and a host that gives out long-lived keys needs none.
func (d *domain) NewWindow() (verbs.Window, error) {
	return nil, fmt.Errorf("memory window on %s: %w", d.device, verbs.ErrUnsupported)
}

// region implements verbs.MR.
type region struct {
	mr         *C.struct_ibv_mr
	lkey, rkey uint32
	device     string
	close      func() error
}

func (m *region) LKey() uint32 { return m.lkey }
func (m *region) RKey() uint32 { return m.rkey }

// RemoteAddr is the virtual address: regions are not zero-based.
func (m *region) RemoteAddr(b []byte) uint64 { return address(b) }

func (m *region) Close() error { return m.close() }

// address is where b lies. b is outside the Go heap (package verbs), so it stays there.
func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
