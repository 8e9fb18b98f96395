package blockdev

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Spread is a view of d with one queue that uses all of d's, for an export that has a single stream of
// requests. Bursts take turns: what is submitted between two Kicks or Polls goes to one queue of d, so that
// it is still started with one doorbell. Closing the view closes d.
func Spread(d Device) Device {
	n := min(d.Queues(), 64)
	if n == 1 {
		return d
	}
	s := &spread{Device: d}
	for i := range n {
		s.queue.queues = append(s.queue.queues, d.Queue(i))
	}
	return s
}

type spread struct {
	Device
	queue spreadQueue
}

func (s *spread) Queues() int     { return 1 }
func (s *spread) Queue(int) Queue { return &s.queue }

type spreadQueue struct {
	queues []Queue
	turn   atomic.Uint32 // counts bursts
	// unstarted has a bit for each queue with requests that were not started. It is set after Submit, so that
	// whoever clears it starts them.
	unstarted atomic.Uint64
}

// Submit implements Queue.
func (s *spreadQueue) Submit(r *Request) {
	i := s.turn.Load() % uint32(len(s.queues))
	s.queues[i].Submit(r)
	s.unstarted.Or(1 << i)
}

// Kick implements Queue.
func (s *spreadQueue) Kick() {
	for m := s.unstarted.Swap(0); m != 0; m &= m - 1 {
		s.queues[bits.TrailingZeros64(m)].Kick()
		s.turn.Add(1)
	}
}

// Poll implements Queue. It looks at every queue once and never waits: on which of them to wait nobody knows.
func (s *spreadQueue) Poll(wait time.Duration) (n int) {
	if s.unstarted.Load() != 0 && s.unstarted.Swap(0) != 0 {
		s.turn.Add(1)
	}
	for _, q := range s.queues {
		n += q.Poll(min(wait, 0))
	}
	return n
}
