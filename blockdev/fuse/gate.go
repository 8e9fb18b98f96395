package fuse

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"farblk/blockdev"
)

// gate counts who is inside, and can be closed.
type gate struct {
	n    atomic.Int64  // inside, plus closing once closed
	idle chan struct{} // closed when the gate is and nobody is inside
}

const closing = int64(1) << 62

func (g *gate) enter() bool {
	if g.n.Add(1) < closing {
		return true
	}
	g.leave()
	return false
}

func (g *gate) leave() {
	if g.n.Add(-1) == closing {
		// One who came and was turned away may get here again: announced once. The bit above closing says so.
		if g.n.CompareAndSwap(closing, closing+closing/2) {
			close(g.idle)
		}
	}
}

// close is called under a lock of the caller's, perhaps again.
func (g *gate) close() {
	if !g.closed() {
		g.n.Add(closing + 1)
		g.leave()
	}
}

func (g *gate) closed() bool { return g.n.Load() >= closing }

// blockLock keeps read-modify-write of a part of a block from undoing another write to the same block. Writes of
// whole blocks share it, those of parts have it alone. It covers the device by hashing, a megabyte at a time.
//
// Lock order: ascending.
type blockLock [64]sync.RWMutex

// mask is the locks for n bytes from off, as a bit set.
func (*blockLock) mask(off, n int64) uint64 {
	first, last := off/blockdev.MaxLease, (off+max(n, 1)-1)/blockdev.MaxLease
	if last-first >= 63 {
		return ^uint64(0)
	}
	return bits.RotateLeft64(1<<(last-first+1)-1, int(first%64))
}

func (l *blockLock) lock(mask uint64, alone bool) {
	for m := mask; m != 0; m &= m - 1 {
		if i := bits.TrailingZeros64(m); alone {
			l[i].Lock()
		} else {
			l[i].RLock()
		}
	}
}

func (l *blockLock) unlock(mask uint64, alone bool) {
	for m := mask; m != 0; m &= m - 1 {
		if i := bits.TrailingZeros64(m); alone {
			l[i].Unlock()
		} else {
			l[i].RUnlock()
		}
	}
}

// adaptiveWait decides how long to poll for a completion before sleeping: as long as completions use to take,
// unless that is so long that the processor has better things to do.
type adaptiveWait struct {
	usual atomic.Int64 // nanoseconds, an exponential mean
}

// Bounds of polling for one request.
const (
	spinIfUnder = 150 * time.Microsecond
	spinAtMost  = 100 * time.Microsecond
)

func (a *adaptiveWait) budget() time.Duration {
	u := time.Duration(a.usual.Load())
	if u >= spinIfUnder {
		return 0
	}
	return min(u*3/2+5*time.Microsecond, spinAtMost)
}

func (a *adaptiveWait) took(d time.Duration) {
	u := a.usual.Load()
	a.usual.Store(u + (int64(min(d, 10*time.Millisecond))-u)/8) // a lost update does no harm
}
