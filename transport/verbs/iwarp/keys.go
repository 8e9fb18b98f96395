package iwarp

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"farblk/transport/verbs"
)

// pd is a protection domain: the table of its memory keys (STags, RFC 5040 section 5.1). A connection looks keys
// up in its own domain only, so keys of other domains do not exist for it.
//
// Lock order: pd.mu is a leaf.
type pd struct {
	mu      sync.RWMutex
	keys    map[uint32]*region
	entropy [256]byte
	left    int // unused bytes at the end of entropy
	closed  bool
}

// region is what one key stands for: a registered region, or the part of one that a window is bound to.
//
// use counts those who touch the memory at this moment. Ending a key waits for them, so that nothing is read or
// written under a key after MR.Close or Window.Invalidate has returned.
type region struct {
	pd     *pd
	key    uint32
	mem    []byte
	base   uint64 // the peer's address of mem[0]
	access verbs.Access
	parent *region // of a window: the region it is bound to
	window bool
	use    atomic.Int64
	mu     sync.Mutex // serialises end and Bind; before pd.mu
}

// ended is set in region.use when the key is no longer valid.
const ended = 1 << 40

// enter begins an access under key; false means that the key has ended. A window's region is used again for its
// next key, which is why the key is asked for.
func (r *region) enter(key uint32) bool {
	if r.use.Add(1)&ended != 0 || r.key != key {
		r.use.Add(-1)
		return false
	}
	if r.parent != nil && !r.parent.enter(r.parent.key) {
		r.use.Add(-1)
		return false
	}
	return true
}

// exit ends an access that enter began.
func (r *region) exit() {
	if r.parent != nil {
		r.parent.exit()
	}
	r.use.Add(-1)
}

// end ends key, and waits until nobody uses it. It tells whether the key was valid.
func (r *region) end(key uint32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.endLocked(key)
}

func (r *region) endLocked(key uint32) bool {
	r.pd.mu.Lock()
	valid := r.pd.keys[key] == r
	if valid {
		delete(r.pd.keys, key)
	}
	r.pd.mu.Unlock()
	if !valid {
		return false
	}
	r.use.Add(ended)
	for r.use.Load() != ended {
		runtime.Gosched() // an access is one copy or one system call that does not block
	}
	return true
}

// within gives the n bytes at the peer's address to, or false when they are not all inside.
func (r *region) within(to, n uint64) ([]byte, bool) {
	off := to - r.base
	if to < r.base || off > uint64(len(r.mem)) || n > uint64(len(r.mem))-off {
		return nil, false
	}
	return r.mem[off : off+n : off+n], true
}

// holds tells whether b lies within the region.
func (r *region) holds(b []byte) bool {
	off := addressOf(b) - addressOf(r.mem)
	return off <= uintptr(len(r.mem)) && uintptr(len(b)) <= uintptr(len(r.mem))-off
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// find gives the region of a key, nil if there is none. It does not enter it.
func (p *pd) find(key uint32) *region {
	p.mu.RLock()
	r := p.keys[key]
	p.mu.RUnlock()
	return r
}

// add gives r a fresh key and a base address that say nothing about earlier ones or about this process's memory.
func (p *pd) add(r *region) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return verbs.ErrClosed
	}
	for {
		if p.left < 12 {
			if _, err := rand.Read(p.entropy[:]); err != nil {
				return fmt.Errorf("no random memory key: %w", err)
			}
			p.left = len(p.entropy)
		}
		e := p.entropy[len(p.entropy)-p.left:]
		p.left -= 12
		r.key = binary.NativeEndian.Uint32(e)
		// Page-aligned and below 2^62, so that no region reaches the end of the address space.
		r.base = binary.NativeEndian.Uint64(e[4:]) >> 2 &^ 0xfff
		if _, taken := p.keys[r.key]; !taken && r.key != 0 {
			p.keys[r.key] = r
			r.use.Add(-ended)
			return nil
		}
	}
}

// Register makes b known under a new key.
func (p *pd) Register(b []byte, access verbs.Access) (verbs.MR, error) {
	if len(b) == 0 {
		return nil, errors.New("register: no memory")
	}
	if access&(verbs.RemoteWrite|verbs.ReadSink) != 0 && access&verbs.LocalWrite == 0 {
		return nil, errors.New("register: what the peer may fill needs local write")
	}
	r := &region{pd: p, mem: b, access: access}
	r.use.Store(ended)
	if err := p.add(r); err != nil {
		return nil, err
	}
	return &mr{r}, nil
}

// NewWindow makes an unbound window.
func (p *pd) NewWindow() (verbs.Window, error) {
	w := &window{pd: p}
	w.region.pd, w.region.window = p, true
	w.region.use.Store(ended)
	return w, nil
}

// Close forgets the domain. Regions left open are an error and stay.
func (p *pd) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.keys) != 0 {
		return fmt.Errorf("protection domain still has %d memory keys", len(p.keys))
	}
	p.closed = true
	return nil
}

type mr struct{ r *region }

func (m *mr) LKey() uint32 { return m.r.key }
func (m *mr) RKey() uint32 { return m.r.key }

func (m *mr) RemoteAddr(b []byte) uint64 {
	return m.r.base + uint64(addressOf(b)-addressOf(m.r.mem))
}

func (m *mr) Close() error {
	m.r.end(m.r.key)
	return nil
}

// window is a key for one transfer. Each Bind takes a fresh key, so an old one never comes back to life.
type window struct {
	pd     *pd
	region region
}

func (w *window) Bind(m verbs.MR, b []byte, access verbs.Access) (uint32, uint64, error) {
	parent, ok := m.(*mr)
	if !ok || parent.r.pd != w.pd {
		return 0, 0, errors.New("bind: memory region of another protection domain")
	}
	if len(b) == 0 || !parent.r.holds(b) {
		return 0, 0, errors.New("bind: memory outside the region")
	}
	if access&verbs.RemoteWrite != 0 && parent.r.access&verbs.LocalWrite == 0 {
		return 0, 0, errors.New("bind: remote write to a region without local write")
	}
	r := &w.region
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endLocked(r.key)
	r.mem, r.access, r.parent = b, access, parent.r
	if err := w.pd.add(r); err != nil {
		return 0, 0, err
	}
	return r.key, r.base, nil
}

func (w *window) Invalidate() error {
	w.region.mu.Lock()
	defer w.region.mu.Unlock()
	w.region.endLocked(w.region.key)
	return nil
}

func (w *window) Close() error { return w.Invalidate() }
