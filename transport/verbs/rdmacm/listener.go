//go:build cgo && linux

package rdmacm

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"fmt"
	"io"
	"sync"
	"unsafe"

	"farblk/transport/verbs"
)

// defaultBacklog is how many requests may wait for Accept.
const defaultBacklog = 128

// listener implements verbs.Listener. Each request gets an event channel of its own as soon as it comes.
type listener struct {
	p       *Provider
	ch      *channel
	id      *C.struct_rdma_cm_id
	addr    verbs.Addr
	pending chan *conn
	closing chan struct{}
	closed  chan struct{}
	once    sync.Once
}

// Listen binds addr and waits for requests.
func (p *Provider) Listen(ctx context.Context, addr verbs.Addr, backlog int) (verbs.Listener, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	sa, err := encode(addr)
	if err != nil {
		return nil, err
	}
	ch, err := openChannel()
	if err != nil {
		return nil, err
	}
	l := &listener{
		p: p, ch: ch, addr: addr, pending: make(chan *conn, backlog),
		closing: make(chan struct{}), closed: make(chan struct{}),
	}
	ib := C.int(0)
	if addr.Family == verbs.FamilyIB {
		ib = 1
	}
	if r := C.farblk_create_id(ch.ch, &l.id, ib); r != 0 {
		ch.stop()
		ch.destroy()
		return nil, callError("rdma_create_id", int(-r), addr)
	}
	if r := C.farblk_bind_listen(l.id, unsafe.Pointer(&sa), C.int(backlog)); r != 0 {
		ch.stop()
		C.farblk_destroy_id(l.id)
		ch.destroy()
		return nil, callError("rdma_bind_addr", int(-r), addr)
	}
	var local, remote sockaddr
	C.farblk_addresses(l.id, unsafe.Pointer(&local), unsafe.Pointer(&remote))
	l.addr.Port = decode(&local).Port
	ch.read(l.handle)
	return l, nil
}

// handle takes an event, on the channel's goroutine.
func (l *listener) handle(e event) {
	if e.kind != connectRequest || e.id == nil {
		l.p.log.Debug("listener event without effect", "event", e.kind, "status", e.status, "listener", l.addr)
		return
	}
	c, err := l.adopt(e)
	if err != nil {
		l.p.log.Warn("connection request dropped", "listener", l.addr, "error", err)
		return
	}
	select {
	case l.pending <- c:
	default:
		l.p.log.Warn("connection request dropped: too many wait", "listener", l.addr, "remote", c.remote)
		go func() { _ = c.Close() }()
	}
}

// adopt moves the new identifier to an event channel of its own.
func (l *listener) adopt(e event) (*conn, error) {
	ch, err := openChannel()
	if err != nil {
		C.farblk_destroy_id(e.id)
		return nil, err
	}
	if r := C.farblk_migrate(e.id, ch.ch); r != 0 {
		C.farblk_destroy_id(e.id)
		ch.stop()
		ch.destroy()
		return nil, callError("rdma_migrate_id", int(-r), l.addr)
	}
	c := newConn(l.p, ch, e.id)
	c.request = e
	if err := c.located(); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (l *listener) Addr() verbs.Addr { return l.addr }

// Accept returns the next request.
func (l *listener) Accept(ctx context.Context) (verbs.Conn, error) {
	select {
	case <-l.closing:
		return nil, fmt.Errorf("listener on %v: %w", l.addr, verbs.ErrClosed)
	default:
	}
	select {
	case c := <-l.pending:
		return c, nil
	case <-l.closing:
		return nil, fmt.Errorf("listener on %v: %w", l.addr, verbs.ErrClosed)
	case <-ctx.Done():
		return nil, fmt.Errorf("listener on %v: %w", l.addr, ctx.Err())
	}
}

// Close stops listening; requests that nobody accepted are dropped.
func (l *listener) Close() error {
	l.once.Do(func() {
		defer close(l.closed)
		close(l.closing)
		l.ch.stop()
		closeAll(l.pending)
		C.farblk_destroy_id(l.id)
		l.ch.destroy()
	})
	<-l.closed
	return nil
}

// closeAll closes all that wait, side by side: each may wait for the kernel.
func closeAll[C io.Closer](pending <-chan C) {
	var closes sync.WaitGroup
	defer closes.Wait()
	for {
		select {
		case c := <-pending:
			closes.Go(func() { _ = c.Close() })
		default:
			return
		}
	}
}
