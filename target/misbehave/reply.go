package misbehave

import (
	"encoding/binary"
	"fmt"
	"time"

	"farblk/host/nvme"
	"farblk/transport/verbs"

	"golang.org/x/sys/unix"
)

// reply is a command's data and response in memory of its own, so that they can
// be changed, and leave when the script says.
type reply struct {
	wrs   []verbs.SendWR // RDMA WRITEs, then the responses
	mem   []byte
	mr    verbs.MR
	under int  // work requests not completed
	wait  int  // later responses to wait for
	fresh bool // its own response is not a later one
}

// carryOut applies a plan to a response and its data, and returns the work
// requests to be posted now.
func (q *qp) carryOut(p plan, wrs []verbs.SendWR) []verbs.SendWR {
	r, data, cqe, err := q.newReply(wrs)
	if err != nil {
		go q.conn.Disconnect()
		return nil
	}
	var delay time.Duration
	drop := false
	for _, a := range p.actions {
		switch a.verb {
		case "delay":
			delay = max(delay, a.d)
		case "reorder":
			r.wait, r.fresh = int(a.n), true
		case "drop":
			drop = true
		case "duplicate":
			r.wrs = append(r.wrs, r.wrs[len(r.wrs)-1])
		default:
			q.edit(r, a, &p.command, data, cqe)
		}
	}
	if drop {
		for len(r.wrs) > 0 && isSend(r.wrs[len(r.wrs)-1].Op) {
			r.wrs = r.wrs[:len(r.wrs)-1]
		}
		if len(r.wrs) == 0 {
			q.discard(r)
			return nil
		}
	}
	switch {
	case delay > 0:
		q.after(delay, func() {
			if _, err := q.inner.PostSend(q.send(r)); err != nil {
				go q.conn.Disconnect()
			}
		})
		return nil
	case r.wait > 0:
		q.later = append(q.later, r)
		return nil
	}
	return q.send(r)
}

func isSend(op verbs.Opcode) bool { return op == verbs.OpSend || op == verbs.OpSendInvalidate }

// edit changes what a reply says.
func (q *qp) edit(r *reply, a action, c *nvme.Command, data []byte, cqe *nvme.Completion) {
	writes := r.writes()
	switch a.verb {
	case "status":
		cqe.SetStatus(nvme.StatusCode(a.n))
	case "result":
		binary.LittleEndian.PutUint32(cqe[:], uint32(a.n))
	case "cid":
		cqe.SetCID(uint16(a.n))
	case "unknown-cid":
		cqe.SetCID(^cqe.CID())
	case "stale-cid":
		cqe.SetCID(q.lastCID)
	case "sqhd":
		cqe.SetSQHD(uint16(a.n))
	case "invalidate":
		for i := range r.wrs {
			if isSend(r.wrs[i].Op) {
				r.wrs[i].Op, r.wrs[i].RKey = verbs.OpSendInvalidate, c.SGL().Key
			}
		}
	case "corrupt":
		if len(data) > 0 {
			data[len(data)/2] ^= 0x10
		}
	case "short":
		for i := range writes {
			d := &writes[i].SGEs[0].Data
			*d = (*d)[:len(*d)/2]
		}
	case "overrun":
		if n := len(writes); n > 0 {
			w := writes[n-1]
			w.RemoteAddr += uint64(len(w.SGEs[0].Data))
			w.SGEs[0].Data = data[:min(int(a.n), len(data))]
			r.wrs = append(r.wrs[:n:n], append([]verbs.SendWR{w}, r.wrs[n:]...)...)
		}
	case "bad-key":
		for i := range writes {
			writes[i].RKey ^= 0x00FFFF00
		}
	case "patch":
		if a.n < uint64(len(data)) {
			copy(data[a.n:], a.bytes)
		}
	case "swap-nguid":
		swapIdentity(c, data)
	case "records":
		if c.LogID() == nvme.LogDiscovery && c.LogOffset() == 0 && len(data) >= 16 {
			binary.LittleEndian.PutUint64(data[8:], a.n)
		}
	}
}

// writes returns the RDMA WRITEs at the front of a reply.
func (r *reply) writes() []verbs.SendWR {
	n := 0
	for n < len(r.wrs) && r.wrs[n].Op == verbs.OpRDMAWrite {
		n++
	}
	return r.wrs[:n]
}

// swapIdentity inverts the NGUID and UUID in Identify data.
func swapIdentity(c *nvme.Command, data []byte) {
	if len(data) < nvme.IdentifySize {
		return
	}
	switch c.CNS() {
	case nvme.CNSNamespace:
		invert(data[104:120])
	case nvme.CNSNamespaceDescriptors:
		d, err := nvme.ParseNamespaceIDs(data)
		if err != nil {
			return
		}
		invert(d.NGUID[:])
		invert(d.UUID[:])
		copy(data, d.Append(nil))
	}
}

func invert(b []byte) {
	for i := range b {
		b[i] ^= 0xFF
	}
}

// newReply copies a response and its data.
func (q *qp) newReply(wrs []verbs.SendWR) (r *reply, data []byte, cqe *nvme.Completion, err error) {
	n := 0
	for i := range wrs {
		for _, s := range wrs[i].SGEs[:wrs[i].NumSGE] {
			n += len(s.Data)
		}
	}
	r = &reply{}
	if r.mem, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return nil, nil, nil, fmt.Errorf("misbehave: %d bytes for a reply: %w", n, err)
	}
	if r.mr, err = q.pd.Register(r.mem, 0); err != nil {
		unix.Munmap(r.mem)
		return nil, nil, nil, fmt.Errorf("misbehave: registering a reply: %w", err)
	}
	q.replies[r] = struct{}{}
	at := 0
	for _, w := range wrs {
		start := at
		for _, s := range w.SGEs[:w.NumSGE] {
			at += copy(r.mem[at:], s.Data)
		}
		w.NumSGE = 1
		w.SGEs = [verbs.MaxSGE]verbs.SGE{{Data: r.mem[start:at], LKey: r.mr.LKey()}}
		r.wrs = append(r.wrs, w)
		if isSend(w.Op) {
			cqe = (*nvme.Completion)(r.mem[start:at])
			data = r.mem[:start]
		}
	}
	return r, data, cqe, nil
}

// send returns a reply's work requests, with IDs of ours.
func (q *qp) send(r *reply) []verbs.SendWR {
	r.under = len(r.wrs)
	out := make([]verbs.SendWR, 0, len(r.wrs))
	for _, w := range r.wrs {
		out = append(out, q.track(w, &sent{reply: r}))
	}
	return out
}

// release takes note that one work request of a reply is done.
func (q *qp) release(r *reply) {
	if r.under--; r.under == 0 {
		q.discard(r)
	}
}

func (q *qp) discard(r *reply) {
	r.unmap()
	delete(q.replies, r)
}

func (r *reply) unmap() {
	r.mr.Close()
	unix.Munmap(r.mem)
}
