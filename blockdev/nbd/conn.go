package nbd

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

const (
	receiveSize = 64 << 10 // of the receive buffer; longer payloads go straight into leases
	// deviceSpin and clientSpin are how long a connection waits by polling, for the device's completions and for
	// the client's next request, if it has looked spinLooks times by then. A wake-up costs either side a switch of
	// threads; where looks take long, because others use the processor or all is slow, it costs more, too. Counting
	// looks matters there: under emulation on two processors 512 gave 15 % more IOPS at depth 32 than 64 did,
	// because the processors were idle for an eighth of the time instead of a quarter.
	deviceSpin = time.Millisecond
	clientSpin = 500 * time.Microsecond
	spinLooks  = 512
)

// spinners is how many connections may wait by polling at one time.
func spinners() int { return max(1, runtime.GOMAXPROCS(0)-1) }

// conn is a connection in the transmission phase. One goroutine, run, reads the socket, submits and polls. Replies
// are sent in batches by whoever finds some and nobody sending: run while it is awake, else the goroutine on
// which the device calls Done; when the socket takes no more, the writer goes on, so that nobody else blocks.
//
// Locks: mu, then the pool's. Nothing of the device is called with mu held.
type conn struct {
	agreed
	srv   *Server
	sock  net.Conn
	raw   syscall.RawConn
	pool  *blockdev.Pool
	queue blockdev.Queue
	// kernel: the client is this machine's, which never leaves a reply.
	kernel bool

	ctx    context.Context // ends with the connection: for waiting without the socket
	cancel context.CancelFunc
	ended  chan struct{} // closed when run is done

	// run's own
	in                   receiver
	started              bool // something was submitted since the last Poll or Kick
	farewell             bool // the client said that it leaves; to be read when run is done
	forDevice, forClient patience

	mu        sync.Mutex
	free      taskList
	replies   taskList   // completed, not yet taken by a sender
	awake     bool       // run will look at replies before it sleeps
	sending   bool       // out has an owner
	stopping  bool       // read no more requests
	broken    error      // the socket failed, or the client broke the protocol: nothing more is sent
	freed     *sync.Cond // a task; while wantsRoom, a Read's buffer
	wantsRoom bool
	total     int          // tasks, free and in use
	taken     atomic.Int64 // bytes of buffers leased for Reads that were released: what receiver.borrowed counted

	out       sender
	writerDo  chan struct{} // hands out to the writer; closed when run is done
	writerEnd chan struct{}
}

func newConn(s *Server, sock net.Conn, a agreed, number int) (*conn, error) {
	raw, err := rawConn(sock)
	if err != nil {
		return nil, err
	}
	c := &conn{
		srv: s, agreed: a, sock: sock, raw: raw,
		pool: a.export.Device.Pool(), queue: a.export.Device.Queue(number),
		ended: make(chan struct{}), writerDo: make(chan struct{}, 1), writerEnd: make(chan struct{}),
		awake: true, total: queueDepthLimit,
	}
	c.freed = sync.NewCond(&c.mu)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	tasks := make([]task, queueDepthLimit)
	done := c.partDone
	for i := range tasks {
		t := &tasks[i]
		t.req.Owner, t.req.Done = t, done
		c.free.push(t)
	}
	c.in.init(c)
	c.out.init(c)
	return c, nil
}

// stop makes the connection end after the requests that were received. It does not wait.
func (c *conn) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopping = true
	c.cancel()
	// wakes run, which may be waiting for a request; replies still go out
	_ = c.sock.SetReadDeadline(time.Unix(1, 0))
	_ = c.sock.SetWriteDeadline(time.Now().Add(c.srv.cfg.CloseTimeout / 2))
}

// fail notes that nothing more can be sent, and why; the first reason stays.
func (c *conn) fail(err error) {
	c.mu.Lock()
	c.failLocked(err)
	c.mu.Unlock()
}

func (c *conn) failLocked(err error) {
	if c.broken == nil {
		c.broken = err
		c.cancel()
	}
	for t := c.replies.pop(); t != nil; t = c.replies.pop() {
		c.recycle(t)
	}
}

// errStalled ends a connection that holds what others wait for.
var errStalled = errors.New("the client stopped in the midst of a transfer while others wait for its buffer")

// mayStall runs a transfer that waits for the client, again and again as long as nobody needs the buffers that it
// holds, since the time given. set is the socket's SetReadDeadline or SetWriteDeadline.
func (c *conn) mayStall(since time.Time, set func(time.Time) error, transfer func() error) error {
	deadline := func(t time.Time) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.stopping { // else stop's deadline stands
			_ = set(t)
		}
	}
	defer deadline(time.Time{})
	limit := c.srv.cfg.StallTimeout
	for {
		deadline(time.Now().Add(limit / 4))
		err := transfer()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		c.mu.Lock()
		stopping := c.stopping
		c.mu.Unlock()
		if stopping {
			return err
		}
		// Many wait for a moment where much is going on: only who waits for long needs this client's buffers.
		if time.Since(since) >= limit && c.pool.Waiting() >= limit {
			return errStalled
		}
	}
}

// run serves requests until the client leaves or the server stops, and returns when no request is under way
// and no buffer is held.
func (c *conn) run() error {
	defer close(c.ended)
	go c.writer()
	err := c.loop()
	if err != nil {
		c.fail(err)
	}
	c.in.abandon()
	c.stop() // who leaves must take what is due
	for c.queue.Poll(0) > 0 {
		c.flush()
	}
	c.queue.Kick()
	c.sleep()
	c.flush()
	c.mu.Lock()
	for c.free.n < c.total {
		c.freed.Wait()
	}
	err = c.broken
	c.mu.Unlock()
	close(c.writerDo)
	<-c.writerEnd
	c.cancel()
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return nil // a client may leave as it likes
	}
	return err
}

