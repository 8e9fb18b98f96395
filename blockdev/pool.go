package blockdev

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pool leases out buffers of one contiguous region outside the Go heap, so that a device can register the
// region once and reach every buffer. It is a binary buddy allocator: sizes are powers of two from PageSize
// to MaxLease, and a buffer is aligned to its size. It is the bound on a connection's data memory.
//
// Locks: mu is a leaf.
type Pool struct {
	region  []byte
	base    uintptr
	collect chan struct{} // holds an element while somebody has the right to collect

	mu      sync.Mutex
	free    [numOrders][]uint32 // page numbers of free blocks, by order; a stack, allocated in full at once
	order   []int8              // by page: order+1 of a leased block that starts here, -(order+1) of a free one, else 0
	slot    []uint32            // by page: where a free block stands in its stack
	leased  int                 // bytes
	waiters []*waiter
	closed  bool

	collectors []*waiter // who waits for collect, the first first
}

type waiter struct {
	order int
	ready chan []byte // nil: for the right to collect
	since time.Time
}

// Sizes of a pool.
const (
	PageSize  = 4096
	MaxLease  = 1 << 20
	numOrders = 9 // 4 KiB << 8 is 1 MiB
)

// ErrPoolClosed is what waiting lessees get when the pool is closed.
var ErrPoolClosed = errors.New("buffer pool closed")

// NewPool maps a region of size bytes, rounded up to a multiple of MaxLease. It is in huge pages where the
// machine grants them (transparently), and touched nowhere before it is used or registered.
func NewPool(size int) (*Pool, error) {
	if size <= 0 {
		return nil, fmt.Errorf("buffer pool: size %d is not positive", size)
	}
	size = (size + MaxLease - 1) &^ (MaxLease - 1)
	region, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("buffer pool of %d MiB: %w", size>>20, os.NewSyscallError("mmap", err))
	}
	_ = unix.Madvise(region, unix.MADV_HUGEPAGE) // a wish
	_ = unix.Madvise(region, unix.MADV_DONTFORK) // registered memory must not become copy-on-write
	pages := size / PageSize
	p := &Pool{
		region:  region,
		base:    uintptr(unsafe.Pointer(unsafe.SliceData(region))),
		collect: make(chan struct{}, 1),
		order:   make([]int8, pages),
		slot:    make([]uint32, pages),
	}
	for o := range p.free {
		p.free[o] = make([]uint32, 0, pages>>o)
	}
	for page := pages - MaxLease/PageSize; page >= 0; page -= MaxLease / PageSize {
		p.push(numOrders-1, uint32(page))
	}
	return p, nil
}

// Region is all of the pool's memory, to be registered; not to be touched after Close.
func (p *Pool) Region() []byte { return p.region }

// Size is the pool's size in bytes.
func (p *Pool) Size() int { return len(p.order) * PageSize }

// Leased is how many bytes are leased out now; 0 at the end of a test, else something leaks.
func (p *Pool) Leased() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leased
}

// Waiting is how long somebody has waited for a buffer, or for Collect, up to now; 0 when nobody does. When it is long,
// it is time to look at those who hold theirs for long.
func (p *Pool) Waiting() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	var longest time.Duration
	for _, line := range [][]*waiter{p.waiters, p.collectors} {
		if len(line) > 0 {
			longest = max(longest, time.Since(line[0].since))
		}
	}
	return longest
}

// TryCollect takes the right to wait for a buffer while holding another that is not given back before, and says
// whether it got it. Without that right two who want several buffers could each hold half of the pool and wait for
// the other half. It is to be given back with EndCollect, after the last buffer was leased or later.
func (p *Pool) TryCollect() bool {
	select {
	case p.collect <- struct{}{}:
		return true
	default:
		return false
	}
}

// Collect waits for what TryCollect takes. The error is ctx's.
func (p *Pool) Collect(ctx context.Context) error {
	w := &waiter{since: time.Now()}
	p.mu.Lock()
	p.collectors = append(p.collectors, w)
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		i := slices.Index(p.collectors, w)
		p.collectors = slices.Delete(p.collectors, i, i+1)
		p.mu.Unlock()
	}()
	select {
	case p.collect <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// EndCollect gives the right back.
func (p *Pool) EndCollect() { <-p.collect }

func orderOf(n int) int {
	if n <= PageSize {
		return 0
	}
	return bits.Len(uint(n-1)) - bits.Len(uint(PageSize-1))
}

// TryLease returns a buffer of n bytes (capacity: n rounded up to a power of two), or nil when there is none
// now. n is from 1 to MaxLease, else the answer is nil too. The content is whatever was there. Return it with
// Release.
func (p *Pool) TryLease(n int) []byte {
	if n <= 0 || n > MaxLease {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.waiters) > 0 { // first come, first served
		return nil
	}
	b := p.take(orderOf(n))
	if b == nil {
		return nil
	}
	return b[:n]
}

// Reserve takes a buffer of n bytes, from 1 to MaxLease, out of the pool for as long as the pool exists: memory
// that a device needs besides its users' buffers. It does not count as leased and is not to be released. It
// returns nil when there is none now.
func (p *Pool) Reserve(n int) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.take(orderOf(n))
	if b == nil {
		return nil
	}
	p.leased -= cap(b)
	return b[:n]
}

