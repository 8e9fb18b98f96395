//go:build cgo && linux

package rdmacm

/*
#include "shim.h"
#cgo noescape farblk_post_send
#cgo nocallback farblk_post_send
#cgo noescape farblk_post_recv
#cgo nocallback farblk_post_recv
#cgo noescape farblk_poll
#cgo nocallback farblk_poll
*/
import "C"

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"farblk/transport/verbs"
)

// sendOpcodes maps verbs.Opcode to enum ibv_wr_opcode.
var sendOpcodes = [...]uint32{
	verbs.OpSend: C.IBV_WR_SEND, verbs.OpSendInvalidate: C.IBV_WR_SEND_WITH_INV,
	verbs.OpRDMAWrite: C.IBV_WR_RDMA_WRITE, verbs.OpRDMARead: C.IBV_WR_RDMA_READ,
}

// sendFlags maps all combinations of verbs.SendFlags to enum ibv_send_flags.
var sendFlags = func() (m [8]C.uint) {
	for f := range m {
		if verbs.SendFlags(f)&verbs.Signaled != 0 {
			m[f] |= C.IBV_SEND_SIGNALED
		}
		if verbs.SendFlags(f)&verbs.Solicited != 0 {
			m[f] |= C.IBV_SEND_SOLICITED
		}
		if verbs.SendFlags(f)&verbs.Fence != 0 {
			m[f] |= C.IBV_SEND_FENCE
		}
	}
	return m
}()

// remote is struct ibv_send_wr's union for RDMA READ and WRITE.
type remote struct {
	addr uint64
	rkey uint32
}

// PostSend posts a chain.
func (q *queuePair) PostSend(wrs []verbs.SendWR) (int, error) {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	if err := q.postable(); err != nil {
		return 0, err
	}
	if !q.connected.Load() {
		return 0, errNotConnected
	}
	total := 0
	for todo := wrs[:min(len(wrs), q.sent.room())]; len(todo) > 0; {
		chain := todo[:min(len(todo), len(q.sends))]
		first := q.sent.posted.Load()
		owed := q.sent.owed.Load()
		for i := range chain {
			if err := q.fillSend(&q.sends[i], &chain[i], first+uint64(i)); err != nil {
				return total, err
			}
			if chain[i].Flags&verbs.Signaled != 0 {
				owed = first + uint64(i) + 1
			}
		}
		q.sent.posted.Store(first + uint64(len(chain))) // before the call: completions may come within it
		var n C.int
		r := C.farblk_post_send(q.qp, &q.sends[0], C.int(len(chain)), &n)
		total += int(n)
		if r != 0 {
			q.sent.posted.Store(first + uint64(n))
			return total, q.postError("ibv_post_send", int(-r))
		}
		q.sent.owed.Store(owed)
		todo = todo[n:]
	}
	if total < len(wrs) {
		return total, verbs.ErrQueueFull
	}
	return total, nil
}

// fillSend writes a work request in the device library's form, and its slot.
func (q *queuePair) fillSend(w *C.struct_farblk_send, s *verbs.SendWR, seq uint64) error {
	if int(s.Op) >= len(sendOpcodes) || uint(s.NumSGE) > verbs.MaxSGE {
		return fmt.Errorf("%w: send work request %d: %v with %d elements", syscall.EINVAL, s.ID, s.Op, s.NumSGE)
	}
	// An empty element is left out: to some devices a length of 0 means 2 GiB (IBA 9.4.3).
	n, bytes := 0, 0
	for i := range s.NumSGE {
		if data := s.SGEs[i].Data; len(data) > 0 {
			fillSGE(&w.sge[n], data, s.SGEs[i].LKey)
			n++
			bytes += len(data)
		}
	}
	wr := &w.wr
	wr.wr_id = C.uint64_t(seq)
	wr.num_sge = C.int(n)
	wr.opcode = sendOpcodes[s.Op]
	wr.send_flags = sendFlags[s.Flags&(verbs.Signaled|verbs.Solicited|verbs.Fence)]
	switch s.Op {
	case verbs.OpSendInvalidate:
		*(*uint32)(unsafe.Pointer(&wr.anon0)) = s.RKey
		*(*remote)(unsafe.Pointer(&wr.wr)) = remote{rkey: s.RKey} // where rdma-core's siw looks for the key
	case verbs.OpRDMARead, verbs.OpRDMAWrite:
		*(*remote)(unsafe.Pointer(&wr.wr)) = remote{addr: s.RemoteAddr, rkey: s.RKey}
	default:
	}
	*q.sent.at(seq) = slot{
		result:   verbs.Completion{ID: s.ID, Op: s.Op, Bytes: bytes},
		signaled: s.Flags&verbs.Signaled != 0,
	}
	return nil
}

func fillSGE(e *C.struct_ibv_sge, data []byte, lkey uint32) {
	e.addr, e.length, e.lkey = C.uint64_t(address(data)), C.uint32_t(len(data)), C.uint32_t(lkey)
}

