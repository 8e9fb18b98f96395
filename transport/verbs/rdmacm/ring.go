package rdmacm

import (
	"sync/atomic"

	"farblk/transport/verbs"
)

// recvBit tells receive work requests from sends in a wr_id; the rest is the sequence number.
const recvBit = uint64(1) << 63

// slot is what is kept of an outstanding work request. Its completion is made ready in result.
type slot struct {
	result   verbs.Completion
	signaled bool // it will surely complete: receives, and sends with verbs.Signaled
	finished bool // the device has completed it
}

// ring counts the work requests of one queue and gives their completions out in order. A device should complete
// them in order, too, so that one completion frees all before it, unsignaled ones included; but siw completes a
// WRITE or SEND before a READ that was posted earlier (it has handed it to TCP), and such completions wait here.
//
// One goroutine at a time adds (under the queue's post lock) and one takes (under the poll lock); posted and done
// order their accesses to the slots.
type ring struct {
	slots  []slot // a power of two
	depth  uint64
	posted atomic.Uint64 // next sequence number to post
	done   atomic.Uint64 // all before it have been given out, or needed not be
	owed   atomic.Uint64 // one past the last signaled
	high   uint64        // one past the highest finished; the poll lock's
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

// outstanding gives the slot of the sequence number, nil if it is not outstanding or has finished before.
func (r *ring) outstanding(seq uint64) *slot {
	done := r.done.Load()
	if seq-done >= r.posted.Load()-done || r.at(seq).finished {
		return nil
	}
	return r.at(seq)
}

// finish notes that the device has completed the sequence number, whose slot outstanding gave.
func (r *ring) finish(seq uint64) {
	r.at(seq).finished = true
	r.high = max(r.high, seq+1)
}

// next gives out the next completion if it is its turn. flush takes what has not finished for flushed.
func (r *ring) next(c *verbs.Completion, flush bool) bool {
	end := r.high
	if flush {
		end = r.posted.Load()
	}
	for done := r.done.Load(); done < end; done++ {
		s := r.at(done)
		switch {
		case s.finished:
			*c = s.result
		case s.signaled && !flush:
			return false
		case !s.signaled && done < r.high:
			continue // a later one has finished: so has this, and nobody wants to know
		default:
			*c = verbs.Completion{ID: s.result.ID, Op: s.result.Op, Status: verbs.StatusFlushed}
		}
		r.done.Store(done + 1)
		return true
	}
	return false
}

// drained tells that nothing more is to come from the device, if all went well.
func (r *ring) drained() bool { return r.done.Load() >= r.owed.Load() }
