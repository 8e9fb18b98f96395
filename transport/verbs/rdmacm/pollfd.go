//go:build cgo && linux

package rdmacm

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pollFD lets Go's poller wait for a descriptor that a C library owns: it holds a duplicate, so that both sides
// close their own. The library's descriptor becomes non-blocking, too.
type pollFD struct {
	file *os.File
	raw  syscall.RawConn
}

func newPollFD(fd int, name string) (*pollFD, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: duplicate descriptor: %w", name, err)
	}
	if err := unix.SetNonblock(own, true); err != nil {
		_ = unix.Close(own)
		return nil, fmt.Errorf("%s: make non-blocking: %w", name, err)
	}
	p := &pollFD{file: os.NewFile(uintptr(own), name)}
	// Without the poller a read would block its thread, and Close could not interrupt it.
	if err := p.file.SetReadDeadline(time.Time{}); err != nil {
		_ = p.file.Close()
		return nil, fmt.Errorf("%s: not pollable: %w", name, err)
	}
	if p.raw, err = p.file.SyscallConn(); err != nil {
		_ = p.file.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

// wait calls f, and again whenever the descriptor is readable, until f says true.
func (p *pollFD) wait(f func(uintptr) bool) error { return p.raw.Read(f) }

// kick makes the wait under way, or the next one, return os.ErrDeadlineExceeded; calm takes that back.
func (p *pollFD) kick() { _ = p.file.SetReadDeadline(time.Unix(1, 0)) }
func (p *pollFD) calm() { _ = p.file.SetReadDeadline(time.Time{}) }

// close interrupts wait, and returns when no f runs any more.
func (p *pollFD) close() { _ = p.file.Close() }
