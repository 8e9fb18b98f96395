package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// Controller is a connection to one NVMe controller that repairs itself. Methods may be called from any
// goroutine.
//
// Locks, in this order: scanning (one namespace scan at a time), mu, an ioQueue's.
type Controller struct {
	cfg         Config
	tick        time.Duration // of the I/O queues' clocks
	retryDelays atomic.Pointer[[3]time.Duration]
	pool        *blockdev.Pool
	cmds        *adminCommands

	happened chan machineEvent
	loopDone chan struct{}
	done     chan struct{}  // closed when dead and everything but the pool is given back
	work     sync.WaitGroup // attempts, quiesces and shutdowns under way
	notify   sync.Mutex     // one OnEvent at a time

	// The loop's own.
	machine machine
	timers  [numTimers]*time.Timer
	armed   [numTimers]uint // counts arms and disarms, to tell a firing that was stopped too late
	abort   context.CancelCauseFunc

	scanning  sync.Mutex
	leftOut   map[uint32]string // by namespace ID: why, as it was logged; scanning's
	anaFailed string            // why the ANA log was not read last time, as it was logged; scanning's
	mu        sync.Mutex
	state     State
	err       error
	assoc     *association // live, or being shut down
	last      *association // the newest one that was live, for Info
	queues    []*ioQueue
	spaces    map[uint32]*Namespace
	resets    uint64
	// writesUntil is when no write of a lost association, or of a process before this one, can be alive any more.
	writesUntil time.Time
}

// Connect makes a connection and returns when I/O can run and the namespaces are known. When ctx ends
// first it gives up. Errors: *ConfigError, *transport.ConnectError, *nvme.StatusError, *RefusedError,
// *TimeoutError, *transport.LostError, ErrAuthRequired, ErrIdentity, ctx's. On error nothing is left.
func Connect(ctx context.Context, cfg Config) (*Controller, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	pool, err := blockdev.NewPool(cfg.PoolSize)
	if err != nil {
		return nil, err
	}
	c := &Controller{
		cfg: cfg, pool: pool, cmds: newAdminCommands(pool),
		tick:     min(max(cfg.IOTimeout/16, time.Millisecond), time.Second/2),
		happened: make(chan machineEvent), loopDone: make(chan struct{}), done: make(chan struct{}),
		spaces: make(map[uint32]*Namespace), leftOut: make(map[uint32]string),
		machine: machine{
			hold: cfg.HoldWrites, reconnectDelay: cfg.ReconnectDelay, ctrlLoss: cfg.CtrlLossTimeout, fastFail: cfg.FastIOFail,
		},
	}
	if cfg.HoldWrites > 0 {
		c.writesUntil = time.Now().Add(cfg.HoldWrites)
	}
	settled := make(chan struct{}) // live or dead
	go c.loop(settled)
	c.post(machineEvent{kind: evStart})
	select {
	case <-settled:
	case <-ctx.Done():
		c.discard()
		return nil, context.Cause(ctx)
	}
	if c.State() == StateDead {
		c.discard()
		return nil, c.Err()
	}
	return c, nil
}

// discard frees what a connect that failed leaves.
func (c *Controller) discard() {
	if err := c.Shutdown(context.Background()); err != nil { // nobody has had any
		c.cfg.Logger.Warn("buffers have not come back", "err", err)
	}
}

// post tells the machine what happened.
func (c *Controller) post(e machineEvent) {
	select {
	case c.happened <- e:
	case <-c.loopDone:
	}
}

// loop runs the machine until the end. It never blocks: work runs beside it.
func (c *Controller) loop(settled chan struct{}) {
	for c.machine.state != StateDead {
		e := <-c.happened
		if e.kind == evTimer && e.armed != c.armed[e.timer] {
			continue // stopped too late
		}
		before := c.machine.state
		acts := c.machine.step(e)
		c.observe(before, e)
		for _, a := range acts {
			c.do(a)
		}
		if settled != nil && (c.machine.state == StateLive || c.machine.state == StateDead) {
			close(settled)
			settled = nil
		}
	}
}

// observe publishes the machine's state.
func (c *Controller) observe(before State, e machineEvent) {
	now := c.machine.state
	if now == before {
		if e.kind == evAttemptFailed {
			c.cfg.Logger.Info("could not connect, will try again", "state", now.String(), "err", e.err)
		}
		return
	}
	c.mu.Lock()
	c.state = now
	if c.machine.cause != nil {
		c.err = c.machine.cause
	}
	if now == StateResetting {
		c.resets++
	}
	c.mu.Unlock()
	switch {
	case now == StateResetting:
		c.cfg.Logger.Warn("connection lost", "err", e.err)
	case now == StateDead && c.machine.cause != nil && before != StateDeleting:
		c.cfg.Logger.Error("connection given up", "err", c.machine.cause)
	default:
		c.cfg.Logger.Info("connection state", "state", now.String())
	}
	c.tell(Event{Kind: EventState, State: now, Err: c.machine.cause})
}

