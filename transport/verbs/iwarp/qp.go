package iwarp

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

// qp is a queue pair on one TCP connection.
//
// Lock order: rx.mu, tx.mu, then the leaves rq.mu, cq.mu and pd.mu. Memory of work requests is touched only
// under rx.mu (receives, read data) or tx.mu (transmissions), and only in state up: whoever has changed the state
// and then held both locks knows that nothing touches it any more.
type qp struct {
	pd *pd
	cq completions
	rq recvQueue
	tx transmitter
	rx receiver

	state  atomic.Int32
	link   link // set once, before the state becomes up
	conn   *conn
	polls  atomic.Uint32 // counts calls of Poll, for the engine
	engine engine

	closed chan struct{} // Close was called
	isShut atomic.Bool   // the same, for the data path
}

// States of a qp.
const (
	stateIdle   = iota // no connection yet
	stateUp            //
	stateFailed        // the connection is gone, or going; outstanding work requests are flushed
)

// terms are what the handshake settled.
type terms struct {
	outcome   mpa.Outcome
	initiator bool
	ulpdu     int // largest ULPDU to send
}

func newQP(c *conn, p *pd, cfg verbs.QPConfig) (*qp, error) {
	if cfg.SendDepth < 1 || cfg.RecvDepth < 1 || cfg.SendDepth > maxQPDepth || cfg.RecvDepth > maxQPDepth {
		return nil, fmt.Errorf("queue pair of %d sends and %d receives: depths are 1 to %d", cfg.SendDepth, cfg.RecvDepth, maxQPDepth)
	}
	q := &qp{pd: p, conn: c, closed: make(chan struct{})}
	q.cq.init(cfg.SendDepth + cfg.RecvDepth)
	q.rq.ring = make([]verbs.RecvWR, cfg.RecvDepth)
	q.tx.init(cfg.SendDepth)
	q.rx.buf = make([]byte, streamBuffer)
	q.engine.init(q)
	q.cq.wake = func() { q.engine.notified(q) }
	return q, nil
}

// start brings the queue pair up on an established link.
func (q *qp) start(l link, t terms) error {
	q.rx.mu.Lock()
	q.tx.mu.Lock()
	q.link = l
	q.rx.crc = t.outcome.CRC
	q.tx.start(t)
	if !t.initiator {
		q.rx.awaitRTR = t.outcome.RTR
	}
	ok := q.state.CompareAndSwap(stateIdle, stateUp)
	if ok && t.initiator && t.outcome.RTR != 0 {
		q.queueRTR(t.outcome.RTR)
	}
	if ok {
		q.pump()
	}
	q.tx.mu.Unlock()
	q.rx.mu.Unlock()
	if !ok {
		return verbs.ErrClosed
	}
	go q.engine.run(q)
	return nil
}

// markFailed ends the connection with a cause, once. Whoever calls it calls settle afterwards, or lets the engine.
func (q *qp) markFailed(cause error) {
	if q.state.CompareAndSwap(stateUp, stateFailed) {
		q.conn.end(cause)
		q.engine.stop(q)
	}
}

// settle flushes every outstanding work request of a failed queue pair. No lock is held.
func (q *qp) settle() {
	q.rx.mu.Lock()
	q.settleLocked()
	q.rx.mu.Unlock()
}

// settleLocked is settle with rx.mu held.
func (q *qp) settleLocked() {
	q.rx.abandon()
	if q.rx.haveRecv {
		q.rx.haveRecv = false
		q.completeRecv(&q.rx.recv, verbs.StatusFlushed, 0)
	}
	for {
		w, ok := q.rq.pop()
		if !ok {
			break
		}
		q.completeRecv(&w, verbs.StatusFlushed, 0)
	}
	q.tx.mu.Lock()
	q.flushSends()
	q.tx.mu.Unlock()
}

func (q *qp) completeRecv(w *verbs.RecvWR, s verbs.Status, n int) {
	q.cq.push(&verbs.Completion{ID: w.ID, Op: verbs.OpRecv, Status: s, Bytes: n})
}

// recvQueue holds the posted receives.
type recvQueue struct {
	mu    sync.Mutex
	ring  []verbs.RecvWR
	head  int
	count int
	known *region // of the last receive posted: most use the same
}

func (r *recvQueue) pop() (w verbs.RecvWR, ok bool) {
	r.mu.Lock()
	if r.count > 0 {
		w, ok = r.ring[r.head], true
		if r.head++; r.head == len(r.ring) {
			r.head = 0
		}
		r.count--
	}
	r.mu.Unlock()
	return w, ok
}

// PostRecv adds receive buffers.
func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if q.isClosed() {
		return 0, verbs.ErrClosed
	}
	n, err := q.postRecv(wrs)
	if q.state.Load() == stateFailed {
		q.settle()
	}
	return n, err
}

func (q *qp) postRecv(wrs []verbs.RecvWR) (int, error) {
	r := &q.rq
	r.mu.Lock()
	defer r.mu.Unlock()
	for n := range wrs {
		if int(q.cq.recvs.Load()) >= len(r.ring) {
			return n, verbs.ErrQueueFull
		}
		w := &wrs[n]
		if len(w.SGE.Data) > 0 {
			if err := q.checkSGE(&r.known, &w.SGE, verbs.LocalWrite); err != nil {
				return n, fmt.Errorf("receive %d: %w", n, err)
			}
		}
		i := r.head + r.count
		if i >= len(r.ring) {
			i -= len(r.ring)
		}
		r.ring[i] = *w
		r.count++
		q.cq.recvs.Add(1)
	}
	return len(wrs), nil
}

var (
	errLKey     = errors.New("no such local memory key")
	errOutside  = errors.New("memory outside the region of its local key")
	errNoAccess = errors.New("the region does not allow that data is placed there so")
)

// checkSGE makes sure that the memory belongs to the key. known caches the last region.
func (q *qp) checkSGE(known **region, s *verbs.SGE, need verbs.Access) error {
	r := *known
	if r == nil || r.key != s.LKey || r.use.Load()&ended != 0 {
		if r = q.pd.find(s.LKey); r == nil || r.window {
			return errLKey
		}
		*known = r
	}
	if !r.holds(s.Data) {
		return errOutside
	}
	if r.access&need != need {
		return errNoAccess
	}
	return nil
}

// Poll makes progress on the socket when no completion is at hand, and takes completions.
func (q *qp) Poll(cs []verbs.Completion) (int, error) {
	if len(cs) == 0 {
		return 0, nil
	}
	if q.isClosed() {
		return 0, verbs.ErrClosed
	}
	if n := q.cq.take(cs); n > 0 {
		return n, nil
	}
	q.polls.Add(1)
	if q.rx.mu.TryLock() { // else the engine is at it
		q.progress()
		q.rx.mu.Unlock()
	}
	return q.cq.take(cs), nil
}

// Arm asks for one notification.
func (q *qp) Arm() error {
	if q.isClosed() {
		return verbs.ErrClosed
	}
	q.cq.arm()
	return nil
}

// Close ends the connection and everything on it. What the socket holds by then may still be sent until Conn.Close has
// returned.
func (q *qp) Close() error {
	if q.isShut.CompareAndSwap(false, true) {
		close(q.closed)
		q.engine.kick(q)
	}
	for !q.state.CompareAndSwap(stateIdle, stateFailed) && q.state.Load() != stateFailed {
		q.disconnect(verbs.ErrClosed)
	}
	q.settle()
	return nil
}

func (q *qp) isClosed() bool { return q.isShut.Load() }
