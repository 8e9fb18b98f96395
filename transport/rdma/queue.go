package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"farblk/transport"
	"farblk/transport/verbs"
)

const (
	commandLen    = 64
	completionLen = 16
	// pollBatch is how many completions are taken at once: enough for a full queue of the usual depth to
	// come in two goes, small enough to stay in the cache.
	pollBatch = 64
	maxDepth  = 4096 // leaves four bits of a command identifier for the generation
)

// Work request IDs: the slot's number, with recvID set for receives.
const recvID = 1 << 32

// slot is one command under way. It belongs to the queue's mu.
type slot struct {
	req *transport.Request // nil: free
	gen uint16             // counts the uses; part of the command identifier
	// sent and responded: which of the two ends of a command have been seen.
	sent, responded bool
	err             error

	window   verbs.Window // key per command; nil otherwise
	key      uint32
	keyBound bool
}

// queue implements transport.Queue.
//
// Goroutines: watch tears the queue down when it fails, run completes requests when nobody polls.
// Locks, in this order: pollMu (who polls), mu (slots and what waits to be posted). postMu (who posts) is
// taken with neither held, and mu within it. No Done is called with mu held.
type queue struct {
	a         *association
	conn      verbs.Conn
	qp        verbs.QP
	p         transport.QueueParams
	shm       []byte // capsules, then responses
	mr        verbs.MR
	indexBits int

	mu       sync.Mutex
	slots    []slot
	free     []uint16
	pending  []verbs.SendWR // submitted, not posted
	failed   error          // *transport.LostError or transport.ErrClosed
	counters transport.Counters

	waiting     atomic.Int32 // len(pending)
	outstanding atomic.Int32
	postMu      sync.Mutex
	posting     []verbs.SendWR // what the holder of postMu is posting
	doorbells   atomic.Uint64

	// Who notices completions. pollMu is held while somebody polls. armed, under it, says that an event will
	// wake run, or has and run will come. owned says that somebody polls or has promised to poll again soon:
	// others need not then. missed says that somebody found pollMu taken: its holder looks again when it has
	// let go, unless it promises.
	pollMu sync.Mutex
	armed  bool
	owned  atomic.Bool
	missed atomic.Bool

	wc            [pollBatch]verbs.Completion
	recvs         []verbs.RecvWR
	ended         []*transport.Request
	polls, events atomic.Uint64

	failing  chan struct{} // closed with failed
	finished chan struct{} // closed when everything is freed
	running  chan struct{} // closed when run has returned
}

