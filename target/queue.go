package target

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// queue is one NVMe queue on one queue pair.
type queue struct {
	t      *Target
	port   *port
	conn   verbs.Conn
	log    *slog.Logger
	dom    *domain
	qid    uint16
	depth  int // receives, and so commands, at most
	stride int // bytes of a receive slot: command and in-capsule data
	since  time.Time

	// subsystem and ctrl are set by Connect; others read them.
	subsystem atomic.Pointer[Subsystem]
	ctrl      atomic.Pointer[controller]
	stats     counters
	evicted   atomic.Bool // its room is another's

	mu       sync.Mutex // guards all below
	qp       verbs.QP
	dead     error // why the queue ended
	deadline *time.Timer

	capsules  region // depth receive slots
	responses region // a ring of completions, respSlot bytes each
	bounce    bounce
	cmds      []command // by receive slot
	recvs     []verbs.RecvWR
	wrs       []verbs.SendWR
	comps     [64]verbs.Completion

	// The send queue's room. Work requests are numbered; a completion frees all
	// up to its number. Every command that was begun has what it needs reserved.
	capacity, used, reserved int
	posted, done             uint32
	respHead                 uint32 // next slot of the response ring
	lastSend                 int    // index in wrs of the last SEND, -1 if none
	reads, maxReads          int    // RDMA READs under way
	waiting                  []uint16
	lent                     []lent

	unsynced []*command     // wait for syncAside
	syncing  bool           // it runs
	aside    sync.WaitGroup // of it, and of all else that the queue has run aside

	sqhd, sqsize uint16
	noFlow       bool // SQ flow control is off
	faulty       bool // a backend's error was logged

	views     []*nsView // by namespace ID
	viewed    uint64    // Subsystem.changes that they stand for
	held      map[*namespace]hold
	holdsGone bool // some of them may have been removed
}

// Ordinary ends of a queue; ErrClosed is another. What is wrong, if anything is, another queue tells.
var (
	errEnded      = errors.New("the host closed the connection")
	errReset      = errors.New("controller reset")
	errAdminEnded = errors.New("the admin queue ended")
	errRemoved    = errors.New("subsystem removed")
)

// ordinary tells whether a queue that ended so is no reason to warn.
func ordinary(why error) bool {
	return why == errEnded || why == errReset || why == errAdminEnded || why == errRemoved || errors.Is(why, ErrClosed)
}

const respSlot = 64 // a cache line for each completion of 16 bytes

// Kinds of work requests in the upper byte of their IDs; bits 55:32 hold the
// command's slot and bits 31:0 the work request's number.
const (
	kindRecv uint64 = iota << 56
	kindSend
	kindRead
	kindMask uint64 = 0xFF << 56
)

func (t *Target) newQueue(p *port, conn verbs.Conn, req nvme.CMRequest) (q *queue, err error) {
	dev := conn.Device()
	q = &queue{
		t: t, port: p, conn: conn, qid: req.QID, log: t.log, since: time.Now(),
		depth:    int(req.SQSize) + 1,
		sqsize:   req.SQSize,
		stride:   nvme.CommandSize,
		lastSend: -1,
		held:     make(map[*namespace]hold),
	}
	if q.qid != 0 {
		q.stride += t.cfg.InCapsule
	}
	q.capacity = 4*q.depth + 8
	if dev.MaxQPDepth > 0 {
		q.capacity = min(q.capacity, dev.MaxQPDepth)
	}
	q.maxReads = int(conn.PeerParams().ResponderResources)
	q.maxReads = min(q.maxReads, t.cfg.ReadDepth)
	if dev.MaxInitiatorDepth > 0 {
		q.maxReads = min(q.maxReads, dev.MaxInitiatorDepth)
	}
	if q.dom, err = t.domain(conn); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			if q.qp != nil {
				q.qp.Close()
			}
			q.freeMemory()
		}
	}()
	if q.capsules, err = q.dom.allocate(q.depth*q.stride, verbs.LocalWrite); err != nil {
		return nil, fmt.Errorf("capsules: %w", err)
	}
	if q.responses, err = q.dom.allocate(q.capacity*respSlot, 0); err != nil {
		return nil, fmt.Errorf("responses: %w", err)
	}
	size := bouncePages
	if q.qid == 0 {
		size = adminBouncePages
	}
	q.bounce.init(q.dom, size)
	q.cmds = make([]command, q.depth)
	q.waiting = make([]uint16, 0, q.depth)
	q.wrs = make([]verbs.SendWR, 0, q.capacity)
	q.lent = make([]lent, 0, q.capacity)
	q.recvs = make([]verbs.RecvWR, 0, q.depth)
	if q.qp, err = conn.NewQP(q.dom.pd, verbs.QPConfig{SendDepth: q.capacity, RecvDepth: q.depth}); err != nil {
		return nil, err
	}
	for i := range q.cmds {
		q.cmds[i].slot = uint16(i)
		q.repost(uint16(i))
	}
	if err := q.flush(); err != nil {
		return nil, err
	}
	// A host that connects and then says nothing must not hold the queue.
	q.deadline = time.AfterFunc(t.cfg.ConnectTimeout, func() {
		q.kill(errors.New("no Connect command came in time"))
	})
	return q, nil
}

