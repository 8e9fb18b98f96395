package iwarp

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// engine is the goroutine of one connection. It makes progress while nobody polls: it waits for the socket in
// Go's poller, serves the peer's RDMA Reads and wakes Wait. While somebody polls it keeps out of the way and only
// looks every idleCheck whether they still do. At the end it closes the socket.
type engine struct {
	waiting atomic.Int32  // goroutines in Wait
	away    atomic.Bool   // the engine is not at the socket
	wake    chan struct{} // capacity 1: back to the socket
	failed  chan struct{} // closed by stop
	done    chan struct{} // closed when the socket is closed
	writing bool          // a writer runs; under tx.mu
	writer  sync.WaitGroup
}

const (
	idleCheck = 10 * time.Millisecond
	// lingerTime is how long a closed connection waits for the peer's end of the stream, so that the kernel
	// does not reset it with our last bytes unread.
	lingerTime = 200 * time.Millisecond
)

func (e *engine) init() {
	e.wake = make(chan struct{}, 1)
	e.failed = make(chan struct{})
	e.done = make(chan struct{})
}

// stop calls the engine to close the connection. It is called once.
func (e *engine) stop(q *qp) {
	close(e.failed)
	past := time.Unix(1, 0)
	_ = q.link.tcp.SetDeadline(past) // gets engine and writer out of the poller
}

// resume brings the engine to the socket, for a goroutine that waits.
func (e *engine) resume() {
	if e.away.Load() {
		select {
		case e.wake <- struct{}{}:
		default:
		}
	}
}

func (e *engine) run(q *qp) {
	defer close(e.done)
	seen := q.polls.Load()
	step := func(uintptr) bool {
		for more := true; more; {
			q.rx.mu.Lock()
			more = q.progress(true)
			q.rx.mu.Unlock()
		}
		if q.state.Load() != stateUp {
			return true
		}
		last := seen
		seen = q.polls.Load()
		return seen != last && e.waiting.Load() == 0
	}
	timer := time.NewTimer(idleCheck)
	defer timer.Stop()
	for q.state.Load() == stateUp {
		_ = q.link.raw.Read(step) // fails only when stop was called
		if q.state.Load() != stateUp {
			break
		}
		e.away.Store(true)
		for e.away.Load() {
			timer.Reset(idleCheck)
			if e.waiting.Load() > 0 {
				break
			}
			select {
			case <-e.wake:
				e.away.Store(false)
			case <-e.failed:
				e.away.Store(false)
			case <-timer.C:
				now := q.polls.Load()
				e.away.Store(now != seen)
				seen = now
			}
		}
		e.away.Store(false)
	}
	q.settle()
	e.close(q)
}

// close waits a little for the peer's end of the stream and closes the socket.
func (e *engine) close(q *qp) {
	e.writer.Wait() // none starts any more: the state is not up
	if !q.tx.cut {
		_ = q.link.tcp.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.CopyN(io.Discard, q.link.tcp, 1<<20)
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
