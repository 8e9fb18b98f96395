package misbehave

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// qp is a queue pair between the target and the real one. All work requests get
// its own IDs and are signaled, so that it can leave some out and add others;
// the target sees completions in its order, as if nothing had happened.
type qp struct {
	conn   *conn
	inner  verbs.QP
	pd     verbs.PD
	script *Script

	mu        sync.Mutex
	recvs     map[uint64]verbs.RecvWR // posted, by the target's ID
	order     []*sent                 // the target's sends that it has no completion for
	under     map[uint64]*sent        // sends under way, by our ID
	lastID    uint64
	ready     []verbs.Completion // for the target
	plans     map[uint16][]plan  // by command ID, oldest first
	later     []*reply           // wait for later responses
	lastCID   uint16
	blackhole bool
	stopped   bool
	timers    map[*time.Timer]struct{} // that have not gone off
	replies   map[*reply]struct{}      // that hold memory
	comps     [64]verbs.Completion

	wake    chan struct{} // capacity 1: ready has something
	pumping bool
	pumped  chan error // capacity 1: what the inner Wait returned
}

// sent is a work request of the target's, or (reply set) one of ours.
type sent struct {
	wr     verbs.Completion // ID and Op as the target will see them
	signal bool
	done   bool
	reply  *reply
}

// plan is what to do with one command's response.
type plan struct {
	command nvme.Command
	actions []action
}

func newQP(c *conn, inner verbs.QP, pd verbs.PD) *qp {
	return &qp{
		conn: c, inner: inner, pd: pd, script: c.script,
		recvs:   make(map[uint64]verbs.RecvWR),
		under:   make(map[uint64]*sent),
		plans:   make(map[uint16][]plan),
		timers:  make(map[*time.Timer]struct{}),
		replies: make(map[*reply]struct{}),
		wake:    make(chan struct{}, 1),
		pumped:  make(chan error, 1),
	}
}

// PostRecv notes where commands will arrive.
func (q *qp) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, w := range wrs {
		q.recvs[w.ID] = w
	}
	return q.inner.PostRecv(wrs)
}

// PostSend sends what no rule holds back.
func (q *qp) PostSend(wrs []verbs.SendWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var out, data []verbs.SendWR // to post; a response's RDMA WRITEs
	var entries []*sent
	for _, w := range wrs {
		e := &sent{wr: verbs.Completion{ID: w.ID, Op: w.Op}, signal: w.Flags&verbs.Signaled != 0}
		q.order = append(q.order, e)
		switch {
		case q.blackhole:
			continue
		case w.Op == verbs.OpRDMAWrite:
			data, entries = append(data, w), append(entries, e)
			continue
		case w.Op == verbs.OpRDMARead:
			out = append(out, q.track(w, e))
			continue
		}
		data, entries = append(data, w), append(entries, e)
		if p, ok := q.takePlan(&w); ok {
			out = append(out, q.carryOut(p, data)...)
			for _, e := range entries {
				e.done = true // the reply has its own copy
			}
		} else {
			for i := range data {
				out = append(out, q.track(data[i], entries[i]))
			}
		}
		out = append(out, q.responded(w.SGEs[0].Data)...)
		data, entries = data[:0], entries[:0]
	}
	for i := range data { // RDMA WRITEs whose response comes in a later chain
		out = append(out, q.track(data[i], entries[i]))
	}
	q.advance()
	if len(out) > 0 {
		if n, err := q.inner.PostSend(out); err != nil {
			return min(n, len(wrs)), err
		}
	}
	return len(wrs), nil
}

// track gives a work request an ID of ours.
func (q *qp) track(w verbs.SendWR, e *sent) verbs.SendWR {
	q.lastID++
	w.ID = q.lastID
	w.Flags |= verbs.Signaled
	q.under[w.ID] = e
	return w
}

// responded notes that a response was posted, and returns the work requests of
// those that waited for it.
func (q *qp) responded(cqe []byte) (out []verbs.SendWR) {
	q.lastCID = binary.LittleEndian.Uint16(cqe[12:])
	waiting := q.later
	q.later = nil
	for _, r := range waiting {
		if r.fresh {
			r.fresh = false
		} else {
			r.wait--
		}
		if r.wait == 0 {
			out = append(out, q.send(r)...)
		} else {
			q.later = append(q.later, r)
		}
	}
	return out
}

