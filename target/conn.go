package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// serveConn answers one connection request and runs its queue to the end.
func (t *Target) serveConn(p *port, conn verbs.Conn) {
	log := t.log.With("port", p.id, "from", conn.RemoteAddr().String())
	req, silent, err := t.admit(conn)
	if err != nil {
		var reject *nvme.CMRejectError
		if !errors.As(err, &reject) {
			reject = &nvme.CMRejectError{Reason: nvme.RejectNoResources}
		}
		log.Log(t.ctx, t.rejectLevel(), "connection rejected", "qid", req.QID, "err", err)
		if err := conn.Reject(reject.Reason.Append(nil)); err != nil {
			log.Debug("sending the reject failed", "err", err)
		}
		conn.Close()
		return
	}
	if silent != nil {
		silent.kill(errors.New("no Connect command came, and another host needs the room"))
	}
	q, err := t.newQueue(p, conn, req)
	if err != nil {
		log.Error("no queue for a connection", "qid", req.QID, "err", err)
		_ = conn.Reject(nvme.RejectNoResources.Append(nil))
		conn.Close()
		t.vacate()
		return
	}
	q.log = log.With("qid", req.QID)
	err = t.enter(q)
	if err == nil {
		err = q.accept()
	}
	if err == nil {
		q.log.Debug("queue connected")
		err = q.run()
	}
	q.kill(err)
	q.finish()
	if !q.evicted.Load() { // else its room is another's
		t.vacate()
	}
	level := slog.LevelWarn
	if ordinary(q.cause()) {
		level = slog.LevelDebug
	}
	q.log.Log(t.ctx, level, "queue ended", "err", q.cause())
}

// warnEvery is how often at most a rejected connection is logged as a warning: whoever reaches the port can have any
// number of them.
const warnEvery = 10 * time.Second

func (t *Target) rejectLevel() slog.Level {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.warned.IsZero() && time.Since(t.warned) < warnEvery {
		return slog.LevelDebug
	}
	t.warned = time.Now()
	return slog.LevelWarn
}

// patience is how long a queue without Connect keeps its room when others need it.
const patience = time.Second

// admit checks a connection request's private data (RDMA 3.5), and takes one
// queue's room, which vacate gives back. When there is none it is that of silent,
// the queue that has kept us waiting longest, which must be ended first.
func (t *Target) admit(conn verbs.Conn) (req nvme.CMRequest, silent *queue, err error) {
	req, err = nvme.ParseCMRequest(conn.PrivateData())
	if err != nil {
		return req, nil, err
	}
	depth := t.cfg.QueueDepth
	if req.QID == 0 {
		depth = adminDepth
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	reason := nvme.RejectReason(0)
	switch {
	case int(req.QID) > t.cfg.IOQueues:
		reason = nvme.RejectQueueID
	case req.SQSize == 0 || int(req.SQSize)+1 > depth:
		reason = nvme.RejectSQSize
	case req.RQSize == 0:
		reason = nvme.RejectRQSize
	case conn.PeerParams().ResponderResources == 0:
		reason = nvme.RejectIRD
	case t.admitted >= t.cfg.MaxQueues:
		if silent = t.silent(); silent != nil {
			silent.evicted.Store(true)
			return req, silent, nil
		}
		reason = nvme.RejectNoResources
	}
	if reason != 0 {
		return req, nil, &nvme.CMRejectError{Reason: reason}
	}
	t.admitted++
	return req, nil, nil
}

// silent returns the queue that has been without Connect longest, and for longer than patience; t.mu is held.
func (t *Target) silent() (oldest *queue) {
	for q := range t.queues {
		if q.ctrl.Load() == nil && !q.evicted.Load() && time.Since(q.since) > patience &&
			(oldest == nil || q.since.Before(oldest.since)) {
			oldest = q
		}
	}
	return oldest
}

func (t *Target) vacate() {
	t.mu.Lock()
	t.admitted--
	t.mu.Unlock()
}

// enter registers the queue, so that Close finds it.
func (t *Target) enter(q *queue) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	t.queues[q] = struct{}{}
	return nil
}

func (q *queue) accept() error {
	ctx, cancel := context.WithTimeout(q.t.ctx, q.t.cfg.ConnectTimeout)
	defer cancel()
	ird := min(q.conn.PeerParams().InitiatorDepth, 16) // hosts have nothing to read from us
	err := q.conn.Accept(ctx, verbs.ConnParams{
		PrivateData:        nvme.CMAccept{RQSize: uint16(q.depth)}.Append(nil),
		ResponderResources: ird, InitiatorDepth: uint8(q.maxReads),
		RetryCount: 7, RNRRetryCount: 7,
	})
	if err != nil {
		return fmt.Errorf("accepting the connection: %w", err)
	}
	return nil
}
