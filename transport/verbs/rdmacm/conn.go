//go:build cgo && linux

package rdmacm

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"farblk/transport/verbs"
)

// conn implements verbs.Conn over one rdma_cm identifier.
//
// Lock order: the queue pair's locks, then conn.mu. The event goroutine takes only conn.mu.
type conn struct {
	p             *Provider
	ch            *channel
	id            *C.struct_rdma_cm_id
	device        verbs.Device
	local, remote verbs.Addr

	// Passive side: what the peer asked for.
	request event

	steps   chan event    // what happened to the set-up step under way
	abort   chan struct{} // closed, under mu, when it or its queue pair is being closed: no set-up call goes on
	closed  chan struct{} // closed when Close is done
	down    chan struct{} // closed when err is set
	calls   sync.WaitGroup
	once    sync.Once
	closeBy time.Time // set by the first Close

	mu  sync.Mutex // guards what follows, and the identifier and the queue pair against destruction under a call
	up  bool       // ESTABLISHED was seen
	err error
	qp  *queuePair
}

func newConn(p *Provider, ch *channel, id *C.struct_rdma_cm_id) *conn {
	c := &conn{
		p: p, ch: ch, id: id,
		// An attempt has at most a handful of events; a late one more is of no interest.
		steps: make(chan event, 8), abort: make(chan struct{}), closed: make(chan struct{}), down: make(chan struct{}),
	}
	ch.read(c.handle)
	return c
}

// handle takes an event, on the channel's goroutine.
func (c *conn) handle(e event) {
	c.mu.Lock()
	up := c.up
	if e.kind == established {
		c.up = true
		if c.qp != nil {
			c.qp.connected.Store(true)
		}
	}
	c.mu.Unlock()
	if reason := endReason(e.kind); reason != nil {
		c.fail(reason)
	} else if up {
		c.p.log.Debug("connection event without effect", "event", e.kind, "status", e.status)
	}
	if !up {
		select {
		case c.steps <- e:
		default:
		}
	}
}

// step waits for the outcome of a set-up call. limit 0 leaves the bound to ctx.
func (c *conn) step(ctx context.Context, want eventType, limit time.Duration) (event, error) {
	var timeout <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		timeout = t.C
	}
	for {
		select {
		case e := <-c.steps:
			if e.kind == timewaitExit {
				continue
			}
			if e.kind == want && e.status == 0 {
				return e, nil
			}
			if want == addrResolved || want == routeResolved {
				return e, resolveFailure(e.kind, e.status, c.remote)
			}
			return e, connectFailure(e.kind, e.status, e.private, c.remote)
		case <-c.abort:
			return event{}, fmt.Errorf("%v: %w", c.remote, verbs.ErrClosed)
		case <-ctx.Done():
			return event{}, fmt.Errorf("%v: waiting for %q: %w", c.remote, want, ctx.Err())
		case <-timeout:
			return event{}, fmt.Errorf("%v: %w (no %q within %v)", c.remote, verbs.ErrUnreachable, want, limit)
		}
	}
}

// located fills in the device and the addresses, which are known once the address is resolved.
func (c *conn) located() error {
	if c.id.verbs == nil {
		return fmt.Errorf("%w leads to %v", verbs.ErrNoDevice, c.remote)
	}
	d, err := describe(c.id.verbs, max(1, int(c.id.port_num)))
	if err != nil {
		return err
	}
	var local, remote sockaddr
	C.farblk_addresses(c.id, unsafe.Pointer(&local), unsafe.Pointer(&remote))
	c.device, c.local, c.remote = d, decode(&local), decode(&remote)
	return nil
}

func (c *conn) Provider() string       { return c.p.Name() }
func (c *conn) Device() verbs.Device   { return c.device }
func (c *conn) LocalAddr() verbs.Addr  { return c.local }
func (c *conn) RemoteAddr() verbs.Addr { return c.remote }

// NewPD allocates a domain on the connection's device.
func (c *conn) NewPD() (verbs.PD, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interrupted() {
		return nil, verbs.ErrClosed
	}
	return newDomain(c.id.verbs, c.device)
}

// NewQP makes the connection's queue pair.
func (c *conn) NewQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interrupted() {
		return nil, verbs.ErrClosed
	}
	if c.qp != nil {
		return nil, errTwice
	}
	d, ok := pd.(*domain)
	if !ok || d.pd.context != c.id.verbs {
		return nil, fmt.Errorf("queue pair on %s: the protection domain is of another device", c.device.Name)
	}
	q, err := newQueuePair(c, d, cfg)
	if err != nil {
		return nil, err
	}
	c.qp = q
	return q, nil
}

