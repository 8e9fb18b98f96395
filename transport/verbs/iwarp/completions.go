package iwarp

import (
	"sync"
	"sync/atomic"

	"farblk/transport/verbs"
)

// completions is the queue pair's completion queue. It never overflows: it has room for every work request that
// can be outstanding, and a work request counts as outstanding until its completion has been taken.
//
// Lock order: mu is taken last.
type completions struct {
	mu     sync.Mutex
	ring   []verbs.Completion
	head   int
	count  int
	sends  atomic.Int32 // work requests outstanding in the send queue
	recvs  atomic.Int32
	armed  bool
	notify chan struct{} // capacity 1: an armed notification has come
	wake   func()        // makes Wait look at notify
	ready  atomic.Int32  // count, to look at without the lock
}

func (c *completions) init(depth int) {
	c.ring = make([]verbs.Completion, depth)
	c.notify = make(chan struct{}, 1)
}

// push adds a completion and wakes who waits.
func (c *completions) push(done *verbs.Completion) {
	c.mu.Lock()
	i := c.head + c.count
	if i >= len(c.ring) {
		i -= len(c.ring)
	}
	c.ring[i] = *done
	c.count++
	c.ready.Store(int32(c.count))
	wake := c.armed
	c.armed = false
	c.mu.Unlock()
	if wake {
		select {
		case c.notify <- struct{}{}:
		default:
		}
		c.wake()
	}
}

// notified tells whether a notification has come and was not yet taken.
func (c *completions) notified() bool { return len(c.notify) > 0 }

// take moves completions to out.
func (c *completions) take(out []verbs.Completion) int {
	if c.ready.Load() == 0 {
		return 0
	}
	var sends, recvs int32
	c.mu.Lock()
	n := min(len(out), c.count)
	for i := range n {
		out[i] = c.ring[c.head]
		if out[i].Op == verbs.OpRecv {
			recvs++
		} else {
			sends++
		}
		if c.head++; c.head == len(c.ring) {
			c.head = 0
		}
	}
	c.count -= n
	c.ready.Store(int32(c.count))
	c.mu.Unlock()
	if sends > 0 {
		c.sends.Add(-sends)
	}
	if recvs > 0 {
		c.recvs.Add(-recvs)
	}
	return n
}

// arm asks for a notification at the next push; one that came before is forgotten.
func (c *completions) arm() {
	c.mu.Lock()
	select {
	case <-c.notify:
	default:
	}
	c.armed = true
	c.mu.Unlock()
}
