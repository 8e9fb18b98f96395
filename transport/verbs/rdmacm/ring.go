package rdmacm

import (
	"sync/atomic"

	"farblk/transport/verbs"
)

// recvBit tells receive work requests from sends in a wr_id; the rest is the sequence number.
const recvBit = uint64(1) << 63

// slot is what is kept of an outstanding work request.
type slot struct {
	id    uint64
	bytes uint32
	op    verbs.Opcode
}

// ring counts the work requests of one queue. The device completes them in order, so a completion of number n
// frees all up to n, unsignaled ones included. One goroutine at a time adds (under the queue's post lock) and one
// takes (under the poll lock); posted and done order their accesses to the slots.
type ring struct {
	slots  []slot // a power of two
	depth  uint64
	posted atomic.Uint64 // next sequence number to post
	done   atomic.Uint64 // all before it have completed
	// owed is one past the last work request that will surely complete: receives, and signaled sends.
	owed atomic.Uint64
}

func newRing(depth int) *ring {
	n := 1
	for n < depth {
		n <<= 1
	}
	return &ring{slots: make([]slot, n), depth: uint64(depth)}
}

// room is how many more can be posted.
func (r *ring) room() int { return int(r.depth - (r.posted.Load() - r.done.Load())) }

func (r *ring) at(seq uint64) *slot { return &r.slots[seq&uint64(len(r.slots)-1)] }

// take ends the work request of the sequence number. false: it is not outstanding.
func (r *ring) take(seq uint64) (slot, bool) {
	done := r.done.Load()
	if seq-done >= r.posted.Load()-done {
		return slot{}, false
	}
	s := *r.at(seq)
	r.done.Store(seq + 1)
	return s, true
}

// oldest ends the oldest outstanding work request.
func (r *ring) oldest() (slot, bool) { return r.take(r.done.Load()) }

// drained tells that nothing more is to come from the device, if all went well.
func (r *ring) drained() bool { return r.done.Load() >= r.owed.Load() }
