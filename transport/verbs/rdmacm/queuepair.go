//go:build cgo && linux

package rdmacm

/*
#include <stdlib.h>
#include "shim.h"
#cgo noescape farblk_cq_event
#cgo nocallback farblk_cq_event
#cgo noescape farblk_arm
#cgo nocallback farblk_arm
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"farblk/transport/verbs"
)

const (
	// chainMax is how many work requests go into one call; longer chains are several.
	chainMax = 128
	// pollMax is how many completions one call takes.
	pollMax = 64
	// ackBatch is how many completion events are acknowledged at once: each time takes a mutex.
	ackBatch = 512
)

// queuePair implements verbs.QP. Its locks are taken in the order of the fields.
type queuePair struct {
	conn   *conn
	domain *domain
	qp     *C.struct_ibv_qp
	cq     *C.struct_ibv_cq
	cc     *C.struct_ibv_comp_channel
	fd     *pollFD

	sendMu sync.Mutex
	sends  []C.struct_farblk_send // C memory, one chain
	sent   *ring

	recvMu   sync.Mutex
	recvs    []C.struct_farblk_recv // C memory, one chain
	received *ring

	pollMu sync.Mutex // also guards arming
	wcs    []C.struct_ibv_wc

	// halted: the connection is down, and nothing more is posted; from haltedAt on, when the queue pair is in the
	// error state for certain, the device has DrainTimeout.
	halted   atomic.Bool
	haltedAt atomic.Int64  // Unix nanoseconds, 0 before
	stopped  chan struct{} // closed with haltedAt; guarded by conn.mu
	lost     *time.Timer   // wakes the owner when that time is over; guarded by conn.mu
	gone     bool          // guarded by all three locks and conn.mu; any of them is enough to read

	connected atomic.Bool // ESTABLISHED was seen: sends may be posted
	closing   atomic.Bool
	once      sync.Once
	closeBy   time.Time     // set by the first Close
	destroyed chan struct{} // closed under domain.mu
	lingers   bool          // guarded by domain.mu

	toError func() int // moves the queue pair into the error state; returns 0 or an errno

	getEvent func(uintptr) bool // for Wait, made once
	eventErr C.int
	unacked  atomic.Uint32
}

// newQueuePair makes the queue pair of c, whose lock is held.
func newQueuePair(c *conn, d *domain, cfg verbs.QPConfig) (*queuePair, error) {
	about := fmt.Sprintf("queue pair of %d sends and %d receives on %s", cfg.SendDepth, cfg.RecvDepth, c.device.Name)
	if cfg.SendDepth < 1 || cfg.RecvDepth < 1 {
		return nil, fmt.Errorf("%s: depths must be positive", about)
	}
	if m := c.device.MaxQPDepth; max(cfg.SendDepth, cfg.RecvDepth) > m {
		return nil, fmt.Errorf("%s: the device's queues take %d", about, m)
	}
	if n := cfg.SendDepth + cfg.RecvDepth; n > c.device.MaxCQE {
		return nil, fmt.Errorf("%s: the device's completion queues take %d", about, c.device.MaxCQE)
	}
	q := &queuePair{
		conn: c, domain: d, sent: newRing(cfg.SendDepth), received: newRing(cfg.RecvDepth),
		stopped: make(chan struct{}), destroyed: make(chan struct{}),
	}
	if r := C.farblk_create_cq(c.id.verbs, C.int(cfg.SendDepth+cfg.RecvDepth), &q.cc, &q.cq); r != 0 {
		return nil, callError("ibv_create_cq", int(-r), about)
	}
	var err error
	if q.fd, err = newPollFD(int(q.cc.fd), "completion channel"); err != nil {
		q.freeCQ()
		return nil, err
	}
	r := C.farblk_create_qp(c.id, d.pd, q.cq, C.int(cfg.SendDepth), C.int(cfg.RecvDepth), C.int(c.device.MaxSGE))
	if r != 0 {
		q.fd.close()
		q.freeCQ()
		if syscall.Errno(-r) == syscall.ENOMEM {
			if err := checkMemlock(uint64(cfg.SendDepth+cfg.RecvDepth)*256, true); err != nil {
				return nil, err
			}
		}
		return nil, callError("rdma_create_qp", int(-r), about)
	}
	q.qp = c.id.qp
	q.toError = func() int { return -int(C.farblk_qp_error(q.qp)) }
	ns, nr := min(cfg.SendDepth, chainMax), min(cfg.RecvDepth, chainMax)
	sends, recvs := C.farblk_alloc_sends(C.int(ns)), C.farblk_alloc_recvs(C.int(nr))
	wcs := (*C.struct_ibv_wc)(C.calloc(pollMax, C.sizeof_struct_ibv_wc))
	if sends == nil || recvs == nil || wcs == nil {
		panic("rdmacm: out of memory")
	}
	q.sends, q.recvs, q.wcs = unsafe.Slice(sends, ns), unsafe.Slice(recvs, nr), unsafe.Slice(wcs, pollMax)
	q.getEvent = func(uintptr) bool {
		q.eventErr = C.farblk_cq_event(q.cc)
		if q.eventErr == 0 && q.unacked.Add(1) == ackBatch {
			C.ibv_ack_cq_events(q.cq, ackBatch)
			q.unacked.Store(0)
		}
		return q.eventErr != -C.EAGAIN
	}
	return q, nil
}

func (q *queuePair) freeCQ() {
	C.ibv_destroy_cq(q.cq)
	C.ibv_destroy_comp_channel(q.cc)
}

// Arm asks for one completion event.
func (q *queuePair) Arm() error {
	q.pollMu.Lock()
	defer q.pollMu.Unlock()
	if q.gone || q.closing.Load() {
		return verbs.ErrClosed
	}
	if r := C.farblk_arm(q.cq); r != 0 {
		return callError("ibv_req_notify_cq", int(-r), q.conn.device.Name)
	}
	return nil
}

// Wait waits for a completion event in Go's poller.
func (q *queuePair) Wait() error {
	if q.closing.Load() {
		return verbs.ErrClosed
	}
	if err := q.fd.wait(q.getEvent); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) { // kicked, to look again
			q.fd.calm()
			return nil
		}
		return verbs.ErrClosed
	}
	if q.eventErr != 0 && q.eventErr != -C.EINTR {
		return callError("ibv_get_cq_event", int(-q.eventErr), q.conn.device.Name)
	}
	return nil
}

// halt moves the queue pair into the error state: the device flushes what is outstanding. Where the device refuses,
// only the queue pair's end stops it. conn.mu is held.
func (q *queuePair) halt() {
	q.halted.Store(true)
	if q.gone || q.haltedAt.Load() != 0 {
		return
	}
	if errno := q.toError(); errno != 0 {
		q.conn.p.log.Warn("queue pair not moved into the error state", "device", q.conn.device.Name, "error", syscall.Errno(errno))
		return
	}
	q.haltedAt.Store(time.Now().UnixNano())
	close(q.stopped)
	q.lost = time.AfterFunc(verbs.DrainTimeout+time.Millisecond, q.fd.kick)
}

// setRNRTimer sets the time that the peer is to wait when we have no receive posted. conn.mu is held.
func (q *queuePair) setRNRTimer(code uint8) int {
	if q.gone {
		return 0
	}
	return int(C.farblk_rnr_timer(q.qp, C.uint8_t(code)))
}

// Close stops the device and frees the queue pair. A connection attempt is cancelled first; where the kernel holds on
// to it (see conn.Close), the queue pair is in the error state and out of use when Close returns, and freed later.
// A device that takes long to get into that state holds Close as long: until then the peer may still write.
func (q *queuePair) Close() error {
	q.beginClose()
	limit := time.NewTimer(time.Until(q.closeBy))
	defer limit.Stop()
	select {
	case <-q.destroyed:
	case <-limit.C:
		q.awaitStop()
		q.domain.linger(q)
	}
	return nil
}

// awaitStop waits until the device touches no memory for the queue pair any more.
func (q *queuePair) awaitStop() {
	select {
	case <-q.stopped:
		return
	case <-q.destroyed:
		return
	default:
	}
	q.conn.p.log.Warn("the RDMA device takes long to stop a queue pair", "device", q.conn.device.Name, "remote", q.conn.remote)
	select {
	case <-q.stopped:
	case <-q.destroyed:
	}
}

func (q *queuePair) beginClose() {
	q.once.Do(func() {
		q.closeBy = time.Now().Add(closeLimit)
		q.closing.Store(true)
		q.fd.close()
		go q.destroy()
	})
}

func (q *queuePair) destroy() {
	defer q.domain.gone(q)
	q.conn.mu.Lock()
	q.halt() // at once, whatever becomes of a connection attempt
	q.conn.mu.Unlock()
	q.conn.settleCalls()
	q.retire()

	// From here on nobody else uses what is freed. Only calls on a connection that has not ended could meet the
	// identifier's queue pair in the library; one that has ended may take long to let go, so its lock is not held.
	q.conn.mu.Lock()
	if q.conn.err == nil {
		defer q.conn.mu.Unlock()
	} else {
		q.conn.mu.Unlock()
	}
	C.rdma_destroy_qp(q.conn.id)
	C.ibv_ack_cq_events(q.cq, C.uint(q.unacked.Load()))
	q.freeCQ()
	C.free(unsafe.Pointer(unsafe.SliceData(q.sends)))
	C.free(unsafe.Pointer(unsafe.SliceData(q.recvs)))
	C.free(unsafe.Pointer(unsafe.SliceData(q.wcs)))
}

// retire stops the device and drains, and turns away all who come later.
func (q *queuePair) retire() {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	q.pollMu.Lock()
	defer q.pollMu.Unlock()

	q.conn.mu.Lock()
	q.halt()
	if q.lost != nil {
		q.lost.Stop()
	}
	q.conn.mu.Unlock()
	q.drain()
	q.conn.mu.Lock()
	q.gone = true
	q.conn.mu.Unlock()
}

// drain waits until the device has flushed all that it owes, or DrainTimeout is over. Destroying the queue pair
// then ends any access to memory for certain (IBA 11.2.4.5); draining only makes it an orderly end.
func (q *queuePair) drain() {
	var cs [pollMax]verbs.Completion
	end := time.Now().Add(verbs.DrainTimeout)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		for {
			if n, err := q.reap(cs[:]); n == 0 || err != nil {
				break
			}
		}
		if q.sent.drained() && q.received.drained() || time.Now().After(end) {
			return
		}
		time.Sleep(pause)
	}
}
