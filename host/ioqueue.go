package host

import (
	"cmp"
	"errors"
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
	commands   []*command // as many as may be outstanding, and extra
	free       *command
	again      *command // to be sent (once more), linked by next
	// parked counts the commands in again of paused namespaces; extra records, at least as many, make up for them: the
	// other namespaces must not lack any.
	parked, extra int
	now           uint32   // ticks since the start
	moved         uint32   // when a command was last completed
	sent, passed  uint64   // how many commands were sent, and the newest of them, by command.order, that was completed
	ranges        [][]byte // free buffers for Dataset Management ranges
	// backlog is a ring of the nsQueues that have waiting requests, by nsQueue.next; it points at the last.
	backlog  *nsQueue
	queues   []*nsQueue    // one for each namespace
	idle     chan struct{} // closed when inFlight becomes 0
	counters QueueCounters
}

// command is the record of one command: (part of) a request.
type command struct {
	tr     transport.Request
	req    *blockdev.Request // nil: free
	q      *nsQueue
	next   *command
	ranges []byte // from ioQueue.ranges, for Dataset Management
	// For Dataset Management: what is still to be deallocated, in bytes, and how much of that in this round.
	off, left, piece int64
	tick             uint32 // when it was sent, or before when it is not to be sent again
	order            uint64 // by when it was sent, rising
	retries          uint16
	late             uint8 // how often it got no completion in time, and that cannot be for others before it
	writes           bool  // changes data
	sent             bool  // the transport has it
	parked           bool  // in ioQueue.parked, from when it cannot be sent again until it is
}

// nsQueue is a namespace's view of an ioQueue; a blockdev.Queue. All fields but ns and io belong to io.mu.
type nsQueue struct {
	ns *Namespace
	io *ioQueue
	// waiting requests have parts that are not sent yet. So have held ones, which wait until writes may run,
	// and discards, which wait for a buffer for their ranges and are not to keep others waiting.
	waiting, held, discards requestList
	next                    *nsQueue      // in io.backlog; nil: not in it, because nothing waits or ns is paused
	used                    int           // commands that belong to this namespace, sent or not
	drained                 chan struct{} // closed when used becomes 0
	// discard bounds a Dataset Management, in bytes, after a larger one took too long; 0: it has not. It rises again when
	// the controller is faster than it has to be.
	discard int64
	removed error // set: it is no more in io.queues, and requests fail with this
}

// newIOQueue makes the records for a queue with at most outstanding commands. rangeBuffers are in the pool.
func newIOQueue(outstanding int, rangeBuffers [][]byte) *ioQueue {
	io := &ioQueue{commands: make([]*command, 0, outstanding), ranges: rangeBuffers}
	records, done := make([]command, outstanding), io.done
	for i := range records {
		io.addRecord(&records[i], done)
	}
	return io
}

// addRecord adds a free record.
func (io *ioQueue) addRecord(c *command, done func(*transport.Request)) {
	io.commands = append(io.commands, c)
	c.tr.Done, c.tr.Owner = done, c
	c.next, io.free = io.free, c
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
	if err := q.removed; err != nil { // now that remove cannot overlook r
		io.mu.Unlock()
		r.Err = err
		r.Done(r)
		return
	}
	if r.Flags&blockdev.Continued != 0 {
		io.counters.Splits++
	}
	refused := false
	g = q.ns.geometry.Load() // as it is now that a pause cannot overlook r
	if io.backlog == nil && io.tq != nil && g.err == nil && g.paused == nil && !(io.holdWrites && writes(r.Op)) && io.issue(q, r, g) {
		r.Private.Pending--
		refused = r.Private.Pending == 0
	} else {
		q.wait(r, g)
	}
	io.mu.Unlock()
	if refused {
		r.Done(r)
	}
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

// issue sends as much of r as there are free records for, and says whether that was all, or that no more is to be sent
// because the transport refuses it, with r.Err. io.mu is held.
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
		n, more := g.fill(c, r, q.discard)
		if err := io.tq.Submit(&c.tr); err != nil {
			c.ranges, c.left, c.piece = nil, 0, 0
			if passes(err) {
				return false
			}
			r.Err = err
			return true
		}
		io.free, c.next = c.next, nil
		if c.ranges != nil {
			io.ranges = io.ranges[:len(io.ranges)-1]
		}
		c.req, c.q, c.retries, c.late = r, q, 0, 0
		q.used++
		io.isSent(c)
		r.Private.Progress += n
		r.Private.Pending++
		if !more {
			return true
		}
		io.counters.Splits++
	}
}