// newQueue makes the queue pair of conn, which stays the caller's until start, and what the queue needs.
func newQueue(a *association, conn verbs.Conn, p transport.QueueParams) (_ *queue, err error) {
	if p.Depth < 2 || p.Depth > maxDepth {
		return nil, fmt.Errorf("queue depth %d: must be from 2 to %d", p.Depth, maxDepth)
	}
	if d := a.device.MaxQPDepth; d > 0 && p.Depth > d {
		return nil, fmt.Errorf("queue depth %d: the RDMA device %s has at most %d: use a smaller --queue-size", p.Depth, a.device.Name, d)
	}
	q := &queue{
		a: a, conn: conn, p: p,
		indexBits: bits.Len(uint(p.Depth - 1)),
		slots:     make([]slot, p.Depth-1),
		free:      make([]uint16, 0, p.Depth-1),
		pending:   make([]verbs.SendWR, 0, p.Depth),
		posting:   make([]verbs.SendWR, 0, p.Depth),
		recvs:     make([]verbs.RecvWR, 0, p.Depth),
		ended:     make([]*transport.Request, 0, 2*pollBatch),
		failing:   make(chan struct{}),
		finished:  make(chan struct{}),
		running:   make(chan struct{}),
	}
	defer func() {
		if err != nil {
			q.abandon()
		}
	}()
	q.shm, err = unix.Mmap(-1, 0, p.Depth*(commandLen+completionLen), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	_ = unix.Madvise(q.shm, unix.MADV_DONTFORK)
	if q.mr, err = a.pd.Register(q.shm, verbs.LocalWrite); err != nil {
		return nil, err
	}
	if q.qp, err = conn.NewQP(a.pd, verbs.QPConfig{SendDepth: p.Depth, RecvDepth: p.Depth}); err != nil {
		return nil, err
	}
	for i := range q.slots {
		q.free = append(q.free, uint16(len(q.slots)-1-i))
		if a.d.o.KeyPerCommand {
			if q.slots[i].window, err = a.pd.NewWindow(); err != nil {
				return nil, err
			}
		}
	}
	for i := range p.Depth {
		q.recvs = append(q.recvs, q.recvWR(uint64(i)))
	}
	_, err = q.qp.PostRecv(q.recvs)
	q.recvs = q.recvs[:0]
	return q, err
}

func (q *queue) capsule(i uint16) []byte {
	off := int(i) * commandLen
	return q.shm[off : off+commandLen : off+commandLen]
}

func (q *queue) response(i uint64) []byte {
	off := q.p.Depth*commandLen + int(i)*completionLen
	return q.shm[off : off+completionLen : off+completionLen]
}

func (q *queue) recvWR(i uint64) verbs.RecvWR {
	return verbs.RecvWR{ID: recvID | i, SGE: verbs.SGE{Data: q.response(i), LKey: q.mr.LKey()}}
}

func (q *queue) connect(ctx context.Context) error {
	d := q.conn.Device()
	ird := responderResources
	if d.MaxResponderResources > 0 {
		ird = min(ird, d.MaxResponderResources)
	}
	private, err := q.conn.Connect(ctx, verbs.ConnParams{
		PrivateData:        cmRequest(q.p),
		ResponderResources: uint8(ird),
		RetryCount:         retryCount,
		RNRRetryCount:      rnrRetryCount,
	})
	if err != nil {
		return err
	}
	return checkAccept(private, q.p.Depth)
}

// abandon frees a queue that was never started; one that was, watch takes apart.
func (q *queue) abandon() {
	if q.qp != nil {
		_ = q.qp.Close()
	}
	q.release()
}

// release frees the queue's own memory, which nothing uses any more: its queue pair is closed.
func (q *queue) release() {
	for i := range q.slots {
		if w := q.slots[i].window; w != nil {
			_ = w.Close()
		}
	}
	if q.mr != nil {
		_ = q.mr.Close()
	}
	if q.shm != nil {
		_ = unix.Munmap(q.shm)
		q.shm = nil
	}
}

func (q *queue) start() {
	q.armed = true
	q.arm()
	go q.run()
	go q.watch()
}

// Submit implements transport.Queue.
func (q *queue) Submit(r *transport.Request) error {
	q.mu.Lock()
	if q.failed != nil {
		q.mu.Unlock()
		return q.failed
	}
	n := len(q.free)
	if n == 0 {
		q.mu.Unlock()
		return transport.ErrQueueFull
	}
	i := q.free[n-1]
	s := &q.slots[i]
	q.pending = q.pending[:len(q.pending)+1]
	wr := &q.pending[len(q.pending)-1]
	wr.ID, wr.Op, wr.Flags = uint64(i), verbs.OpSend, verbs.Signaled
	wr.NumSGE = 1
	c := q.capsule(i)
	copy(c, r.Command[:])
	s.gen++
	if cid := q.cid(i, s.gen); cid == 0xFFFF { // means "none" in the error log (Base specification, figure on error entries)
		s.gen++
	}
	binary.LittleEndian.PutUint16(c[2:], q.cid(i, s.gen))
	c[1] = c[1]&^0xC0 | psdtSGL
	if err := q.describe(s, r, c[24:40], wr); err != nil {
		q.pending = q.pending[:len(q.pending)-1]
		q.mu.Unlock()
		return err
	}
	wr.SGEs[0] = verbs.SGE{Data: c, LKey: q.mr.LKey()}
	q.free = q.free[:n-1]
	s.req, s.sent, s.responded, s.err = r, false, false, nil
	q.counters.Commands++
	switch r.Direction {
	case transport.ToHost:
		q.counters.BytesRead += uint64(len(r.Data))
	case transport.ToController:
		q.counters.BytesWrite += uint64(len(r.Data))
	}
	q.waiting.Store(int32(len(q.pending)))
	q.outstanding.Add(1)
	q.mu.Unlock()
	return nil
}

// A command's PSDT says that its data is described by an SGL (Base specification, figure "Command Dword 0").
const psdtSGL = 0x40

// SGL descriptor types with their subtypes (NVMe over Fabrics 1.1a section 2.3; RDMA transport section 3.2).
const (
	sglOffset          = 0x01 // data block, offset in the capsule
	sglKeyed           = 0x40 // keyed data block, address
	sglKeyedInvalidate = 0x4F // keyed data block, invalidate the key
)

// describe fills the SGL at d for r's data. mu is held.
//
// The offset of in-capsule data is always 0: the controller's ICDOFF is, or the host would have refused it.
func (q *queue) describe(s *slot, r *transport.Request, d []byte, wr *verbs.SendWR) error {
	clear(d)
	n := len(r.Data)
	switch {
	case n == 0:
		d[15] = sglKeyed
		return nil
	case r.Direction == transport.ToController && n <= q.p.InCapsule:
		binary.LittleEndian.PutUint32(d[8:], uint32(n))
		d[15] = sglOffset
		wr.NumSGE = 2
		wr.SGEs[1] = verbs.SGE{Data: r.Data, LKey: q.a.toController.LKey()}
		q.counters.InCapsule++
		return nil
	case n >= 1<<24:
		return fmt.Errorf("%d bytes in one command: a keyed SGL descriptor has room for %d", n, 1<<24-1)
	}
	mr := q.a.toHost
	access := verbs.LocalWrite | verbs.RemoteWrite
	if r.Direction == transport.ToController {
		mr, access = q.a.toController, verbs.RemoteRead
	}
	key, addr, kind := mr.RKey(), uint64(0), byte(sglKeyed)
	if s.window != nil {
		var err error
		if key, addr, err = s.window.Bind(mr, r.Data, access); err != nil {
			return err
		}
		s.key, s.keyBound = key, true
		kind = sglKeyedInvalidate
	} else {
		addr = mr.RemoteAddr(r.Data)
	}
	binary.LittleEndian.PutUint64(d, addr)
	d[8], d[9], d[10] = byte(n), byte(n>>8), byte(n>>16)
	binary.LittleEndian.PutUint32(d[11:], key)
	d[15] = kind
	return nil
}

// cid is a command identifier: the slot's number in the low bits, the generation above it.
func (q *queue) cid(i, gen uint16) uint16 { return gen<<q.indexBits | i }

// post rings the doorbell for everything submitted. Whoever finds another at it leaves the rest to that one.
func (q *queue) post() {
	for q.waiting.Load() > 0 && q.postMu.TryLock() {
		q.mu.Lock()
		q.pending, q.posting = q.posting[:0], q.pending
		q.waiting.Store(0)
		q.mu.Unlock()
		if len(q.posting) > 0 {
			q.doorbells.Add(1)
			if _, err := q.qp.PostSend(q.posting); err != nil {
				q.lose(err)
			}
		}
		q.postMu.Unlock()
	}
}

// Kick implements transport.Queue.
func (q *queue) Kick() {
	q.post()
	if q.owned.Load() {
		return
	}
	for q.Poll(0) > 0 { // arming comes too late for what has completed already
	}
}

func (q *queue) arm() {
	if err := q.qp.Arm(); err != nil {
		q.lose(err)
	}
}

// Outstanding implements transport.Queue.
func (q *queue) Outstanding() int { return int(q.outstanding.Load()) }

// Done implements transport.Queue.
func (q *queue) Done() <-chan struct{} { return q.failing }

// Err implements transport.Queue.
func (q *queue) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.failed
}

