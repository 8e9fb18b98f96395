package iwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

// conn is one connection; see verbs.Conn.
//
// Lock order: mu is a leaf, taken before no other lock.
type conn struct {
	p     *Provider
	route verbs.Route // active side

	tcp     *net.TCPConn // passive side, until it is set up
	request mpa.Frame    // passive side

	life context.Context // ends with Close
	kill context.CancelFunc
	busy sync.WaitGroup // Connect, Accept and Reject under way

	mu            sync.Mutex
	phase         int
	up            bool // the queue pair has the socket, and its engine runs
	local, remote verbs.Addr
	qp            *qp
	err           error

	over     chan struct{} // Disconnected
	overOnce sync.Once
}

// Phases of a conn.
const (
	phaseNew   = iota
	phaseBegun // Connect, Accept or Reject was called
	phaseClosed
)

func newConn(p *Provider) *conn {
	c := &conn{p: p, over: make(chan struct{})}
	c.life, c.kill = context.WithCancel(context.Background())
	return c
}

func (c *conn) Provider() string     { return "iwarp" }
func (c *conn) Device() verbs.Device { return device }

func (c *conn) LocalAddr() verbs.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.local
}

func (c *conn) RemoteAddr() verbs.Addr { return c.remote }

// NewPD makes a protection domain; any connection of the provider may use it.
func (c *conn) NewPD() (verbs.PD, error) { return &pd{keys: make(map[uint32]*region)}, nil }

// NewQP makes the connection's queue pair.
func (c *conn) NewQP(p verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	domain, ok := p.(*pd)
	if !ok {
		return nil, errors.New("protection domain of another provider")
	}
	q, err := newQP(c, domain, cfg)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.qp != nil || c.phase != phaseNew {
		return nil, errors.New("a connection has one queue pair, made before it is set up")
	}
	c.qp = q
	return q, nil
}

// begin enters the one set-up of the connection. The context ends with ctx and with Close.
func (c *conn) begin(ctx context.Context, needQP bool) (context.Context, context.CancelFunc, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.phase == phaseClosed:
		return nil, nil, verbs.ErrClosed
	case c.phase != phaseNew:
		return nil, nil, errors.New("the connection was set up before")
	case needQP && c.qp == nil:
		return nil, nil, errors.New("the connection has no queue pair")
	}
	c.phase = phaseBegun
	c.busy.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.life, cancel)
	return ctx, func() { stop(); cancel(); c.busy.Done() }, nil
}

// setUp hands the socket to the queue pair.
func (c *conn) setUp(tcp *net.TCPConn, o mpa.Outcome, initiator bool) error {
	l, err := newLink(tcp)
	if err != nil {
		return err
	}
	ulpdu := mpa.MaxULPDUFor(l.maxSegmentSize())
	if c.p.opt.MaxSegment > 0 {
		ulpdu = min(ulpdu, max(c.p.opt.MaxSegment, minSegment))
	}
	c.mu.Lock()
	c.local = addrOf(tcp.LocalAddr())
	c.mu.Unlock()
	if err := c.qp.start(l, terms{outcome: o, initiator: initiator, ulpdu: ulpdu}); err != nil {
		return err
	}
	c.mu.Lock()
	c.up = true
	c.mu.Unlock()
	c.p.log.Debug("iWARP connection is up", "local", c.local, "remote", c.remote, "initiator", initiator,
		"crc", o.CRC, "ird", o.IRD, "ord", o.ORD, "segment", ulpdu)
	return nil
}

// minSegment has room for every message that is not cut into segments.
const minSegment = 128

// during runs f with the socket's deadline tied to ctx.
func during(ctx context.Context, tcp *net.TCPConn, f func() error) error {
	stop := context.AfterFunc(ctx, func() { _ = tcp.SetDeadline(time.Unix(1, 0)) })
	err := f()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	return err
}

// ended is the error of a set-up that ctx or Close ended, else err.
func (c *conn) ended(ctx context.Context, err error) error {
	switch {
	case c.life.Err() != nil:
		return verbs.ErrClosed
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w (%w): %w", verbs.ErrTimeout, ctx.Err(), err)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return err
}

// end records why the connection is over, once.
func (c *conn) end(cause error) {
	c.overOnce.Do(func() {
		c.mu.Lock()
		c.err = cause
		c.mu.Unlock()
		close(c.over)
		c.p.log.Debug("iWARP connection is over", "remote", c.remote, "cause", cause)
	})
}

func (c *conn) Disconnected() <-chan struct{} { return c.over }

func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Disconnect ends the stream in order: the peer sees all that was sent, if it takes it within lingerTime.
func (c *conn) Disconnect() error {
	c.mu.Lock()
	q := c.qp
	c.mu.Unlock()
	if q != nil && q.state.Load() != stateIdle {
		q.disconnect(verbs.ErrClosed)
		q.settle()
	}
	return nil
}

// Close ends and frees everything. It waits for the peer for lingerTime at most. Nothing is sent any more when it has
// returned, not even by the kernel.
func (c *conn) Close() error {
	c.kill()
	c.mu.Lock()
	c.phase = phaseClosed // nothing begins any more
	c.mu.Unlock()
	c.busy.Wait()
	c.mu.Lock()
	q, tcp, up := c.qp, c.tcp, c.up
	c.tcp = nil
	c.mu.Unlock()
	if q != nil {
		_ = q.Close()
		if up {
			<-q.engine.done
		}
	}
	if tcp != nil {
		_ = tcp.Close()
	}
	c.end(verbs.ErrClosed)
	return nil
}

// refuse closes a socket so that the peer can read the last bytes first.
func refuse(tcp *net.TCPConn) {
	_ = tcp.CloseWrite()
	_ = tcp.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.CopyN(io.Discard, tcp, 1<<16)
	_ = tcp.Close()
}