// isSent notes that the transport has c. io.mu is held.
func (io *ioQueue) isSent(c *command) {
	io.sent++
	io.inFlight++
	c.tick, c.order, c.sent = io.now, io.sent, true
}

// passes says whether what Submit refuses is to be tried again. Full: a completion comes, or the clock ticks. Lost:
// whoever watches the queue acts. Anything else would be the same each time.
func passes(err error) bool {
	var lost *transport.LostError
	return errors.Is(err, transport.ErrQueueFull) || errors.Is(err, transport.ErrClosed) || errors.As(err, &lost)
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
		io.moved, io.passed = io.now, max(io.passed, c.order)
		status := (*nvme.Completion)(&tr.Completion).Status()
		switch {
		case !status.OK():
			finished = io.refused(c, status)
		default:
			if c.piece > 0 && c.q.discard > 0 {
				io.raiseDiscard(c)
			}
			if c.left > c.piece {
				finished = io.nextPiece(c)
			} else {
				finished = io.finish(c, nil)
			}
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
	c.req, c.q, c.left, c.piece = nil, nil, 0, 0
	io.unpark(c)
	if io.extra > io.parked {
		io.extra--
		i := slices.Index(io.commands, c)
		io.commands = slices.Delete(io.commands, i, i+1)
	} else {
		c.next, io.free = io.free, c
	}
	if c.ranges != nil {
		io.ranges = append(io.ranges, c.ranges)
		c.ranges = nil
		io.restoreDiscard()
	}
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
// meanwhile or it has been late too often. io.mu is held.
func (io *ioQueue) lost(c *command) *blockdev.Request {
	io.wrote = io.wrote || c.writes
	err := cmp.Or(io.fail, c.q.removed)
	if err == nil && c.late >= maxLate {
		err = lateError(c)
	}
	if err != nil {
		return io.finish(c, err)
	}
	if d := c.q.discard; d > 0 && c.piece > d {
		c.q.ns.geometry.Load().fillRanges(c, d)
	}
	c.tick = io.now
	c.next, io.again = io.again, c
	io.counters.Resent++
	return nil
}

// raiseDiscard doubles the bound on deallocations after c, as large as that allows, took at most a quarter of the time
// that there is: then twice as much is done in time too. io.mu is held.
func (io *ioQueue) raiseDiscard(c *command) {
	ns := c.q.ns
	full := c.piece+int64(ns.Info().BlockSize) > c.q.discard
	if full && io.now-c.tick <= ns.ctrl.ticks(ns.ctrl.cfg.IOTimeout)/4 {
		c.q.discard *= 2
	}
}

// nextPiece goes on with a Dataset Management that was too much for one round. io.mu is held.
func (io *ioQueue) nextPiece(c *command) *blockdev.Request {
	g := c.q.ns.geometry.Load()
	if err := cmp.Or(io.fail, c.q.removed, g.err); err != nil {
		return io.finish(c, err)
	}
	c.off, c.left, c.late = c.off+c.piece, c.left-c.piece, 0
	g.fillRanges(c, c.q.discard)
	c.tick = io.now
	c.next, io.again = io.again, c
	io.counters.Splits++
	return nil
}

// refused deals with a command that the controller completed with an error. io.mu is held.
func (io *ioQueue) refused(c *command, s nvme.StatusCode) *blockdev.Request {
	delay, ok := c.q.ns.ctrl.retryDelay(s, int(c.retries))
	if ok && io.fail == nil && c.q.removed == nil && c.q.ns.geometry.Load().err == nil {
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