// Fail implements transport.Queue.
func (q *queue) Fail(cause error) { q.end(&transport.LostError{Cause: cause}) }

// end stops the queue for the given reason; the first one counts. watch does the rest.
func (q *queue) end(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.failed == nil {
		q.failed = err
		close(q.failing)
	}
}

// lose ends the queue because the device refused something: that is seldom more than a sign of a connection
// that is gone, whose own reason says more.
func (q *queue) lose(err error) {
	if cause := q.conn.Err(); cause != nil {
		err = cause
	}
	q.end(&transport.LostError{Cause: err})
}

// Close implements transport.Queue.
func (q *queue) Close() error {
	q.end(transport.ErrClosed)
	<-q.finished
	q.a.forget(q)
	return nil
}

// Counters implements transport.Queue.
func (q *queue) Counters() transport.Counters {
	q.mu.Lock()
	c := q.counters
	q.mu.Unlock()
	c.Doorbells, c.Polls, c.Events = q.doorbells.Load(), q.polls.Load(), q.events.Load()
	return c
}

// watch waits for the end of the connection or of the queue, and takes the queue apart: first the queue
// pair, so that no device touches memory any more, then the requests. A request that the target has answered
// before ends as answered.
func (q *queue) watch() {
	violated := func() bool { // then nothing that the target says counts any more
		var wrong *transport.ProtocolError
		return errors.As(q.Err(), &wrong)
	}
	select {
	case <-q.conn.Disconnected():
	case <-q.failing:
	}
	if !violated() {
		q.drain()
	}
	cause := q.conn.Err()
	if cause == nil {
		cause = verbs.ErrDisconnected
	}
	q.end(&transport.LostError{Cause: cause}) // unless there is a reason already
	trusted := !violated()
	_ = q.conn.Disconnect()
	_ = q.qp.Close() // ends run's Wait
	<-q.running
	q.pollMu.Lock() // whoever polled has seen the failure and left
	q.postMu.Lock() // nobody posts any more, and nobody begins: waiting is 0 or nothing can be posted
	q.mu.Lock()
	lost := q.failed
	if errors.Is(lost, transport.ErrClosed) {
		lost = &transport.LostError{Cause: lost}
	}
	q.ended = q.ended[:0]
	for i := range q.slots {
		s := &q.slots[i]
		if s.req == nil {
			continue
		}
		if s.req.Err = lost; trusted && s.responded { // its send completion never came
			s.req.Err = s.err
		}
		q.ended = append(q.ended, s.req)
		s.req = nil
	}
	q.pending = q.pending[:0]
	q.waiting.Store(0)
	q.mu.Unlock()
	q.postMu.Unlock()
	q.outstanding.Store(0)
	q.release()
	_ = q.conn.Close()
	for _, r := range q.ended {
		r.Done(r)
	}
	q.pollMu.Unlock()
	close(q.finished)
}
