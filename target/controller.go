package target

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"farblk/host/nvme"
)

// controller is one host's association with a subsystem. It lives as long as
// its admin queue.
type controller struct {
	t       *Target
	s       *Subsystem
	id      uint16
	port    *port
	hostNQN string
	hostID  nvme.UUID
	admin   *queue

	ready   atomic.Bool  // CC.EN and CSTS.RDY
	granted atomic.Int32 // I/O queues

	// Guarded by the admin queue's lock.
	cc     nvme.Configuration
	csts   nvme.ControllerStatus
	set    uint64 // counts what CC has asked for
	busy   bool   // carryOut runs
	kato   time.Duration
	alive  *time.Timer // keep-alive; nil: none
	events events

	queues map[uint16]*queue // I/O queues; guarded by Target.mu

	errMu    sync.Mutex // a leaf
	errors   []nvme.ErrorLogEntry
	errCount uint64
}

// errorLogSize is how many entries of the error log are kept.
const errorLogSize = 64

// keepAliveStep is KAS: the granularity of keep-alive timeouts.
const keepAliveStep = 100 * time.Millisecond

var version = nvme.MakeVersion(1, 4, 0)

// newController makes a controller for the admin queue q; t.mu is not held.
func (t *Target) newController(q *queue, s *Subsystem, d *nvme.ConnectData, kato time.Duration) (*controller, error) {
	c := &controller{
		t: t, s: s, port: q.port, hostNQN: d.HostNQN, hostID: d.HostID, admin: q,
		queues: make(map[uint16]*queue),
	}
	c.granted.Store(int32(t.cfg.IOQueues))
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || s.removed.Load() {
		return nil, ErrClosed
	}
	if len(t.controllers) >= 0xFFEF {
		return nil, errors.New("no controller ID is free")
	}
	for c.id == 0 {
		if t.lastCNTLID++; t.lastCNTLID > 0xFFEF {
			t.lastCNTLID = 1
		}
		if t.controllers[t.lastCNTLID] == nil {
			c.id = t.lastCNTLID
		}
	}
	t.controllers[c.id] = c
	q.subsystem.Store(s)
	q.ctrl.Store(c)
	c.setKeepAlive(kato)
	return c, nil
}

// setKeepAlive starts the keep-alive timer anew, rounded up to the granularity.
func (c *controller) setKeepAlive(kato time.Duration) {
	c.kato = (kato + keepAliveStep - 1) / keepAliveStep * keepAliveStep
	if c.alive != nil {
		c.alive.Stop()
		c.alive = nil
	}
	if kato := c.kato; kato > 0 {
		c.alive = time.AfterFunc(kato, func() {
			c.admin.kill(fmt.Errorf("keep-alive timeout: the host was silent for %v", kato))
		})
	}
}

// keepAlive takes note that the host is alive.
func (c *controller) keepAlive() {
	if c.alive != nil {
		c.alive.Reset(c.kato)
	}
}

// configure acts on a write to CC. A shutdown or reset is over when CSTS says so.
func (c *controller) configure(v nvme.Configuration) {
	was := c.cc
	c.cc = v
	switch {
	case v.ShutdownRequested() && !was.ShutdownRequested():
		c.ready.Store(false)
		c.csts = nvme.StatusShutdownOngoing
		c.aside()
	case v.Enabled() && !was.Enabled():
		c.set++
		sq, cq := v.EntryShifts()
		if v.CommandSet() != 0 || v.PageShift() != 12 || sq != 6 || cq != 4 {
			c.csts = nvme.StatusFatal
			return
		}
		c.csts = nvme.StatusReady
		c.ready.Store(true)
	case !v.Enabled() && was.Enabled():
		c.ready.Store(false)
		c.events = events{waiting: c.events.waiting}
		c.aside()
	}
}

// aside has carryOut do what CC asks for now.
func (c *controller) aside() {
	c.set++
	if !c.busy {
		c.busy = true
		c.admin.aside.Go(c.carryOut)
	}
}

// carryOut shuts the controller down, which makes all data durable (Base 3.6), or resets it, after which no command of
// the old I/O queues has any effect, until there is nothing more to do.
func (c *controller) carryOut() {
	q := c.admin
	q.mu.Lock()
	defer q.mu.Unlock()
	for done := uint64(0); done != c.set && q.dead == nil; {
		done = c.set
		shutdown, reset := c.cc.ShutdownRequested(), !c.cc.Enabled()
		q.mu.Unlock()
		csts := nvme.ControllerStatus(0)
		switch {
		case shutdown:
			csts = nvme.StatusShutdownComplete
			if err := c.s.sync(); err != nil {
				q.log.Error("a shutdown lost data", "err", err)
				csts |= nvme.StatusFatal
			}
		case reset:
			c.endQueues(errReset)
		}
		q.mu.Lock()
		if done == c.set && (shutdown || reset) {
			c.csts = csts
		}
	}
	c.busy = false
}

// endQueues ends the controller's I/O queues, and returns when they do nothing any more.
func (c *controller) endQueues(why error) {
	var all sync.WaitGroup
	for _, q := range c.t.queueList(c.isIO) {
		all.Go(func() { q.kill(why) })
	}
	all.Wait()
}

func (c *controller) isIO(q *queue) bool { return q.ctrl.Load() == c && q != c.admin }

// dropQueues ends the controller's I/O queues. It does not wait for them.
func (c *controller) dropQueues(why error) {
	c.t.killAll(c.isIO, why)
}

// leave undoes Connect when the queue has ended.
func (q *queue) leave() {
	c := q.ctrl.Load()
	if c == nil {
		return
	}
	if q.qid != 0 {
		q.t.mu.Lock()
		if c.queues[q.qid] == q {
			delete(c.queues, q.qid)
		}
		q.t.mu.Unlock()
		return
	}
	q.mu.Lock()
	c.setKeepAlive(0)
	q.mu.Unlock()
	q.t.mu.Lock()
	delete(q.t.controllers, c.id)
	q.t.mu.Unlock()
	c.dropQueues(errAdminEnded)
}

// failed takes note of a command that completes with an error.
func (q *queue) failed(cmd *nvme.Command, s nvme.StatusCode) {
	q.stats.failures.Add(1)
	c := q.ctrl.Load()
	if c == nil {
		return
	}
	e := nvme.ErrorLogEntry{
		SQID: q.qid, CID: cmd.CID(), StatusField: uint16(s) << 1, ParameterError: 0xFFFF,
		NSID: cmd.NSID(), TransportType: uint8(nvme.TransportRDMA), Opcode: cmd.Opcode(),
	}
	if q.qid != 0 {
		e.LBA = cmd.SLBA()
	}
	c.errMu.Lock()
	defer c.errMu.Unlock()
	c.errCount++
	e.ErrorCount = c.errCount
	if len(c.errors) == errorLogSize {
		c.errors = slices.Delete(c.errors, 0, 1)
	}
	c.errors = append(c.errors, e)
}

// errorLog returns the log page, newest entry first.
func (c *controller) errorLog() []byte {
	c.errMu.Lock()
	defer c.errMu.Unlock()
	var b []byte
	for _, e := range slices.Backward(c.errors) {
		b = e.Append(b)
	}
	return append(b, make([]byte, errorLogSize*nvme.LogErrorEntrySize-len(b))...)
}