// fail ends the connection for the reason; the first reason is kept. It stops posting, tells the peer if there is
// a connection, and moves the queue pair into the error state, so that everything outstanding is flushed.
func (c *conn) fail(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = reason
	close(c.down)
	if c.qp != nil {
		c.qp.halted.Store(true)
	}
	if c.up {
		// Errors do not matter: the peer may be gone already. On IB it answers the peer's request to disconnect.
		_ = C.farblk_disconnect(c.id)
	}
	if c.qp != nil {
		c.qp.halt()
	}
}

func (c *conn) Disconnected() <-chan struct{} { return c.down }

func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Disconnect ends the connection from this side.
func (c *conn) Disconnect() error {
	c.fail(fmt.Errorf("%w: disconnected by this side", verbs.ErrClosed))
	return nil
}

// closeLimit bounds Close of a connection and of a queue pair: the drain, and a little for the kernel.
const closeLimit = verbs.DrainTimeout + verbs.DrainTimeout/4

// Close ends and frees everything. There is no way to take back an iWARP handshake that the peer has not answered:
// the kernel holds the identifier and the queue pair until it times out (10 s with siw). After closeLimit the rest is
// left to a goroutine that ends with it, and the domain's end waits for that as well.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.closeBy = time.Now().Add(closeLimit)
		c.fail(verbs.ErrClosed)
		c.interrupt()
		go c.tearDown()
	})
	limit := time.NewTimer(time.Until(c.closeBy))
	defer limit.Stop()
	select {
	case <-c.closed:
		return nil
	case <-limit.C:
	}
	c.p.log.Warn("the kernel still holds a closed connection", "remote", c.remote, "device", c.device.Name)
	c.mu.Lock()
	q := c.qp
	c.mu.Unlock()
	if q != nil {
		q.awaitStop()
		q.domain.linger(q)
	}
	return nil
}

// interrupt cancels a set-up call under way, and lets no other begin.
func (c *conn) interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.interrupted() {
		close(c.abort)
	}
}

func (c *conn) interrupted() bool {
	select {
	case <-c.abort:
		return true
	default:
		return false
	}
}

func (c *conn) tearDown() {
	defer close(c.closed)
	c.calls.Wait()
	c.ch.stop()
	c.mu.Lock()
	q := c.qp
	c.mu.Unlock()
	if q != nil {
		q.beginClose()
		<-q.destroyed
	}
	if r := C.farblk_destroy_id(c.id); r != 0 {
		c.p.log.Warn("rdma_destroy_id failed", "remote", c.remote, "errno", int(-r))
	}
	c.ch.destroy()
}

// settleCalls waits until no set-up call runs, and until the library has processed the last event of an attempt that is
// not up: such an event changes the queue pair's state.
func (c *conn) settleCalls() {
	c.interrupt()
	c.calls.Wait()
	c.mu.Lock()
	up := c.up
	c.mu.Unlock()
	if !up {
		c.ch.stop()
		c.fail(verbs.ErrClosed)
	}
}

// call runs f unless the connection is closing, and keeps Close from freeing the identifier until f is done.
func (c *conn) call(f func() int) (<-chan int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interrupted() {
		return nil, verbs.ErrClosed
	}
	if c.err != nil {
		return nil, c.err
	}
	c.calls.Add(1)
	done := make(chan int, 1)
	go func() {
		defer c.calls.Done()
		done <- f()
	}()
	return done, nil
}

// await waits for a call.
func (c *conn) await(ctx context.Context, name string, done <-chan int) error {
	select {
	case r := <-done:
		if r != 0 && c.interrupted() {
			return fmt.Errorf("%v: %w", c.remote, verbs.ErrClosed)
		}
		if r != 0 {
			return callError(name, -r, c.remote)
		}
		return nil
	case <-c.abort:
		return fmt.Errorf("%v: %w", c.remote, verbs.ErrClosed)
	case <-ctx.Done():
		return fmt.Errorf("%v: %s: %w", c.remote, name, ctx.Err())
	}
}

var errNotConnected = errors.New("the connection is not up yet")

var errNoQP = errors.New("the connection has no queue pair yet")
