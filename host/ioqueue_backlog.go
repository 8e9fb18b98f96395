package host

import (
	"fmt"

	"farblk/blockdev"
)

// requestList is a first-in-first-out list through Request.Private.
type requestList struct{ head, tail *blockdev.Request }

func (l *requestList) push(r *blockdev.Request) {
	r.Private.Next = nil
	if l.head == nil {
		l.head = r
	} else {
		l.tail.Private.Next = r
	}
	l.tail = r
}

func (l *requestList) pop() *blockdev.Request {
	r := l.head
	l.head = r.Private.Next
	r.Private.Next = nil
	return r
}

// appendAll moves all of m to the end of l.
func (l *requestList) appendAll(m *requestList) {
	if m.head == nil {
		return
	}
	if l.head == nil {
		*l = *m
	} else {
		l.tail.Private.Next = m.head
		l.tail = m.tail
	}
	*m = requestList{}
}

// deliver tells the owners. No lock is held.
func (l *requestList) deliver() {
	for l.head != nil {
		r := l.pop()
		r.Done(r)
	}
}

// pushFront puts r before all others.
func (l *requestList) pushFront(r *blockdev.Request) {
	r.Private.Next = l.head
	if l.head == nil {
		l.tail = r
	}
	l.head = r
}

// wait appends r to the requests that it has to wait with. io.mu is held.
func (q *nsQueue) wait(r *blockdev.Request, g *geometry) {
	switch {
	case q.io.holdWrites && writes(r.Op):
		q.held.push(r)
	case q.io.starved(r):
		q.discards.push(r)
	default:
		q.waiting.push(r)
		if g.paused == nil {
			q.enlist()
		}
	}
}

// starved says whether r needs a buffer for ranges and there is none. io.mu is held.
func (io *ioQueue) starved(r *blockdev.Request) bool {
	return r.Op == blockdev.Discard && len(io.ranges) == 0
}

// restoreDiscard lets one request go on that waits for a buffer for ranges, if there is one now, and says
// whether it did. io.mu is held.
func (io *ioQueue) restoreDiscard() bool {
	if len(io.ranges) == 0 {
		return false
	}
	for _, q := range io.queues {
		if q.discards.head != nil {
			q.waiting.pushFront(q.discards.pop())
			q.enlist()
			return true
		}
	}
	return false
}

func (q *nsQueue) enlist() {
	io := q.io
	switch {
	case q.next != nil:
	case io.backlog == nil:
		q.next, io.backlog = q, q
	default:
		q.next, io.backlog.next = io.backlog.next, q
		io.backlog = q
	}
}

// pump sends what waits: commands to be sent again first, then the namespaces' requests in turn. Requests
// that end without being sent go to list. It says whether something was sent. io.mu is held.
func (io *ioQueue) pump(list *requestList) (sent bool) {
	if io.tq == nil {
		return false
	}
	sent = io.resend(list)
	// What takes a discard's turn may have ended without taking its buffer: then it is the next one's.
	for (io.backlog != nil || io.restoreDiscard()) && io.inFlight < io.limit && io.free != nil {
		q := io.backlog.next // the first
		g := q.ns.geometry.Load()
		if g.paused != nil {
			io.delist(q) // until Namespace.wake
			continue
		}
		before := io.inFlight
		ok := io.advance(q, g, list)
		sent = sent || io.inFlight > before
		if !ok {
			break
		}
		if q.waiting.head != nil {
			io.backlog = q // to the end
			continue
		}
		io.delist(q)
	}
	return sent
}

// advance moves the first waiting request of q on. It returns false if it can not now. io.mu is held.
func (io *ioQueue) advance(q *nsQueue, g *geometry, list *requestList) bool {
	r := q.waiting.head
	switch {
	case r.Err != nil: // a part failed
	case g.err != nil:
		r.Err = g.err
	case io.holdWrites && writes(r.Op):
		q.held.push(q.waiting.pop())
		return true
	case !io.issue(q, r, g):
		if !io.starved(r) {
			return false
		}
		q.discards.push(q.waiting.pop())
		return true
	}
	q.waiting.pop()
	if r.Private.Pending--; r.Private.Pending == 0 {
		list.push(r)
	}
	return true
}

// delist takes q, the first of the backlog, out of it.
func (io *ioQueue) delist(q *nsQueue) {
	if q.next == q {
		io.backlog = nil
	} else {
		io.backlog.next = q.next
	}
	q.next = nil
}

// resend sends commands again that were lost or are to be retried and whose time has come. io.mu is held.
func (io *ioQueue) resend(list *requestList) (sent bool) {
	rest := &io.again
	for c := *rest; c != nil; c = *rest {
		g := c.q.ns.geometry.Load()
		err := g.err
		if err == nil && len(c.tr.Data) > g.info.MaxTransfer {
			err = fmt.Errorf("%w: since the reconnect the controller takes only %d bytes at once", blockdev.ErrLost, g.info.MaxTransfer)
		}
		if err == nil {
			if g.paused != nil {
				io.park(c)
			}
			if g.paused != nil || io.holdWrites && c.writes || int32(io.now-c.tick) < 0 || !io.hasRanges(c, g) {
				rest = &c.next
				continue
			}
			if io.inFlight >= io.limit {
				break
			}
			if err = io.tq.Submit(&c.tr); err != nil && passes(err) {
				break
			}
		}
		*rest, c.next = c.next, nil
		if err != nil {
			if r := io.finish(c, err); r != nil {
				list.push(r)
			}
			continue
		}
		io.unpark(c)
		io.isSent(c)
		sent = true
	}
	return sent
}

// park makes up for what c, which is in again and whose namespace is paused, may keep for long: its record, by another
// one, and its buffer for ranges, which it gives back. io.mu is held.
func (io *ioQueue) park(c *command) {
	if c.parked {
		return
	}
	c.parked = true
	if io.parked++; io.extra < io.parked {
		io.extra++
		io.addRecord(&command{}, io.done)
	}
	if c.ranges != nil {
		io.ranges = append(io.ranges, c.ranges)
		c.ranges = nil
	}
}

// unpark ends park. io.mu is held.
func (io *ioQueue) unpark(c *command) {
	if c.parked {
		c.parked = false
		io.parked--
	}
}

// hasRanges says whether c has the buffer that it needs if it is a deallocation, which it takes if there is one and it
// gave its own away. io.mu is held.
func (io *ioQueue) hasRanges(c *command, g *geometry) bool {
	if c.piece == 0 || c.ranges != nil {
		return true
	}
	last := len(io.ranges) - 1
	if last < 0 {
		return false
	}
	c.ranges, io.ranges = io.ranges[last], io.ranges[:last]
	g.fillRanges(c, c.q.discard)
	return true
}

// wake sends what can be sent.
func (io *ioQueue) wake() {
	var list requestList
	io.mu.Lock()
	sent := io.pump(&list)
	io.mu.Unlock()
	if sent {
		io.kick()
	}
	list.deliver()
}

// unlist takes q out of the backlog, wherever it stands. io.mu is held.
func (io *ioQueue) unlist(q *nsQueue) {
	if q.next == nil {
		return
	}
	before := q
	for before.next != q {
		before = before.next
	}
	if before == q {
		io.backlog = nil
	} else {
		before.next = q.next
		if io.backlog == q {
			io.backlog = before
		}
	}
	q.next = nil
}
