package iwarp

import (
	"errors"
	"fmt"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

var (
	errEnded     = errors.New("the memory was taken away while the peer wrote to it")
	errReadEnded = errors.New("the memory was taken away while the peer read it")
)

// begin checks what every segment has in common. With the first one the responder may send.
func (q *qp) begin() *fault {
	s := &q.rx.seg
	version, op := rdmap.ParseControl(s.h.ULP)
	s.op = op
	if s.h.Version != ddp.Version {
		if s.h.Tagged {
			return ddpFault(ddp.TypeTagged, ddp.TaggedVersion)
		}
		return ddpFault(ddp.TypeUntagged, ddp.UntaggedVersion)
	}
	if version != rdmap.Version {
		return rdmaFault(rdmap.TypeOperation, rdmap.OperationVersion)
	}
	if op > rdmap.Terminate || s.h.Tagged != (op == rdmap.Write || op == rdmap.ReadResponse) {
		return rdmaFault(rdmap.TypeOperation, rdmap.OperationOpcode)
	}
	if !q.rx.begun {
		q.release()
	}
	return nil
}

// release lets the responder send, the initiator having done so.
func (q *qp) release() {
	q.rx.begun = true
	q.tx.mu.Lock()
	q.tx.hold = false
	q.tx.mu.Unlock()
}

// emptyFPDU is one without ULPDU: the RTR frame, if that was agreed (RFC 6581 section 9.2).
func (q *qp) emptyFPDU(b []byte) *fault {
	if q.rx.crc && !mpa.CheckTrailer(b[mpa.LengthSize:], mpa.Sum(0, b[:mpa.LengthSize])) {
		return mpaFault(mpa.CodeCRC)
	}
	if q.rx.begun || q.rx.awaitRTR != mpa.RTRFPDU {
		return ddpFault(ddp.TypeLocal, 0)
	}
	q.release()
	return nil
}

// placeable tells whether the segment's payload goes to memory of the program.
func (s *segment) placeable() bool { return s.op != rdmap.ReadRequest && s.op != rdmap.Terminate }

// target checks a segment and finds where its payload goes (RFC 5041 sections 5.4 and 7, RFC 5040 section 7).
func (q *qp) target() *fault {
	s := &q.rx.seg
	clear(s.into[:])
	s.window = source{}
	switch s.op {
	case rdmap.Write:
		return q.targetWrite()
	case rdmap.ReadResponse:
		return q.targetReadResponse()
	case rdmap.ReadRequest:
		return s.order(ddp.QueueRead, &q.rx.readRequests)
	case rdmap.Terminate:
		return s.order(ddp.QueueTerminate, &q.rx.terminates)
	default:
		return q.targetSend()
	}
}

// order checks an untagged segment's queue, message number and offset.
func (s *segment) order(queue uint32, state *ddp.Queue) *fault {
	if s.h.QN > ddp.QueueTerminate {
		return ddpFault(ddp.TypeUntagged, ddp.UntaggedQueue)
	}
	if s.h.QN != queue {
		return rdmaFault(rdmap.TypeOperation, rdmap.OperationOpcode)
	}
	if code, ok := state.Check(&s.h); !ok {
		return ddpFault(ddp.TypeUntagged, code)
	}
	return nil
}

func (q *qp) targetSend() *fault {
	rx := &q.rx
	s := &rx.seg
	if f := s.order(ddp.QueueSend, &rx.sends); f != nil {
		return f
	}
	if !rx.haveRecv {
		if rx.recv, rx.haveRecv = q.rq.pop(); !rx.haveRecv {
			return ddpFault(ddp.TypeUntagged, ddp.UntaggedNoBuffer)
		}
	}
	room := rx.recv.SGE.Data[rx.sends.Offset:]
	if s.size > len(room) {
		f := ddpFault(ddp.TypeUntagged, ddp.UntaggedTooLong)
		f.recv = verbs.StatusLocalLength
		return f
	}
	s.into[0] = room[:s.size]
	return nil
}

func (q *qp) targetWrite() *fault {
	s := &q.rx.seg
	if s.size == 0 {
		return nil // RFC 5040 section 5.2: no key is checked, nothing is placed
	}
	r := q.pd.find(s.h.STag)
	if r == nil || !r.enter(s.h.STag) {
		return ddpFault(ddp.TypeTagged, ddp.TaggedInvalidSTag)
	}
	defer r.exit()
	if r.access&verbs.RemoteWrite == 0 {
		return rdmaFault(rdmap.TypeProtection, rdmap.ProtectionAccess)
	}
	if s.h.TO+uint64(s.size) < s.h.TO {
		return ddpFault(ddp.TypeTagged, ddp.TaggedWrap)
	}
	b, ok := r.within(s.h.TO, uint64(s.size))
	if !ok {
		return ddpFault(ddp.TypeTagged, ddp.TaggedBounds)
	}
	s.into[0], s.window = b, source{r, s.h.STag}
	return nil
}

// targetReadResponse goes by our oldest RDMA READ, not by a key: the response must be the next bytes of exactly
// that one. The only key a peer sees for it names no memory at all.
func (q *qp) targetReadResponse() *fault {
	s := &q.rx.seg
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rtrRead && s.size == 0 && s.h.Last {
		return nil
	}
	if t.rtrRead || t.readsOut == 0 {
		f := rdmaFault(rdmap.TypeOperation, rdmap.OperationOpcode)
		f.send = verbs.StatusBadResponse
		return f
	}
	bad := func(code uint8) *fault {
		f := ddpFault(ddp.TypeTagged, code)
		f.send = verbs.StatusBadResponse
		return f
	}
	e := &t.ring[t.reads[t.readHead]&t.mask]
	if s.h.STag != t.sinkSTag {
		return bad(ddp.TaggedInvalidSTag)
	}
	left := e.length - e.got
	if s.h.TO != e.sinkTO+uint64(e.got) || s.size > left || s.h.Last != (s.size == left) {
		return bad(ddp.TaggedBounds)
	}
	skip, want := e.got, s.size
	for i := range e.wr.NumSGE {
		p := e.wr.SGEs[i].Data
		n := min(skip, len(p))
		p, skip = p[n:], skip-n
		n = min(want, len(p))
		s.into[i], want = p[:n], want-n
	}
	return nil
}

// control acts on a message that is not placed: an RDMA Read Request or a Terminate.
func (q *qp) control(b []byte) *fault {
	rx := &q.rx
	s := &rx.seg
	if s.op == rdmap.Terminate {
		t, ok := rdmap.ParseTerm(b)
		if !ok {
			q.disconnect(fmt.Errorf("%w, by a Terminate of %d bytes", verbs.ErrDisconnected, len(b)))
			return nil
		}
		q.terminated(&t)
		return nil
	}
	r, ok := rdmap.ParseRead(b)
	if !ok || !s.h.Last {
		return ddpFault(ddp.TypeUntagged, ddp.UntaggedTooLong)
	}
	rx.readRequests.Placed(len(b), true)
	a := answer{sinkSTag: r.SinkSTag, sinkTO: r.SinkTO}
	if r.Size > 0 {
		src := q.pd.find(r.SourceSTag)
		if src == nil || !src.enter(r.SourceSTag) {
			return rdmaFault(rdmap.TypeProtection, rdmap.ProtectionInvalidSTag)
		}
		defer src.exit()
		if src.access&verbs.RemoteRead == 0 {
			return rdmaFault(rdmap.TypeProtection, rdmap.ProtectionAccess)
		}
		if r.SourceTO+uint64(r.Size) < r.SourceTO || r.SinkTO+uint64(r.Size) < r.SinkTO {
			return rdmaFault(rdmap.TypeProtection, rdmap.ProtectionWrap)
		}
		if a.data, ok = src.within(r.SourceTO, uint64(r.Size)); !ok {
			return rdmaFault(rdmap.TypeProtection, rdmap.ProtectionBounds)
		}
		a.source = source{src, r.SourceSTag}
	}
	q.tx.mu.Lock()
	ok = q.tx.answers.add(a)
	q.tx.mu.Unlock()
	if !ok {
		return ddpFault(ddp.TypeUntagged, ddp.UntaggedNoBuffer)
	}
	return nil
}

// terminated ends the connection because the peer sent a Terminate.
func (q *qp) terminated(t *rdmap.Term) {
	status := verbs.StatusRemoteOperation
	switch {
	case t.Layer == rdmap.LayerRDMA && t.Type == rdmap.TypeProtection,
		t.Layer == rdmap.LayerDDP && t.Type == ddp.TypeTagged:
		status = verbs.StatusRemoteAccess
	case t.Layer == rdmap.LayerDDP && t.Type == ddp.TypeUntagged && t.Code == ddp.UntaggedTooLong:
		status = verbs.StatusRemoteInvalidRequest
	}
	q.tx.mu.Lock()
	q.tx.failWith = status
	q.tx.mu.Unlock()
	q.disconnect(fmt.Errorf("%w after it found an error of ours: %v", verbs.ErrDisconnected, t))
}

// deliver completes the segment under way, whose CRC was right.
func (q *qp) deliver() *fault {
	rx := &q.rx
	s := &rx.seg
	if s.h.Tagged {
		if s.size >= directFrom {
			rx.tagged += s.size
		}
		if s.h.Last {
			rx.large = rx.tagged >= largeMessage
			rx.tagged = 0
		}
		if s.op == rdmap.ReadResponse {
			q.readPlaced()
		}
		return nil
	}
	n := int(rx.sends.Offset) + s.size
	if s.h.Last {
		c := verbs.Completion{ID: rx.recv.ID, Op: verbs.OpRecv, Bytes: n}
		if s.op == rdmap.SendInvalidate || s.op == rdmap.SendSEInvalidate {
			if !q.invalidate(s.h.STag) {
				return rdmaFault(rdmap.TypeProtection, rdmap.ProtectionCannotInvalidate)
			}
			c.Invalidated, c.InvalidatedKey = true, s.h.STag
		}
		rx.haveRecv = false
		q.cq.push(&c)
	}
	rx.sends.Placed(s.size, s.h.Last)
	return nil
}

// invalidate ends a window's key for the peer. A region's own key cannot be ended so.
func (q *qp) invalidate(key uint32) bool {
	r := q.pd.find(key)
	return r != nil && r.window && r.end(key)
}

// readPlaced records a segment of the answer to the oldest RDMA READ.
func (q *qp) readPlaced() {
	s := &q.rx.seg
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rtrRead {
		t.rtrRead = false
		return
	}
	e := &t.ring[t.reads[t.readHead]&t.mask]
	e.got += s.size
	if !s.h.Last {
		return
	}
	e.done = true
	t.readHead = (t.readHead + 1) % maxReads
	t.readsOut--
	q.completeSends()
}
