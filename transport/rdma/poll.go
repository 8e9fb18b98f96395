package rdma

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"farblk/transport"
	"farblk/transport/verbs"
)

// Poll implements transport.Queue.
//
// Between two looks it yields the processor: a poller that never does starves the soft interrupt or the
// kernel thread that would bring the completion, on the machine's last free core by 20 ms a message.
func (q *queue) Poll(wait time.Duration) int {
	q.post()
	q.owned.Store(false) // before the look at outstanding: see Kick, which looks in the other order
	if q.outstanding.Load() == 0 {
		return 0
	}
	for {
		q.missed.Store(true)
		if !q.pollMu.TryLock() {
			return 0
		}
		q.missed.Store(false)
		n := q.pollLocked(wait)
		q.pollMu.Unlock()
		if n > 0 || wait < 0 || !q.missed.Load() {
			return n
		}
		wait = 0
	}
}

// pollLocked is one Poll. It leaves the queue owned when the caller has to poll again. pollMu is held.
func (q *queue) pollLocked(wait time.Duration) int {
	q.owned.Store(true)
	n := q.complete()
	if n == 0 && wait > 0 {
		n = q.spin(wait)
	}
	if n == 0 && wait >= 0 {
		if n = q.handOver(); n == 0 {
			q.owned.Store(false)
		}
	}
	return n
}

// spin polls until something was completed, for at most wait. pollMu is held.
func (q *queue) spin(wait time.Duration) int {
	deadline := time.Now().Add(wait)
	for i := 1; ; i++ {
		if n := q.complete(); n > 0 {
			return n
		}
		if q.outstanding.Load() == 0 || q.isFailing() {
			return 0
		}
		unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		if i%16 == 0 {
			runtime.Gosched()
		}
		if i%4 == 0 && time.Now().After(deadline) {
			return 0
		}
	}
}

// handOver leaves the queue to run, and completes what came before it began to watch. pollMu is held.
func (q *queue) handOver() int {
	if !q.armed {
		q.armed = true
		q.arm()
	}
	return q.complete()
}

func (q *queue) isFailing() bool {
	select {
	case <-q.failing:
		return true
	default:
		return false
	}
}

// run completes requests when nobody polls: it sleeps until the device's event, then empties the completion
// queue, and asks for the next event.
func (q *queue) run() {
	defer close(q.running)
	for {
		if err := q.qp.Wait(); err != nil {
			q.lose(err)
			return
		}
		if q.isFailing() {
			return
		}
		q.events.Add(1)
		q.pollMu.Lock()
		q.armed = false
		q.watchLocked()
		q.pollMu.Unlock()
		for q.missed.Load() {
			q.pollMu.Lock()
			q.watchLocked()
			q.pollMu.Unlock()
		}
	}
}

// watchLocked completes what there is and arms the queue, unless its owner will. pollMu is held.
func (q *queue) watchLocked() {
	if missed := q.missed.Swap(false); q.owned.Load() && !missed {
		return
	}
	q.owned.Store(true)
	for {
		q.post()
		if q.complete() == 0 && q.handOver() == 0 {
			break
		}
	}
	q.owned.Store(false)
}

// drain completes what has come, after the connection has gone.
func (q *queue) drain() {
	q.pollMu.Lock()
	defer q.pollMu.Unlock()
	for q.complete() > 0 {
	}
}

// complete takes completions until commands have ended, and returns how many. Only 0 says that the completion
// queue was empty: a whole batch may be sends, whose commands still wait for their responses. pollMu is held.
func (q *queue) complete() int {
	for {
		if taken, ended := q.reap(); ended > 0 || taken == 0 {
			return ended
		}
	}
}

// reap takes one batch of completions and calls Done of the commands that ended. pollMu is held.
func (q *queue) reap() (taken, ended int) {
	n, err := q.qp.Poll(q.wc[:])
	if err != nil {
		q.lose(err)
		return 0, 0
	}
	if n == 0 {
		return 0, 0
	}
	q.polls.Add(1)
	q.ended = q.ended[:0]
	q.recvs = q.recvs[:0]
	var cause error
	q.mu.Lock()
	for i := range q.wc[:n] {
		if err := q.completion(&q.wc[i]); err != nil && cause == nil {
			cause = err
		}
	}
	q.mu.Unlock()
	if cause == nil && len(q.recvs) > 0 {
		// Before any Done: a new command must find a receive for its response.
		if _, err := q.qp.PostRecv(q.recvs); err != nil {
			q.lose(err)
		}
	}
	if cause != nil {
		q.end(&transport.LostError{Cause: cause})
	}
	q.outstanding.Add(-int32(len(q.ended)))
	for _, r := range q.ended {
		r.Done(r)
	}
	return n, len(q.ended)
}

// completion handles one work completion. mu and pollMu are held. An error ends the queue.
func (q *queue) completion(c *verbs.Completion) error {
	switch {
	case c.Status == verbs.StatusFlushed:
		return nil // the connection is ending; watch deals with the commands
	case c.Status != verbs.StatusOK && c.VendorError != 0:
		return fmt.Errorf("%s failed: %s (device code %#x)", c.Op, c.Status, c.VendorError)
	case c.Status != verbs.StatusOK:
		return fmt.Errorf("%s failed: %s", c.Op, c.Status)
	case c.ID&recvID == 0:
		i := uint16(c.ID)
		q.slots[i].sent = true
		q.finish(i)
		return nil
	}
	q.recvs = append(q.recvs, q.recvWR(c.ID&^uint64(recvID)))
	if c.Bytes < completionLen {
		return &transport.ProtocolError{Detail: fmt.Sprintf("a response of %d bytes", c.Bytes)}
	}
	b := q.response(c.ID &^ uint64(recvID))
	cid := binary.LittleEndian.Uint16(b[12:])
	i := cid & (1<<q.indexBits - 1)
	if int(i) >= len(q.slots) {
		return &transport.ProtocolError{Detail: fmt.Sprintf("a response to unknown command %#04x", cid)}
	}
	s := &q.slots[i]
	switch {
	case s.req == nil || s.responded:
		return &transport.ProtocolError{Detail: fmt.Sprintf("a response to command %#04x, which is not under way", cid)}
	case cid != q.cid(i, s.gen):
		return &transport.ProtocolError{Detail: fmt.Sprintf("a response to command %#04x, an earlier use of a live slot", cid)}
	case c.Invalidated && s.window != nil && (!s.keyBound || c.InvalidatedKey != s.key):
		return &transport.ProtocolError{Detail: "a response invalidated another command's key"}
	}
	copy(s.req.Completion[:], b)
	s.responded = true
	q.finish(i)
	return nil
}

// finish ends a command whose send completion and response have both been seen. mu is held.
func (q *queue) finish(i uint16) {
	s := &q.slots[i]
	if !s.sent || !s.responded {
		return
	}
	r := s.req
	if s.keyBound {
		// The data may not change under the caller: the key dies before Done, if the target has not ended it.
		s.keyBound = false
		if err := s.window.Invalidate(); err != nil {
			s.err = err
		}
	}
	r.Err = s.err
	s.req = nil
	q.free = append(q.free, i)
	q.ended = append(q.ended, r)
}