// advance hands the target the completions whose turn it is.
func (q *qp) advance() {
	for len(q.order) > 0 && q.order[0].done {
		if e := q.order[0]; e.signal || e.wr.Status != verbs.StatusOK {
			q.ready = append(q.ready, e.wr)
		}
		q.order = q.order[1:]
	}
	if len(q.ready) > 0 {
		q.poke()
	}
}

func (q *qp) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// Poll looks at every command before the target does.
func (q *qp) Poll(cs []verbs.Completion) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n, err := q.inner.Poll(q.comps[:])
	if err != nil {
		return 0, err
	}
	for _, c := range q.comps[:n] {
		if c.Op == verbs.OpRecv {
			q.arrived(c)
			continue
		}
		e := q.under[c.ID]
		delete(q.under, c.ID)
		if e.reply != nil {
			q.release(e.reply)
			if c.Status != verbs.StatusOK {
				q.ready = append(q.ready, verbs.Completion{Op: c.Op, Status: c.Status})
			}
			continue
		}
		e.done = true
		e.wr.Status, e.wr.VendorError, e.wr.Bytes = c.Status, c.VendorError, c.Bytes
	}
	q.advance()
	n = copy(cs, q.ready)
	q.ready = slices.Delete(q.ready, 0, n)
	return n, nil
}

// arrived passes a received command on, or not.
func (q *qp) arrived(c verbs.Completion) {
	wr := q.recvs[c.ID]
	if c.Status != verbs.StatusOK || c.Bytes < nvme.CommandSize {
		q.ready = append(q.ready, c)
		return
	}
	if q.blackhole {
		return
	}
	p := plan{command: nvme.Command(wr.SGE.Data)}
	var hold time.Duration
	for _, a := range q.script.command(q.conn.qid, &p.command) {
		switch a.verb {
		case "hold":
			hold = max(hold, a.d)
		case "ignore":
			_, _ = q.inner.PostRecv([]verbs.RecvWR{wr}) // the slot must not be lost; an error meets the next user too
			return
		case "close":
			q.blackhole = true
			go q.conn.Disconnect()
			return
		case "blackhole":
			q.blackhole = true
			return
		default:
			p.actions = append(p.actions, a)
		}
	}
	if p.actions != nil {
		cid := p.command.CID()
		q.plans[cid] = append(q.plans[cid], p)
	}
	if hold == 0 {
		q.ready = append(q.ready, c)
		return
	}
	q.after(hold, func() {
		q.ready = append(q.ready, c)
		q.poke()
	})
}

// after runs f, with the lock held as it is now, unless the queue has ended by then.
func (q *qp) after(d time.Duration, f func()) {
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		delete(q.timers, t)
		if !q.stopped && !q.blackhole {
			f()
		}
	})
	q.timers[t] = struct{}{}
}

func (q *qp) takePlan(w *verbs.SendWR) (plan, bool) {
	cid := binary.LittleEndian.Uint16(w.SGEs[0].Data[12:])
	list := q.plans[cid]
	if len(list) == 0 {
		return plan{}, false
	}
	if q.plans[cid] = list[1:]; len(list) == 1 {
		delete(q.plans, cid)
	}
	return list[0], true
}

// Arm asks the real queue pair; what the script adds needs no arming.
func (q *qp) Arm() error { return q.inner.Arm() }

// Wait ends when the real queue pair has something, or the script has.
func (q *qp) Wait() error {
	q.mu.Lock()
	if len(q.ready) > 0 {
		q.mu.Unlock()
		return nil
	}
	if !q.pumping {
		q.pumping = true
		go func() {
			err := q.inner.Wait()
			q.mu.Lock()
			q.pumping = false
			q.mu.Unlock()
			select {
			case q.pumped <- err:
			default: // an earlier result is still there
			}
		}()
	}
	q.mu.Unlock()
	select {
	case err := <-q.pumped:
		return err
	case <-q.wake:
		return nil
	}
}

// Close is the queue pair's; memory that the script holds is freed after it.
func (q *qp) Close() error {
	q.stop()
	err := q.inner.Close()
	q.free()
	return err
}

// stop ends all that is to happen later.
func (q *qp) stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stopped = true
	for t := range q.timers {
		t.Stop()
	}
}

// free gives back the memory of replies; the device no longer touches it.
func (q *qp) free() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for r := range q.replies {
		r.unmap()
	}
	clear(q.replies)
}
