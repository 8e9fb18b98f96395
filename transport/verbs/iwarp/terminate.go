package iwarp

import (
	"fmt"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// terminate answers a violation: a Terminate to the peer, as far as the socket takes it now, and the end of the
// connection. rx.mu is held.
func (q *qp) terminate(f *fault) {
	rx := &q.rx
	s := &rx.seg
	if f.term.Layer != rdmap.LayerLLP && s.ulpdu > 0 {
		f.term.Length = uint16(s.ulpdu)
		f.term.Header = s.raw[:s.h.Size()]
		if s.op == rdmap.ReadRequest && f.term.Layer == rdmap.LayerRDMA && rx.w-rx.r >= mpa.LengthSize+ddp.UntaggedSize+rdmap.ReadSize {
			f.term.Read = rx.buf[rx.r+mpa.LengthSize+ddp.UntaggedSize:][:rdmap.ReadSize]
		}
	}
	t := &q.tx
	t.mu.Lock()
	t.failWith = f.send
	if t.pending && q.flush() == 0 {
		q.finishBatch()
	}
	if !t.pending && !t.cut {
		t.reset()
		t.terminate(f.term)
		t.seal()
		t.pending = t.write(&q.link) != 0
	}
	t.mu.Unlock()
	if rx.haveRecv && f.recv != verbs.StatusOK {
		rx.haveRecv = false
		q.completeRecv(&rx.recv, f.recv, 0)
	}
	q.disconnect(fmt.Errorf("%w: the peer broke the protocol: %v", verbs.ErrDisconnected, &f.term))
	q.settleLocked()
}

// terminate adds the FPDU of a Terminate.
func (t *transmitter) terminate(term rdmap.Term) {
	h := ddp.Header{Last: true, Version: ddp.Version, ULP: rdmap.Control(rdmap.Terminate), QN: ddp.QueueTerminate, MSN: 1}
	t.small(&h, term.Append)
}

// terminateFPDU is a Terminate for a connection that never had a queue pair.
func terminateFPDU(term rdmap.Term, crc bool) []byte {
	t := transmitter{crc: crc}
	t.terminate(term)
	return t.headers
}

// disconnect ends the connection in order where the socket allows it now: after whole FPDUs. Otherwise by reset.
// Outstanding work requests are flushed by settle.
func (q *qp) disconnect(cause error) {
	t := &q.tx
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.state.Load() != stateUp {
		return
	}
	if t.pending && !t.cut && q.flush() == 0 {
		q.finishBatch()
	}
	if t.pending {
		t.cut = true
	} else {
		q.link.finish()
	}
	q.markFailed(cause)
}

// queueRTR sends the frame that lets the responder go ahead (RFC 6581 section 9.2). Nothing was sent before.
func (q *qp) queueRTR(kind mpa.RTR) {
	t := &q.tx
	t.reset()
	h := ddp.Header{Last: true, Version: ddp.Version}
	switch kind {
	case mpa.RTRWrite:
		h.Tagged, h.ULP = true, rdmap.Control(rdmap.Write)
		t.small(&h, nil)
	case mpa.RTRRead:
		h.ULP, h.QN, h.MSN = rdmap.Control(rdmap.ReadRequest), ddp.QueueRead, t.msn[ddp.QueueRead]
		t.msn[ddp.QueueRead]++
		t.rtrRead = true
		r := rdmap.Read{SinkSTag: t.sinkSTag, SinkTO: t.sinkTO}
		t.small(&h, r.Append)
	default:
		t.headers = append(t.headers, 0, 0)
		var crc uint32
		if t.crc {
			crc = mpa.Sum(0, t.headers)
		}
		t.headers = mpa.AppendTrailer(t.headers, 0, crc, t.crc)
	}
	t.seal()
	t.pending = true
}
