package iwarp

import (
	"io"
	"sync"
	"sync/atomic"
	"time"

	"farblk/transport/verbs"
)

// engine is what makes progress on a connection while nobody polls.
//
// One goroutine at a time sits at the socket, which means that it waits for it in Go's poller and makes progress
// when something comes: the one in QP.Wait, if there is one; else, when nobody has polled for a while, the engine's
// own goroutine. So the peer's RDMA Reads are answered, and its end of the stream is noticed, in any case, and
// while the owner polls, no other goroutine is woken for what comes. At the end the engine's goroutine closes
// the socket.
type engine struct {
	seat    sync.Mutex   // held by the one at the socket
	waiting atomic.Int32 // goroutines in Wait
	looking atomic.Bool  // the one at the socket will look at the notification before it sleeps

	mu     sync.Mutex // a leaf
	seated bool
	kicked bool // the read deadline is in the past, to make the one at the socket get up

	failed chan struct{} // closed by stop
	done   chan struct{} // closed when the socket is closed

	writing bool // a writer runs; under tx.mu
	writer  sync.WaitGroup

	waitStep func(uintptr) bool // made once: a closure for each Wait would be garbage
}

const (
	// idleCheck is after how long without Poll and Wait the engine's goroutine takes the seat; lazyCheck how
	// often it looks while another has it.
	idleCheck = 10 * time.Millisecond
	lazyCheck = 100 * time.Millisecond
	// lingerTime is how long a closed connection waits for the peer to take our last bytes and to end the stream.
	lingerTime = 200 * time.Millisecond
)

var past = time.Unix(1, 0)

func (e *engine) init(q *qp) {
	e.failed = make(chan struct{})
	e.done = make(chan struct{})
	enough := func() bool { return q.cq.notified() || q.isClosed() }
	e.waitStep = func(uintptr) bool { return e.attend(q, enough) }
}

// attend makes progress until the socket has nothing more, which is false, or the one at the socket has enough.
func (e *engine) attend(q *qp, enough func() bool) bool {
	for more := true; more; {
		e.looking.Store(true)
		q.rx.mu.Lock()
		more = q.progress()
		q.rx.mu.Unlock()
		e.looking.Store(false)
		if q.state.Load() != stateUp || enough() {
			return true
		}
	}
	return false
}

// sit takes the seat; whoever has it gets up.
func (e *engine) sit(q *qp) {
	if !e.seat.TryLock() {
		e.kick(q)
		e.seat.Lock()
	}
	e.mu.Lock()
	e.seated = true
	if e.kicked && q.state.Load() == stateUp {
		e.kicked = false
		_ = q.link.tcp.SetReadDeadline(time.Time{})
	}
	e.mu.Unlock()
}

func (e *engine) getUp() {
	e.mu.Lock()
	e.seated = false
	e.mu.Unlock()
	e.seat.Unlock()
}

// kick makes the one at the socket get up.
func (e *engine) kick(q *qp) {
	e.mu.Lock()
	if e.seated && !e.kicked {
		e.kicked = true
		_ = q.link.tcp.SetReadDeadline(past)
	}
	e.mu.Unlock()
}

// notified makes the one in Wait look at the notification.
func (e *engine) notified(q *qp) {
	if e.waiting.Load() > 0 && !e.looking.Load() {
		e.kick(q)
	}
}

// stop calls the engine to close the connection. It is called once, after the state has changed.
func (e *engine) stop(q *qp) {
	e.mu.Lock()
	e.kicked = true
	_ = q.link.tcp.SetDeadline(past)
	e.mu.Unlock()
	close(e.failed)
}

// Wait blocks until an armed notification has come.
func (q *qp) Wait() error {
	e := &q.engine
	e.waiting.Add(1)
	defer e.waiting.Add(-1)
	for q.state.Load() == stateUp && !q.isClosed() && !q.cq.notified() {
		e.sit(q)
		_ = q.link.raw.Read(e.waitStep) // fails when kicked
		e.getUp()
	}
	// Notified; or without a connection, where only a flush and Close can make a difference.
	select {
	case <-q.closed:
		return verbs.ErrClosed
	case <-q.cq.notify:
		if q.isClosed() {
			return verbs.ErrClosed
		}
		return nil
	}
}

// run is the engine's goroutine.
func (e *engine) run(q *qp) {
	defer close(e.done)
	seen := q.polls.Load()
	enough := func() bool { return e.waiting.Load() > 0 || q.polls.Load() != seen }
	step := func(uintptr) bool { return e.attend(q, enough) }
	timer := time.NewTimer(idleCheck)
	defer timer.Stop()
	for q.state.Load() == stateUp {
		select {
		case <-e.failed:
		case <-timer.C:
			switch now := q.polls.Load(); {
			case e.waiting.Load() > 0:
				timer.Reset(lazyCheck)
			case now != seen:
				timer.Reset(idleCheck)
				seen = now
			default:
				e.sit(q)
				_ = q.link.raw.Read(step)
				e.getUp()
				timer.Reset(idleCheck)
			}
		}
	}
	<-e.failed
	q.settle()
	e.close(q)
}

// close closes the socket. Before that it waits, for lingerTime at most, for the peer's end of the stream, and until
// the peer has acknowledged all data. If it has not, the connection is reset: what is left in the socket would
// otherwise be sent for userTimeout to come, when others think that nothing does so any more.
func (e *engine) close(q *qp) {
	e.writer.Wait() // none starts any more: the state is not up
	e.seat.Lock()   // nor does anyone sit down for long
	defer e.seat.Unlock()
	if !q.tx.cut {
		end := time.Now().Add(lingerTime)
		_ = q.link.tcp.SetReadDeadline(end)
		_, err := io.CopyN(io.Discard, q.link.tcp, 1<<20)
		sent := q.link.acknowledged()
		for (err == nil || err == io.EOF) && !sent && time.Now().Before(end) {
			time.Sleep(time.Millisecond) // an acknowledgement wakes nobody
			sent = q.link.acknowledged()
		}
		if sent {
			q.link.release()
		}
	}
	_ = q.link.tcp.Close()
}

// writeLater writes what a full socket left over. tx.mu is held.
func (e *engine) writeLater(q *qp) {
	if e.writing {
		return
	}
	e.writing = true
	e.writer.Go(func() {
		// The result does not matter: the wait fails only when stop was called.
		_ = q.link.raw.Write(func(uintptr) bool {
			q.tx.mu.Lock()
			defer q.tx.mu.Unlock()
			q.pump()
			e.writing = q.state.Load() == stateUp && q.tx.pending
			return !e.writing
		})
	})
}