// errDone ends the loop at the client's wish, or the server's.
var errDone = errors.New("done")

func (c *conn) loop() error {
	for {
		state, err := c.in.parse()
		if err == nil && c.started {
			// Only look: the queue is handed to the device's own goroutine before this one blocks. Nothing
			// may have been started if another goroutine polls: that is made good then, too.
			c.started = c.queue.Poll(-1) == 0
		}
		if err != nil {
			if errors.Is(err, errDone) {
				return nil
			}
			return err
		}
		switch {
		case state != wantInput:
			c.flush()
			err = c.waitFor(state)
		case c.in.full: // there may be more: answer it all together
			if c.in.full = false; c.pendingReplies() > queueDepthLimit/4 {
				c.flush()
			}
			_, err = c.in.tryRead()
		default:
			c.flush()
			err = c.waitInput()
		}
		if err != nil {
			if errors.Is(err, errDone) {
				return nil
			}
			return err
		}
	}
}

func (c *conn) pendingReplies() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.replies.n
}

// kick starts what was submitted, if that is in doubt.
func (c *conn) kick() {
	if c.started {
		c.started = false
		c.queue.Kick()
	}
}

// sleep says that run is about to block: from here on completions send their replies themselves.
func (c *conn) sleep() {
	c.mu.Lock()
	c.awake = false
	c.mu.Unlock()
	c.flush() // what came before
}

func (c *conn) wake() {
	c.mu.Lock()
	c.awake = true
	c.mu.Unlock()
}

// waitInput returns when something was read. It first polls device and socket, as long as experience says that
// it pays.
func (c *conn) waitInput() error {
	for {
		p, limit := &c.forClient, clientSpin
		if c.underWay() {
			p, limit = &c.forDevice, deviceSpin
		}
		n, completed, err := 0, false, error(nil)
		if p.willing() {
			select {
			case c.srv.spinning <- struct{}{}:
				n, completed, err = c.spin(limit)
				<-c.srv.spinning
				p.learn(n > 0 || completed)
			default:
			}
		}
		if n > 0 || err != nil {
			return err
		}
		if !completed {
			break
		}
	}
	for c.queue.Poll(0) > 0 { // until it says 0 the device relies on this goroutine
		c.flush()
	}
	c.kick()
	c.sleep()
	defer c.wake()
	if c.in.fill == nil {
		_, err := c.in.waitRead()
		return err
	}
	if c.in.stalled.IsZero() {
		c.in.stalled = time.Now()
	}
	return c.mayStall(c.in.stalled, c.sock.SetReadDeadline, func() error { _, err := c.in.waitRead(); return err })
}

// underWay says whether the device, or a reply, is waited for.
func (c *conn) underWay() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.free.n < c.total
}

// patience decides whether to wait by polling. After waits that polling did not shorten it lets 1, 3, 7, ... 63
// pass, so that a slow device or client costs next to nothing; one that was short makes it willing again.
type patience struct{ pass, left int }

func (p *patience) willing() bool {
	if p.left > 0 {
		p.left--
		return false
	}
	return true
}

func (p *patience) learn(short bool) {
	if p.pass = min(2*p.pass+1, 63); short {
		p.pass = 0
	}
	p.left = p.pass
}

// spin alternates between the socket and the device until something was read or completed, or until limit is over
// and it has looked spinLooks times: what a yield took, others have used, and what they did is looked at.
func (c *conn) spin(limit time.Duration) (n int, completed bool, err error) {
	for begin, looks := time.Now(), 0; looks < spinLooks || time.Since(begin) < limit; {
		if n, err = c.in.tryRead(); n > 0 || err != nil {
			return n, false, err
		}
		for range 4 { // a look at the device is cheaper
			if c.queue.Poll(-1) > 0 {
				c.flush()
				return 0, true, nil
			}
			c.flush() // of what others completed
			yield()
			looks++
		}
	}
	return 0, false, nil
}

// yield lets others have the processor. A poller that does not starves those whom it waits for.
func yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// waitFor waits for what parse was short of.
func (c *conn) waitFor(what want) error {
	for n := c.queue.Poll(0); n > 0; n = c.queue.Poll(0) {
		c.flush()
		if what == wantSlot || what == wantRoom {
			return nil // try again before anything else
		}
	}
	c.kick()
	c.sleep()
	defer c.wake()
	switch what {
	case wantSlot:
		c.mu.Lock()
		for c.free.n == 0 {
			c.freed.Wait()
		}
		c.mu.Unlock()
	case wantLease:
		b, err := c.pool.Lease(c.ctx, c.in.leaseSize)
		if errors.Is(err, blockdev.ErrPoolClosed) && c.in.giveUp(err) {
			return nil // the device is going: errors are better than a connection that ends, which may be made again
		}
		if err != nil {
			return c.waitError(err)
		}
		c.in.spare = b
	case wantLarge:
		if err := c.pool.Collect(c.ctx); err != nil {
			return c.waitError(err)
		}
		c.in.hasLarge = true
	case wantRoom:
		c.mu.Lock()
		c.wantsRoom = true
		for !c.hasRoom() {
			c.freed.Wait()
		}
		c.wantsRoom = false
		c.mu.Unlock()
	}
	return nil
}

// waitError is why a wait without the socket ended.
func (c *conn) waitError(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return c.broken
	}
	if c.stopping {
		return errDone
	}
	return err
}

// errUnfinished ends a connection in the midst of a command.
var errUnfinished = errors.New("the connection ended in the midst of a command")
