package host

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// ioQueue is one of a controller's I/O queues. It outlives associations: between them requests wait here.
// All namespaces share it; each has a nsQueue on it.
//
// Locks: mu is held while the transport's Submit runs, never while a request's Done does.
type ioQueue struct {
	// live is the transport's queue for Kick and Poll, nil while there is none.
	live atomic.Pointer[transport.Queue]
	// polling counts our Polls under way. owedKick says that requests were submitted from a completion. The
	// Poll under way, if any, starts them, else the completion does.
	polling  atomic.Int32
	owedKick atomic.Bool

	mu         sync.Mutex
	tq         transport.Queue // nil: requests wait
	fail       error           // set: requests fail at once
	holdWrites bool            // commands that write wait
	wrote      bool            // commands that write were lost with the association
	limit      int             // commands that may be outstanding
	inFlight   int
	commands   []command
	free       *command
	again      *command // to be sent (once more), linked by next
	now        uint32   // ticks since the start
	ranges     [][]byte // free buffers for Dataset Management ranges
	// backlog is a ring of the nsQueues that have waiting requests, by nsQueue.next; it points at the last.
	backlog  *nsQueue
	queues   []*nsQueue    // one for each namespace
	idle     chan struct{} // closed when inFlight becomes 0
	counters QueueCounters
}

// command is the record of one command: (part of) a request.
type command struct {
	tr      transport.Request
	req     *blockdev.Request // nil: free
	q       *nsQueue
	next    *command
	ranges  []byte // from ioQueue.ranges, for Dataset Management
	tick    uint32 // when it was sent, or before when it is not to be sent again
	retries uint16
	writes  bool // changes data
	sent    bool // the transport has it
}

// nsQueue is a namespace's view of an ioQueue; a blockdev.Queue. All fields but ns and io belong to io.mu.
type nsQueue struct {
	ns *Namespace
	io *ioQueue
	// waiting requests have parts that are not sent yet; held ones moreover wait until writes may run.
	waiting, held requestList
	next          *nsQueue      // in io.backlog; nil: not in it
	used          int           // commands that belong to this namespace, sent or not
	drained       chan struct{} // closed when used becomes 0
}

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

// newIOQueue makes the records for a queue with at most outstanding commands. rangeBuffers are in the pool.
func newIOQueue(outstanding int, rangeBuffers [][]byte) *ioQueue {
	io := &ioQueue{commands: make([]command, outstanding), ranges: rangeBuffers}
	done := io.done
	for i := range io.commands {
		c := &io.commands[i]
		c.tr.Done, c.tr.Owner = done, c
		c.next, io.free = io.free, c
	}
	return io
}

// Submit implements blockdev.Queue.
func (q *nsQueue) Submit(r *blockdev.Request) {
	g := q.ns.geometry.Load()
	r.Err = nil
	r.Private = blockdev.Private{Pending: 1} // for the parts not sent yet
	if end, err := g.check(r); end {
		r.Err = err
		r.Done(r)
		return
	}
	io := q.io
	io.mu.Lock()
	if err := io.fail; err != nil {
		io.mu.Unlock()
		r.Err = err
		r.Done(r)
		return
	}
	if q.ns.closed.Load() { // now that Close cannot overlook r
		io.mu.Unlock()
		r.Err = blockdev.ErrClosed
		r.Done(r)
		return
	}
	if io.backlog == nil && io.tq != nil && !(io.holdWrites && writes(r.Op)) && io.issue(q, r, g) {
		r.Private.Pending--
	} else {
		q.wait(r)
	}
	io.mu.Unlock()
}

// Kick implements blockdev.Queue.
func (q *nsQueue) Kick() { q.io.kick() }

func (io *ioQueue) kick() {
	if tq := io.live.Load(); tq != nil {
		(*tq).Kick()
	}
}

// Poll implements blockdev.Queue. It counts commands, of all namespaces.
func (q *nsQueue) Poll(wait time.Duration) int {
	io := q.io
	tq := io.live.Load()
	if tq == nil {
		return 0
	}
	io.polling.Add(1)
	n := (*tq).Poll(wait)
	io.polling.Add(-1)
	if n == 0 && io.owedKick.Load() && io.owedKick.Swap(false) {
		(*tq).Kick() // the next Poll would start it, but it may not come
	}
	return n
}