func (c *Controller) tell(e Event) {
	c.notify.Lock()
	defer c.notify.Unlock()
	c.cfg.OnEvent(e)
}

func (c *Controller) do(a action) {
	switch a.kind {
	case doAttempt:
		ctx, abort := context.WithCancelCause(context.Background())
		c.abort = abort
		c.work.Go(func() {
			defer abort(nil)
			if err := c.attempt(ctx); err != nil {
				c.post(machineEvent{kind: evAttemptFailed, err: err, verdict: verdictOf(err)})
				return
			}
			c.post(machineEvent{kind: evConnected})
		})
	case doCancelAttempt:
		c.abort(blockdev.ErrClosed)
	case doQuiesce:
		c.work.Go(c.quiesce)
	case doShutdown:
		c.work.Go(func() {
			c.orderly()
			c.quiesce()
		})
	case doResume:
		c.resume(a.writes)
	case doReleaseWrites:
		for _, q := range c.ioQueues() {
			q.releaseWrites()
		}
	case doFail:
		for _, q := range c.ioQueues() {
			q.abandon(a.err)
		}
	case doArm:
		c.arm(a.timer, a.after)
	case doDisarm:
		if t := c.timers[a.timer]; t != nil {
			t.Stop()
		}
		c.armed[a.timer]++
	case doFree:
		close(c.loopDone)
		c.work.Wait()
		close(c.done)
	}
}

// arm starts a timer anew.
func (c *Controller) arm(t timerID, after time.Duration) {
	if c.timers[t] != nil {
		c.timers[t].Stop()
	}
	c.armed[t]++
	generation := c.armed[t]
	c.timers[t] = time.AfterFunc(after, func() {
		c.post(machineEvent{kind: evTimer, timer: t, armed: generation})
	})
}

// attempt makes an association and takes it into use, up to the start of I/O.
func (c *Controller) attempt(ctx context.Context) (err error) {
	a, err := openAdmin(ctx, &c.cfg, c.cmds, false)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			a.close()
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
		}
	}()
	a.keepAlive(c.traffic)
	// Events are wanted from before the scan, or one could be missed; they are dealt with after it.
	c.scanning.Lock()
	defer c.scanning.Unlock()
	if err := a.listen(ctx, func(ctx context.Context, e nvme.AsyncEvent) { c.controllerEvent(ctx, a, e) }); err != nil {
		return err
	}
	queues := c.ioQueues()
	want := c.cfg.NrIOQueues
	if len(queues) > 0 {
		want = len(queues)
	}
	if err := a.openIO(ctx, want, c.cfg.QueueSize); err != nil {
		return err
	}
	if len(queues) == 0 {
		if err := c.makeQueues(len(a.io), a.depth-1); err != nil {
			return err
		}
	} else if (a.depth-1)/sharers(len(queues), len(a.io)) < 1 {
		return refusedf("only %d I/O queues of %d entries are left for %d", len(a.io), a.depth, len(queues))
	}
	c.setRetryDelays(a.id)
	if err := c.scan(ctx, a); err != nil {
		return err
	}
	select { // do not call live what is lost already
	case <-a.admin.Done():
		return a.admin.Err()
	default:
	}
	c.mu.Lock()
	c.assoc, c.last = a, a
	c.mu.Unlock()
	return nil
}

func sharers(queues, connected int) int { return (queues + connected - 1) / connected }

// rangeBuffers is how many Dataset Management commands a queue has under way at most.
const rangeBuffers = 4

// makeQueues makes n queues for outstanding commands each.
func (c *Controller) makeQueues(n, outstanding int) error {
	queues := make([]*ioQueue, 0, n)
	for range n {
		var ranges [][]byte
		for range rangeBuffers {
			b := c.pool.Reserve(nvme.MaxRanges * nvme.RangeSize)
			if b == nil {
				return &ConfigError{"pool size", fmt.Sprintf("too small for %d queues", n)}
			}
			ranges = append(ranges, b)
		}
		queues = append(queues, newIOQueue(outstanding, ranges))
	}
	c.mu.Lock()
	c.queues = queues
	c.mu.Unlock()
	return nil
}

func (c *Controller) setRetryDelays(id *nvme.IdentifyController) {
	var d [3]time.Duration
	for i, v := range id.CRDT {
		d[i] = time.Duration(v) * 100 * time.Millisecond
	}
	c.retryDelays.Store(&d)
}

// resume lets requests run on the newest association.
func (c *Controller) resume(writes bool) {
	c.mu.Lock()
	a, queues := c.assoc, c.queues
	c.mu.Unlock()
	limit := (a.depth - 1) / sharers(len(queues), len(a.io))
	for i, q := range queues {
		q.resume(a.io[i%len(a.io)], limit, writes)
	}
	a.watch(func(err error) { c.post(machineEvent{kind: evLost, err: err}) })
	a.goroutines.Go(func() { c.clock(a) })
	a.goroutines.Go(func() { c.rescans(a) })
}

