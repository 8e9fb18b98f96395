package target

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// extent is one mapping of a namespace in memory. A namespace that grows gets
// another, since a registered mapping cannot move.
type extent struct {
	start uint64 // the namespace's byte that mem begins at
	mem   []byte

	giving sync.RWMutex // held while pages are given back; a leaf
	pinned bool         // some device holds the pages, or is about to; guarded by giving
}

// pin keeps the pages in place from now on: a device that holds a page which was given back goes on with it, while
// everybody else sees another.
func (e *extent) pin() {
	e.giving.Lock()
	defer e.giving.Unlock()
	e.pinned = true
}

// maxExtents bounds how often a namespace in memory can grow.
const maxExtents = 64

// memory is a backend outside the Go heap. Its list of extents is replaced, never
// changed, under Subsystem.mu.
type memory struct{ list atomic.Pointer[[]*extent] }

func newMemory(size uint64) (*memory, error) {
	m := new(memory)
	m.list.Store(new([]*extent))
	return m, m.grow(0, size)
}

func (m *memory) extents() []*extent { return *m.list.Load() }

func (m *memory) end() uint64 {
	l := m.extents()
	if len(l) == 0 {
		return 0
	}
	e := l[len(l)-1]
	return e.start + uint64(len(e.mem))
}

// grow makes the bytes up to size usable. Those from old on read as zeros, even
// if they held something before the namespace was made smaller.
func (m *memory) grow(old, size uint64) error {
	end := m.end()
	if old < min(size, end) {
		if err := m.zero(old, min(size, end)-old); err != nil {
			return err
		}
	}
	if size <= end {
		return nil
	}
	if len(m.extents()) == maxExtents {
		return fmt.Errorf("a namespace in memory can grow only %d times", maxExtents)
	}
	n := size - end
	if n > math.MaxInt-pageSize {
		return fmt.Errorf("%d bytes of memory cannot be had", n)
	}
	n = (n + pageSize - 1) &^ (pageSize - 1)
	mem, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("mapping %d bytes for a namespace: %w", n, err)
	}
	// No huge pages: a first write that waits for 2 MiB to be found and cleared
	// takes milliseconds on a busy machine.
	list := append(slices.Clone(m.extents()), &extent{start: end, mem: mem})
	m.list.Store(&list)
	return nil
}

// cut returns the part of [off, off+n) that lies in the extent from off on, or
// nil. Its capacity reaches to the end of the extent.
func (e *extent) cut(off, n uint64) []byte {
	if off < e.start || off >= e.start+uint64(len(e.mem)) {
		return nil
	}
	p := e.mem[off-e.start:]
	return p[:min(n, uint64(len(p)))]
}

var errPastEnd = errors.New("range past the end of a namespace in memory")

func (m *memory) readAt(p []byte, off uint64) error {
	for _, e := range m.extents() {
		n := copy(p, e.cut(off, uint64(len(p))))
		p, off = p[n:], off+uint64(n)
	}
	if len(p) > 0 {
		return errPastEnd
	}
	return nil
}

func (m *memory) writeAt(p []byte, off uint64) error {
	for _, e := range m.extents() {
		n := copy(e.cut(off, uint64(len(p))), p)
		p, off = p[n:], off+uint64(n)
	}
	if len(p) > 0 {
		return errPastEnd
	}
	return nil
}

// zero clears a range, and gives whole pages back where no device holds them.
func (m *memory) zero(off, n uint64) error {
	for _, e := range m.extents() {
		p := e.cut(off, n)
		e.zero(p)
		off, n = off+uint64(len(p)), n-uint64(len(p))
	}
	if n > 0 {
		return errPastEnd
	}
	return nil
}

// zero clears p, which is a cut of e.
func (e *extent) zero(p []byte) {
	if len(p) < 16*pageSize {
		clear(p)
		return
	}
	at := len(e.mem) - cap(p)
	first := -at & (pageSize - 1)
	last := (at+len(p))&^(pageSize-1) - at
	if !e.give(p[first:last:last]) {
		clear(p)
		return
	}
	clear(p[:first])
	clear(p[last:])
}

// give gives whole pages back, which then read as zeros, unless some device holds them.
func (e *extent) give(pages []byte) bool {
	e.giving.RLock()
	defer e.giving.RUnlock()
	return !e.pinned && unix.Madvise(pages, unix.MADV_DONTNEED) == nil
}

func (m *memory) sync() error { return nil }

func (m *memory) resize(old, size uint64) error { return m.grow(old, size) }

func (m *memory) close() error {
	var errs []error
	for _, e := range m.extents() {
		errs = append(errs, unix.Munmap(e.mem))
	}
	m.list.Store(new([]*extent))
	return errors.Join(errs...)
}