// wait appends r to the waiting requests. io.mu is held.
func (q *nsQueue) wait(r *blockdev.Request) {
	q.waiting.push(r)
	q.enlist()
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

// issue sends as much of r as there are free records for, and says whether that was all. io.mu is held.
func (io *ioQueue) issue(q *nsQueue, r *blockdev.Request, g *geometry) bool {
	for {
		c := io.free
		if c == nil || io.inFlight >= io.limit {
			return false
		}
		if r.Op == blockdev.Discard {
			if len(io.ranges) == 0 {
				return false
			}
			c.ranges = io.ranges[len(io.ranges)-1]
		}
		n, more := g.fill(c, r)
		if err := io.tq.Submit(&c.tr); err != nil {
			// Full: a completion will come and try again. Lost: whoever watches the queue will act.
			c.ranges = nil
			return false
		}
		io.free, c.next = c.next, nil
		if c.ranges != nil {
			io.ranges = io.ranges[:len(io.ranges)-1]
		}
		c.req, c.q, c.tick, c.retries, c.sent = r, q, io.now, 0, true
		q.used++
		io.inFlight++
		r.Private.Progress += n
		r.Private.Pending++
		if !more {
			return true
		}
		io.counters.Splits++
	}
}

// done is the completion of a command, on whichever goroutine polled.
func (io *ioQueue) done(tr *transport.Request) {
	c := tr.Owner.(*command)
	var finished *blockdev.Request
	var list requestList
	var sent bool
	io.mu.Lock()
	c.sent = false
	io.inFlight--
	if tr.Err == nil {
		io.counters.Completed++
		status := (*nvme.Completion)(&tr.Completion).Status()
		if status.OK() {
			finished = io.finish(c, nil)
		} else {
			finished = io.refused(c, status)
		}
		if io.backlog != nil || io.again != nil {
			sent = io.pump(&list)
		}
	} else {
		finished = io.lost(c)
	}
	if io.inFlight == 0 && io.idle != nil {
		close(io.idle)
		io.idle = nil
	}
	io.mu.Unlock()
	if finished != nil {
		finished.Done(finished)
	}
	list.deliver()
	if sent {
		io.owedKick.Store(true)
		if io.polling.Load() == 0 && io.owedKick.Swap(false) {
			io.kick()
		}
	}
}

// finish frees c and returns its request if that was the last part. io.mu is held.
func (io *ioQueue) finish(c *command, err error) *blockdev.Request {
	r, q := c.req, c.q
	c.req, c.q = nil, nil
	if c.ranges != nil {
		io.ranges = append(io.ranges, c.ranges)
		c.ranges = nil
	}
	c.next, io.free = io.free, c
	if q.used--; q.used == 0 && q.drained != nil {
		close(q.drained)
		q.drained = nil
	}
	if err != nil && r.Err == nil {
		r.Err = err
	}
	if r.Private.Pending--; r.Private.Pending == 0 {
		return r
	}
	return nil
}

// lost takes c back when the association ended: to be sent again on the next one, unless requests fail
// meanwhile. io.mu is held.
func (io *ioQueue) lost(c *command) *blockdev.Request {
	io.wrote = io.wrote || c.writes
	err := io.fail
	if err == nil && c.q.ns.closed.Load() {
		err = blockdev.ErrClosed
	}
	if err != nil {
		return io.finish(c, err)
	}
	c.tick = io.now
	c.next, io.again = io.again, c
	io.counters.Resent++
	return nil
}

// refused deals with a command that the controller completed with an error. io.mu is held.
func (io *ioQueue) refused(c *command, s nvme.StatusCode) *blockdev.Request {
	delay, ok := c.q.ns.ctrl.retryDelay(s, int(c.retries))
	if ok && io.fail == nil && !c.q.ns.closed.Load() && c.q.ns.geometry.Load().err == nil {
		if c.retries < math.MaxUint16 {
			c.retries++
		}
		c.tick = io.now + delay
		c.next, io.again = io.again, c
		io.counters.Retried++
		return nil
	}
	return io.finish(c, statusError(c, s))
}

// pump sends what waits: commands to be sent again first, then the namespaces' requests in turn. Requests
// that end without being sent go to list. It says whether something was sent. io.mu is held.
func (io *ioQueue) pump(list *requestList) (sent bool) {
	if io.tq == nil {
		return false
	}
	sent = io.resend(list)
	for io.backlog != nil && io.inFlight < io.limit && io.free != nil {
		q := io.backlog.next // the first
		g := q.ns.geometry.Load()
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
		return false
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
		if err != nil {
			*rest, c.next = c.next, nil
			if r := io.finish(c, err); r != nil {
				list.push(r)
			}
			continue
		}
		if io.holdWrites && c.writes || int32(io.now-c.tick) < 0 {
			rest = &c.next
			continue
		}
		if io.inFlight >= io.limit || io.tq.Submit(&c.tr) != nil {
			break
		}
		*rest, c.next = c.next, nil
		c.tick, c.sent = io.now, true
		io.inFlight++
		sent = true
	}
	return sent
}

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

// abandon fails every request that waits, and until resume every new one, with err. Requests that the
// transport has end when it gives them back.
func (io *ioQueue) abandon(err error) {
	var list requestList
	io.mu.Lock()
	io.fail = err
	for _, q := range io.queues {
		io.abandonQueue(q, err, &list)
	}
	io.backlog = nil
	io.mu.Unlock()
	list.deliver()
}

// abandonQueue fails what waits on q. io.mu is held. q stays in the backlog, empty.
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
	q.next = nil
}

// remove fails what waits on q, a queue of a closed namespace, and returns a channel that is closed when the
// transport has none of its requests any more.
func (io *ioQueue) remove(q *nsQueue) <-chan struct{} {
	drained := make(chan struct{})
	var list requestList
	io.mu.Lock()
	io.unlist(q)
	io.abandonQueue(q, blockdev.ErrClosed, &list)
	io.queues = slices.DeleteFunc(io.queues, func(x *nsQueue) bool { return x == q })
	if q.used == 0 {
		close(drained)
	} else {
		q.drained = drained
	}
	io.mu.Unlock()
	list.deliver()
	return drained
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

// advanceClock counts a tick, sends what is due again, and says whether a command has been under way for at
// least limit ticks.
func (io *ioQueue) advanceClock(limit uint32) (late bool) {
	io.mu.Lock()
	io.now++
	due := io.again != nil
	if io.inFlight > 0 && io.tq != nil {
		for i := range io.commands {
			c := &io.commands[i]
			if c.sent && io.now-c.tick >= limit {
				late = true
				break
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