// Lease waits for a buffer of n bytes, in the order of the calls. Errors: ctx's, ErrPoolClosed.
func (p *Pool) Lease(ctx context.Context, n int) ([]byte, error) {
	if n <= 0 || n > MaxLease {
		return nil, fmt.Errorf("buffer of %d bytes: must be from 1 to %d", n, MaxLease)
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrPoolClosed
	}
	o := orderOf(n)
	if len(p.waiters) == 0 {
		if b := p.take(o); b != nil {
			p.mu.Unlock()
			return b[:n], nil
		}
	}
	w := &waiter{order: o, ready: make(chan []byte, 1), since: time.Now()}
	p.waiters = append(p.waiters, w)
	p.mu.Unlock()
	select {
	case b, ok := <-w.ready:
		if !ok {
			return nil, ErrPoolClosed
		}
		return b[:n], nil
	case <-ctx.Done():
		p.mu.Lock()
		if i := slices.Index(p.waiters, w); i >= 0 {
			p.waiters = slices.Delete(p.waiters, i, i+1)
			p.serve() // w may have stood in the way of a smaller one
		}
		p.mu.Unlock()
		select { // what was handed to w before it left the queue
		case b, ok := <-w.ready:
			if ok {
				p.Release(b)
			}
		default:
		}
		return nil, ctx.Err()
	}
}

// Release returns a buffer; any slice that begins where the leased one began will do. Returning a buffer
// twice, or one that is not the pool's, is a bug and panics.
func (p *Pool) Release(b []byte) {
	off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - p.base
	if off >= uintptr(p.Size()) || off%PageSize != 0 {
		panic("blockdev: released a buffer that is not the pool's")
	}
	p.mu.Lock()
	page := uint32(off / PageSize)
	o := int(p.order[page]) - 1
	if o < 0 {
		p.mu.Unlock()
		panic("blockdev: buffer released twice")
	}
	p.leased -= PageSize << o
	for o < numOrders-1 {
		buddy := page ^ 1<<o
		if p.order[buddy] != int8(-(o + 1)) {
			break
		}
		p.remove(o, buddy)
		p.order[page] = 0
		page = min(page, buddy)
		o++
	}
	p.push(o, page)
	p.serve()
	p.mu.Unlock()
}

// Close makes waiting and further lessees fail. The memory stays mapped while leases are out; Close returns
// an error then, and can be called again.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, w := range p.waiters { // none of them has been served: a served one has left the list
		close(w.ready)
	}
	p.waiters = nil
	if p.leased > 0 {
		return fmt.Errorf("buffer pool: %d bytes are still leased", p.leased)
	}
	if p.region == nil {
		return nil
	}
	err := unix.Munmap(p.region)
	p.region = nil
	return os.NewSyscallError("munmap", err)
}

// take removes a block of order o, splitting larger ones. mu is held.
func (p *Pool) take(o int) []byte {
	from := o
	for from < numOrders && len(p.free[from]) == 0 {
		from++
	}
	if from == numOrders {
		return nil
	}
	page := p.free[from][len(p.free[from])-1]
	p.remove(from, page)
	for from > o {
		from--
		p.push(from, page+1<<from)
	}
	p.order[page] = int8(o + 1)
	p.leased += PageSize << o
	off := int(page) * PageSize
	return p.region[off : off+PageSize<<o : off+PageSize<<o]
}

func (p *Pool) push(o int, page uint32) {
	p.order[page] = int8(-(o + 1))
	p.slot[page] = uint32(len(p.free[o]))
	p.free[o] = append(p.free[o], page)
}

func (p *Pool) remove(o int, page uint32) {
	s := p.free[o]
	i, last := p.slot[page], s[len(s)-1]
	s[i] = last
	p.slot[last] = i
	p.free[o] = s[:len(s)-1]
	p.order[page] = 0
}

// serve hands free blocks to the waiters in their order. mu is held.
func (p *Pool) serve() {
	for len(p.waiters) > 0 {
		b := p.take(p.waiters[0].order)
		if b == nil {
			return
		}
		p.waiters[0].ready <- b
		p.waiters = p.waiters[1:]
	}
}