// PostRecv posts receives.
func (q *queuePair) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if err := q.postable(); err != nil {
		return 0, err
	}
	total := 0
	for todo := wrs[:min(len(wrs), q.received.room())]; len(todo) > 0; {
		chain := todo[:min(len(todo), len(q.recvs))]
		first := q.received.posted.Load()
		for i := range chain {
			w, s, seq := &q.recvs[i], &chain[i], first+uint64(i)
			w.wr.wr_id = C.uint64_t(recvBit | seq)
			w.wr.num_sge = 0
			if len(s.SGE.Data) > 0 || q.conn.device.Link == verbs.LinkIWARP { // siw takes no receive without an element
				fillSGE(&w.sge[0], s.SGE.Data, s.SGE.LKey)
				w.wr.num_sge = 1
			}
			*q.received.at(seq) = slot{result: verbs.Completion{ID: s.ID, Op: verbs.OpRecv}, signaled: true}
		}
		q.received.posted.Store(first + uint64(len(chain)))
		var n C.int
		r := C.farblk_post_recv(q.qp, &q.recvs[0], C.int(len(chain)), &n)
		total += int(n)
		if r != 0 {
			q.received.posted.Store(first + uint64(n))
			return total, q.postError("ibv_post_recv", int(-r))
		}
		q.received.owed.Store(first + uint64(n))
		todo = todo[n:]
	}
	if total < len(wrs) {
		return total, verbs.ErrQueueFull
	}
	return total, nil
}

// postable tells why nothing can be posted, under the lock of a queue. What is posted to a queue pair in the error
// state would be flushed by most devices, but lost by siw.
func (q *queuePair) postable() error {
	switch {
	case q.gone || q.closing.Load():
		return verbs.ErrClosed
	case q.halted.Load():
		return verbs.ErrDisconnected
	default:
		return nil
	}
}

func (q *queuePair) postError(call string, errno int) error {
	if e := syscall.Errno(errno); e == syscall.ENOMEM || e == syscall.ENOSPC {
		return verbs.ErrQueueFull
	}
	return callError(call, errno, q.conn.device.Name)
}

// Poll takes completions with one call.
func (q *queuePair) Poll(cs []verbs.Completion) (int, error) {
	q.pollMu.Lock()
	defer q.pollMu.Unlock()
	if q.gone || q.closing.Load() {
		return 0, verbs.ErrClosed
	}
	n, err := q.reap(cs)
	if err == nil && n == 0 && len(cs) > 0 && q.halted.Load() {
		n = q.settle(cs)
	}
	return n, err
}

// reap takes what the device has completed. pollMu is held.
func (q *queuePair) reap(cs []verbs.Completion) (int, error) {
	n := q.give(cs, false) // what waited for its turn, and had no room last time
	if n == len(cs) {
		return n, nil
	}
	k := int(C.farblk_poll(q.cq, &q.wcs[0], C.int(min(len(cs)-n, pollMax))))
	if k < 0 {
		err := callError("ibv_poll_cq", -k, q.conn.device.Name)
		q.conn.fail(err)
		return n, err
	}
	for i := range q.wcs[:k] {
		wc := &q.wcs[i]
		r, seq := q.sent, uint64(wc.wr_id)
		if seq&recvBit != 0 {
			r, seq = q.received, seq&^recvBit
		}
		s := r.outstanding(seq)
		if s == nil {
			continue // refused when it was posted, or flushed by settle
		}
		c := &s.result
		switch {
		case wc.status != C.IBV_WC_SUCCESS:
			c.Status, c.VendorError, c.Bytes = workStatus(int(wc.status)), uint32(wc.vendor_err), 0
			q.broken(c)
		case c.Op == verbs.OpRecv:
			c.Bytes = int(wc.byte_len)
			if wc.wc_flags&C.IBV_WC_WITH_INV != 0 {
				c.Invalidated, c.InvalidatedKey = true, *(*uint32)(unsafe.Pointer(&wc.anon0))
			}
		}
		r.finish(seq)
		for n < len(cs) && r.next(&cs[n], false) {
			n++
		}
	}
	return n, nil
}

// give hands out completions that are ready.
func (q *queuePair) give(cs []verbs.Completion, flush bool) int {
	n := 0
	for n < len(cs) && q.received.next(&cs[n], flush) {
		n++
	}
	for n < len(cs) && q.sent.next(&cs[n], flush) {
		n++
	}
	return n
}

// broken ends the connection because a work request failed: its queue pair is in the error state.
func (q *queuePair) broken(c *verbs.Completion) {
	if q.halted.Load() {
		return
	}
	if c.Status == verbs.StatusFlushed {
		// siw tells so of a peer that hung up, before the event does.
		q.conn.p.log.Debug("work requests were flushed", "remote", q.conn.remote)
		q.conn.fail(verbs.ErrDisconnected)
		return
	}
	q.conn.fail(fmt.Errorf("%w: %v ended with %q (vendor error %#x)", verbs.ErrDisconnected, c.Op, c.Status, c.VendorError))
}

// settle flushes what the device has not completed DrainTimeout after the end of the connection: unsignaled sends
// that succeeded before it, and work requests that siw took in the moment of the end and lost.
func (q *queuePair) settle(cs []verbs.Completion) int {
	at := q.haltedAt.Load()
	if at == 0 || time.Since(time.Unix(0, at)) < verbs.DrainTimeout {
		return 0
	}
	return q.give(cs, true)
}
