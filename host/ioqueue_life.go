package host

import (
	"cmp"
	"slices"

	"farblk/transport"
)

// hold makes requests wait: the association is ending.
func (io *ioQueue) hold() {
	io.mu.Lock()
	io.tq = nil
	io.live.Store(nil)
	io.mu.Unlock()
}

// tookWrites says, once, whether commands that write were lost with the association.
func (io *ioQueue) tookWrites() bool {
	io.mu.Lock()
	defer io.mu.Unlock()
	w := io.wrote
	io.wrote = false
	return w
}

// resume runs requests on tq with at most limit commands outstanding; without writes, those wait.
func (io *ioQueue) resume(tq transport.Queue, limit int, writes bool) {
	io.mu.Lock()
	io.tq, io.limit, io.fail, io.holdWrites = tq, limit, nil, !writes
	io.live.Store(&tq)
	io.mu.Unlock()
	if writes {
		io.releaseWrites()
	} else {
		io.wake()
	}
}

// releaseWrites ends the time in which commands that write wait.
func (io *ioQueue) releaseWrites() {
	io.mu.Lock()
	io.holdWrites = false
	for _, q := range io.queues {
		if q.held.head != nil {
			q.held.appendAll(&q.waiting) // they came first
			q.waiting, q.held = q.held, requestList{}
			q.enlist()
		}
	}
	io.mu.Unlock()
	io.wake()
}

// abandon fails every request that waits, and until resume every new one, with err. Requests that the
// transport has end when it gives them back.
func (io *ioQueue) abandon(err error) {
	var list requestList
	io.mu.Lock()
	io.fail = err
	for _, q := range io.queues {
		io.abandonQueue(q, err, &list)
	}
	io.mu.Unlock()
	list.deliver()
}

// abandonQueue fails what waits on q. io.mu is held.
func (io *ioQueue) abandonQueue(q *nsQueue, err error, list *requestList) {
	for at := &io.again; *at != nil; {
		c := *at
		if c.q != q {
			at = &c.next
			continue
		}
		*at = c.next
		if r := io.finish(c, err); r != nil {
			list.push(r)
		}
	}
	q.held.appendAll(&q.discards)
	q.held.appendAll(&q.waiting)
	for q.held.head != nil {
		r := q.held.pop()
		if r.Err == nil {
			r.Err = err
		}
		if r.Private.Pending--; r.Private.Pending == 0 {
			list.push(r)
		}
	}
	io.unlist(q)
}

// remove takes q out, fails what waits on it and what comes with err, and returns a channel that is closed when the
// transport has none of its requests any more. It may be called again: the first err stays.
func (io *ioQueue) remove(q *nsQueue, err error) <-chan struct{} {
	var list requestList
	io.mu.Lock()
	q.removed = cmp.Or(q.removed, err)
	io.abandonQueue(q, err, &list)
	io.queues = slices.DeleteFunc(io.queues, func(x *nsQueue) bool { return x == q })
	drained := q.drained
	if drained == nil {
		drained = make(chan struct{})
		if q.used > 0 {
			q.drained = drained
		} else {
			close(drained)
		}
	}
	io.mu.Unlock()
	list.deliver()
	io.wake() // others may have waited for what q had
	return drained
}

// whenIdle returns a channel that is closed as soon as the transport has no request.
func (io *ioQueue) whenIdle() <-chan struct{} {
	io.mu.Lock()
	defer io.mu.Unlock()
	c := make(chan struct{})
	if io.inFlight == 0 {
		close(c)
	} else if io.idle != nil {
		return io.idle
	} else {
		io.idle = c
	}
	return c
}

// advanceClock counts a tick, sends what is due again or found no room, and says whether a command has been under way
// for at least limit ticks. Each that has begins anew, and counts it unless it may only have had to wait for its turn: a
// controller that takes one command after the other, and is slow, goes on completing those before it.
func (io *ioQueue) advanceClock(limit uint32) (late bool) {
	io.mu.Lock()
	io.now++
	due := io.again != nil || io.backlog != nil
	if io.inFlight > 0 && io.tq != nil {
		for _, c := range io.commands {
			if c.sent && io.now-c.tick >= limit {
				late = true
				c.tick = io.now
				if io.passed > c.order || io.now-io.moved >= limit/2 {
					c.late++
				}
				if d := c.q.discard; c.piece > 0 && (d == 0 || c.piece <= d) { // less at once may be done in time
					c.q.discard = max(c.piece/2, 1)
				}
			}
		}
	}
	io.mu.Unlock()
	if due {
		io.wake()
	}
	return late
}

// retryNow ends the pauses of commands that are to be sent again.
func (io *ioQueue) retryNow() {
	io.mu.Lock()
	for c := io.again; c != nil; c = c.next {
		c.tick = io.now
	}
	io.mu.Unlock()
	io.wake()
}