// clock runs the queues' clocks and ends the association when a command is late.
func (c *Controller) clock(a *association) {
	t := time.NewTicker(c.tick)
	defer t.Stop()
	limit := c.ticks(c.cfg.IOTimeout) + 1 // a command may be sent just before a tick
	for {
		select {
		case <-t.C:
		case <-a.stop:
			return
		}
		c.endPauses(time.Now())
		for i, q := range c.ioQueues() {
			if q.advanceClock(limit) {
				a.io[i%len(a.io)].Fail(&TimeoutError{fmt.Sprintf("command on I/O queue %d", i%len(a.io)+1), c.cfg.IOTimeout})
			}
		}
	}
}

// quiesce closes the association. Afterwards the fabric holds no request and touches no memory.
func (c *Controller) quiesce() {
	c.mu.Lock()
	a, queues := c.assoc, c.queues
	c.mu.Unlock()
	for _, q := range queues {
		q.hold()
	}
	a.close()
	e := machineEvent{kind: evQuiesced, grace: a.grace()}
	for _, q := range queues {
		if q.tookWrites() {
			e.writes = true
		}
	}
	c.mu.Lock()
	c.assoc = nil
	if e.writes {
		c.writesUntil = time.Now().Add(e.grace)
	}
	c.mu.Unlock()
	c.post(e)
}

// orderly lets what is under way end, then shuts the controller down, all within ShutdownTimeout.
func (c *Controller) orderly() {
	ctx, cancel := context.WithTimeoutCause(context.Background(), c.cfg.ShutdownTimeout,
		&TimeoutError{"shutdown", c.cfg.ShutdownTimeout})
	defer cancel()
	c.mu.Lock()
	a, queues := c.assoc, c.queues
	c.mu.Unlock()
	half := time.After(c.cfg.ShutdownTimeout / 2)
	for _, q := range queues {
		select {
		case <-q.whenIdle():
		case <-a.admin.Done():
		case <-half:
			half = time.After(0)
		}
	}
	if err := a.shutdown(ctx); err != nil {
		c.cfg.Logger.Warn("the controller did not shut down in order", "err", err)
	}
}

func (c *Controller) ioQueues() []*ioQueue {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queues
}

// traffic counts what the controller has completed.
func (c *Controller) traffic() (n uint64) {
	for _, q := range c.ioQueues() {
		q.mu.Lock()
		n += q.counters.Completed
		q.mu.Unlock()
	}
	return n
}

// State is where the connection is in its life.
func (c *Controller) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// Err is the first cause of the last failure, nil if there was none.
func (c *Controller) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Done is closed when the connection is dead: nothing of it is left but the pool, which stays until Shutdown, so that
// requests can still be made, and fail with what Err says.
func (c *Controller) Done() <-chan struct{} { return c.done }

// Shutdown ends the connection: requests that wait fail with blockdev.ErrClosed, those under way get time to
// end, the controller is told, everything is freed, the pool too, and no goroutine is left. It takes little more than
// ShutdownTimeout even if the controller does not answer. But as long as an RDMA device refuses to stop (its driver or
// the kernel hangs) it waits, because the device may still write to the pool. If ctx ends first the shutdown goes on,
// without the pool.
// Errors: ctx's; buffers that are still leased. It may be called again.
func (c *Controller) Shutdown(ctx context.Context) error {
	c.post(machineEvent{kind: evDelete})
	select {
	case <-c.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	c.cmds.close()
	return c.pool.Close()
}

// errNotLive is what admin commands get while there is no association.
var errNotLive = errors.New("not connected at the moment")

// live returns the association, if I/O runs.
func (c *Controller) live() (*association, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.assoc == nil || c.state != StateLive {
		return nil, fmt.Errorf("%w: %w: %s", blockdev.ErrLost, errNotLive, c.state)
	}
	return c.assoc, nil
}

// Admin runs an admin command, with data, ordinary memory of at most 1 MiB, moved in direction dir. The
// command is sent once. Errors: *nvme.StatusError, together with the completion; blockdev.ErrLost while there
// is no connection; *transport.LostError when it ends; ctx's, and then the command may still be executed.
func (c *Controller) Admin(ctx context.Context, cmd *nvme.Command, data []byte, dir transport.Direction) (nvme.Completion, error) {
	a, err := c.live()
	if err != nil {
		return nvme.Completion{}, err
	}
	if len(data)%4 != 0 {
		return nvme.Completion{}, fmt.Errorf("data of %d bytes: not a multiple of 4", len(data))
	}
	if int64(len(data)) > a.limits.maxTransfer {
		return nvme.Completion{}, fmt.Errorf("data of %d bytes: the controller takes at most %d", len(data), a.limits.maxTransfer)
	}
	return a.call(ctx, cmd, data, dir)
}
