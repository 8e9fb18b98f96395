package iwarp

import (
	"fmt"
	"math"

	"farblk/transport/verbs"
)

// PostSend adds work requests and sends what can be sent.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	if q.isClosed() {
		return 0, verbs.ErrClosed
	}
	t := &q.tx
	t.mu.Lock()
	n, err := q.enqueue(wrs)
	if n > 0 && !t.pending {
		q.pump()
	}
	t.mu.Unlock()
	if q.state.Load() == stateFailed {
		q.settle()
	}
	return n, err
}

func (q *qp) enqueue(wrs []verbs.SendWR) (int, error) {
	t := &q.tx
	for n := range wrs {
		w := &wrs[n]
		if q.cq.sends.Load() >= t.depth {
			return n, verbs.ErrQueueFull
		}
		if w.NumSGE < 0 || w.NumSGE > verbs.MaxSGE {
			return n, fmt.Errorf("work request %d: %d scatter/gather elements", n, w.NumSGE)
		}
		var need verbs.Access
		if w.Op == verbs.OpRDMARead {
			need = verbs.ReadSink // the peer gets no right by it here, but over adapters it does: ask for it alike
			if t.ord == 0 && q.state.Load() == stateUp {
				return n, fmt.Errorf("work request %d: %v, and the peer serves none: %w", n, w.Op, verbs.ErrUnsupported)
			}
		} else if w.Op > verbs.OpRDMARead {
			return n, fmt.Errorf("work request %d: %v in the send queue", n, w.Op)
		}
		length := 0
		for i := range w.SGEs[:w.NumSGE] {
			s := &w.SGEs[i]
			if len(s.Data) == 0 {
				continue
			}
			if err := q.checkSGE(&t.known, s, need); err != nil {
				return n, fmt.Errorf("work request %d: %w", n, err)
			}
			length += len(s.Data)
		}
		if length > math.MaxInt32 {
			return n, fmt.Errorf("work request %d: message of %d bytes", n, length)
		}
		e := &t.ring[t.tail&t.mask]
		e.wr, e.length, e.done, e.got = *w, length, false, 0
		t.tail++
		q.cq.sends.Add(1)
	}
	return len(wrs), nil
}

// completeSends takes finished entries off the head of the send queue.
func (q *qp) completeSends() {
	t := &q.tx
	for t.done != t.next {
		e := &t.ring[t.done&t.mask]
		if !e.done {
			return
		}
		if e.wr.Flags&verbs.Signaled != 0 {
			c := verbs.Completion{ID: e.wr.ID, Op: e.wr.Op}
			if e.wr.Op == verbs.OpRDMARead {
				c.Bytes = e.length
			}
			q.cq.push(&c)
		} else {
			q.cq.sends.Add(-1)
		}
		t.done++
	}
}

// flushSends completes everything in the send queue of a failed connection, under rx.mu and tx.mu.
func (q *qp) flushSends() {
	t := &q.tx
	status := t.failWith
	if status == verbs.StatusOK {
		status = verbs.StatusFlushed
	}
	for ; t.done != t.tail; t.done++ {
		e := &t.ring[t.done&t.mask]
		if e.done {
			status, t.failWith = verbs.StatusFlushed, verbs.StatusOK
			if e.wr.Flags&verbs.Signaled != 0 {
				q.cq.push(&verbs.Completion{ID: e.wr.ID, Op: e.wr.Op})
			} else {
				q.cq.sends.Add(-1)
			}
			continue
		}
		q.cq.push(&verbs.Completion{ID: e.wr.ID, Op: e.wr.Op, Status: status})
		status, t.failWith = verbs.StatusFlushed, verbs.StatusOK
	}
	t.next = t.tail
	t.readsOut = 0
	t.message = message{}
	t.answers = answers{}
	t.pending = false
}