// run handles the queue until it ends, and returns why.
func (q *queue) run() error {
	// With all receives taken by commands that wait, event requests, no completion would tell of the end.
	q.aside.Go(func() {
		<-q.conn.Disconnected()
		q.kill(errEnded)
	})
	var w waiter
	for {
		n, err := q.step()
		if err != nil {
			return err
		}
		if n > 0 {
			w.worked()
			continue
		}
		if w.spin() {
			runtime.Gosched()
			continue
		}
		if err := q.arm(); err != nil {
			return err
		}
		if n, err = q.step(); err != nil {
			return err
		}
		if n > 0 {
			w.worked()
			continue
		}
		if err := q.qp.Wait(); err != nil {
			return err
		}
		w.waited()
	}
}

func (q *queue) arm() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dead != nil {
		return q.dead
	}
	return q.qp.Arm()
}

// step polls once, handles what came, and posts what that needs.
func (q *queue) step() (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dead != nil {
		return 0, q.dead
	}
	n, err := q.qp.Poll(q.comps[:])
	if err != nil || n == 0 {
		return 0, err
	}
	q.refresh()
	for i := range q.comps[:n] {
		if err := q.completed(&q.comps[i]); err != nil {
			return 0, err
		}
		if q.dead != nil { // it was ended in the midst of a command
			return 0, q.dead
		}
	}
	q.retry()
	if q.holdsGone {
		q.letGo()
	}
	return n, q.flush()
}

// completed handles one completion.
func (q *queue) completed(c *verbs.Completion) error {
	kind, slot, number := c.ID&kindMask, uint16(c.ID>>32), uint32(c.ID)
	if c.Status != verbs.StatusOK {
		if c.Status == verbs.StatusFlushed {
			return errEnded
		}
		return fmt.Errorf("%s failed: %s", c.Op, c.Status)
	}
	if kind == kindRecv {
		q.received(slot, c.Bytes)
		return nil
	}
	q.used -= int(number - q.done)
	q.done = number
	q.reclaim()
	if kind == kindRead {
		q.reads--
		cmd := &q.cmds[slot]
		if cmd.reads--; cmd.reads == 0 {
			q.fetched(cmd)
		}
	}
	return nil
}

// repost gives a receive slot back to the device.
func (q *queue) repost(slot uint16) {
	at := int(slot) * q.stride
	q.recvs = append(q.recvs, verbs.RecvWR{
		ID:  kindRecv | uint64(slot)<<32,
		SGE: verbs.SGE{Data: q.capsules.mem[at : at+q.stride : at+q.stride], LKey: q.capsules.mr.LKey()},
	})
}

// number gives the work requests from index i their IDs and takes them out of
// what their command had reserved.
func (q *queue) number(i int, kind uint64, slot uint16) {
	for ; i < len(q.wrs); i++ {
		q.posted++
		q.wrs[i].ID = kind | uint64(slot)<<32 | uint64(q.posted)
		q.used++
		q.reserved--
	}
}

// flush posts receives and then sends: a host may answer a response with its
// next command at once.
func (q *queue) flush() error {
	if len(q.recvs) > 0 {
		if _, err := q.qp.PostRecv(q.recvs); err != nil {
			return fmt.Errorf("posting receives: %w", err)
		}
		q.recvs = q.recvs[:0]
	}
	if len(q.wrs) > 0 {
		if q.lastSend >= 0 {
			q.wrs[q.lastSend].Flags |= verbs.Signaled
			q.lastSend = -1
		}
		if _, err := q.qp.PostSend(q.wrs); err != nil {
			return fmt.Errorf("posting sends: %w", err)
		}
		q.wrs = q.wrs[:0]
	}
	return nil
}

// kill ends the queue for a reason, the first of which is kept. Its goroutine
// notices and cleans up.
func (q *queue) kill(why error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dead != nil {
		return
	}
	if why == nil || errors.Is(why, verbs.ErrClosed) || errors.Is(why, verbs.ErrDisconnected) {
		why = errEnded
	}
	if why == errEnded { // the connection may know more
		if err := q.conn.Err(); err != nil && err != verbs.ErrDisconnected && !errors.Is(err, verbs.ErrClosed) {
			why = err
		}
	}
	q.dead = why
	q.deadline.Stop()
	_ = q.conn.Disconnect() // the host should learn of it before all is torn down
	_ = q.conn.Close()
}

func (q *queue) cause() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.dead
}

// finish takes the ended queue out of the target and frees what it has.
func (q *queue) finish() {
	q.leave()
	q.aside.Wait()
	t := q.t
	t.mu.Lock()
	delete(t.queues, q)
	t.mu.Unlock()
	q.dropViews()
	q.freeMemory()
}

func (q *queue) freeMemory() {
	q.capsules.free()
	q.responses.free()
	q.bounce.free()
}

// waiter decides how long to poll before waiting: a bounded time, longer while
// polling has been worth it and shorter while it has not.
type waiter struct {
	budget time.Duration
	since  time.Time
	wait   time.Time
}

const (
	minSpin = 2 * time.Microsecond
	maxSpin = 50 * time.Microsecond
)

func (w *waiter) worked() {
	w.since = time.Time{}
	if !w.wait.IsZero() {
		// Work that came soon after the wait began would have been worth polling for.
		if time.Since(w.wait) < maxSpin {
			w.budget = min(w.budget*2, maxSpin)
		} else {
			w.budget /= 2
		}
		w.wait = time.Time{}
	}
}

// spin says whether to poll once more.
func (w *waiter) spin() bool {
	if w.since.IsZero() {
		w.since = time.Now()
		w.budget = max(w.budget, minSpin)
		return true
	}
	if time.Since(w.since) < w.budget {
		return true
	}
	w.wait = time.Now()
	return false
}

func (w *waiter) waited() { w.since = time.Time{} }
