//go:build cgo && linux

package rdmacm

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"farblk/transport/verbs"
)

// resolveLimit bounds address resolution and route resolution, each, as Linux's own host does.
const resolveLimit = 3 * time.Second

// rnrTimer is how long a peer waits before it sends again to a queue without receives: code 12 is 0.64 ms
// (IBA table 45). The connection manager's default, code 0, is 655 ms.
const rnrTimer = 12

// Resolve finds the device and the route. A bound local address has port 0, so that any number of connections
// can leave from it: the connection manager gives each a port of its own.
func (p *Provider) Resolve(ctx context.Context, r verbs.Route) (verbs.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	dst, err := encode(r.Remote)
	if err != nil {
		return nil, err
	}
	var src sockaddr
	bound := unsafe.Pointer(nil)
	if r.Local.IsValid() {
		r.Local.Port = 0
		if r.Local.Family != r.Remote.Family || r.Local.IP.Unmap().Is4() != r.Remote.IP.Unmap().Is4() {
			return nil, fmt.Errorf("%w: %v and %v are of different families", verbs.ErrAddrNotAvailable, r.Local, r.Remote)
		}
		if src, err = encode(r.Local); err != nil {
			return nil, err
		}
		bound = unsafe.Pointer(&src)
	}
	ch, err := openChannel()
	if err != nil {
		return nil, err
	}
	var id *C.struct_rdma_cm_id
	ib := C.int(0)
	if r.Remote.Family == verbs.FamilyIB {
		ib = 1
	}
	if e := C.farblk_create_id(ch.ch, &id, ib); e != 0 {
		ch.stop()
		ch.destroy()
		return nil, callError("rdma_create_id", int(-e), r.Remote)
	}
	c := newConn(p, ch, id)
	c.remote = r.Remote
	if err := c.resolve(ctx, r, bound, unsafe.Pointer(&dst)); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (c *conn) resolve(ctx context.Context, r verbs.Route, src, dst unsafe.Pointer) error {
	ms := C.int(resolveLimit / time.Millisecond)
	if r.TOSSet {
		if e := C.farblk_set_tos(c.id, C.uint8_t(r.TOS)); e != 0 {
			return callError("rdma_set_option(TOS)", int(-e), r.Remote)
		}
	}
	if e := C.farblk_resolve_addr(c.id, src, dst, ms); e != 0 {
		return resolveFailure(addrError, int(e), r.Remote)
	}
	if _, err := c.step(ctx, addrResolved, resolveLimit+time.Second); err != nil {
		return err
	}
	if err := c.located(); err != nil {
		return err
	}
	c.remote = r.Remote // as asked: with its zone, and its port
	if r.Device != "" && r.Device != c.device.Name && r.Device != c.device.NetDevice {
		return fmt.Errorf("%w %q leads to %v: the route goes over %q", verbs.ErrNoDevice, r.Device, r.Remote, c.device.Name)
	}
	if e := C.farblk_resolve_route(c.id, ms); e != 0 {
		return resolveFailure(routeError, int(e), r.Remote)
	}
	_, err := c.step(ctx, routeResolved, resolveLimit+time.Second)
	return err
}

// params lowers the request to what the device can do, and on the passive side to what the peer asked for.
func (c *conn) params(p verbs.ConnParams, ird, ord int) (*C.struct_farblk_params, error) {
	out := &C.struct_farblk_params{}
	if len(p.PrivateData) > 255 {
		return nil, fmt.Errorf("%v: %d bytes of private data, at most 255 can go", c.remote, len(p.PrivateData))
	}
	for i, b := range p.PrivateData {
		out.private_data[i] = C.uint8_t(b)
	}
	out.private_len = C.uint8_t(len(p.PrivateData))
	out.responder_resources = C.uint8_t(min(int(p.ResponderResources), c.device.MaxResponderResources, ird))
	out.initiator_depth = C.uint8_t(min(int(p.InitiatorDepth), c.device.MaxInitiatorDepth, ord))
	out.retry_count = C.uint8_t(min(p.RetryCount, 7))
	out.rnr_retry_count = C.uint8_t(min(p.RNRRetryCount, 7))
	return out, nil
}

// Connect asks for the connection and waits until it is up. siw connects its TCP socket inside the call, so the call
// has a goroutine of its own: ctx still bounds the wait.
func (c *conn) Connect(ctx context.Context, p verbs.ConnParams) ([]byte, error) {
	if err := c.ready(ctx); err != nil {
		return nil, err
	}
	cp, err := c.params(p, 255, 255)
	if err != nil {
		return nil, err
	}
	done, err := c.call(func() int {
		if c.device.Link == verbs.LinkIWARP {
			return c.connectApart(cp)
		}
		return int(C.farblk_connect(c.id, cp))
	})
	if err != nil {
		return nil, err
	}
	if err := c.await(ctx, "rdma_connect", done); err != nil {
		return nil, err
	}
	e, err := c.step(ctx, established, 0)
	if err != nil {
		return nil, err
	}
	c.established()
	return e.private, nil
}

// connectApart makes the call in a thread that closing can cancel; without it a dead address would hold the
// connection for as long as TCP tries.
func (c *conn) connectApart(p *C.struct_farblk_params) int {
	const look = 50 // ms: how soon that is noticed
	t := (*C.struct_farblk_connecting)(C.calloc(1, C.sizeof_struct_farblk_connecting))
	defer C.free(unsafe.Pointer(t))
	t.id, t.params = c.id, *p
	if r := C.farblk_connect_start(t); r != 0 {
		return int(r)
	}
	var result C.int
	for cancelled := false; C.farblk_connect_join(t, look, &result) != 0; {
		if !cancelled && c.interrupted() {
			C.farblk_connect_cancel(t)
			cancelled = true
		}
	}
	return int(result)
}

func (c *conn) ready(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interrupted() {
		return verbs.ErrClosed
	}
	if c.qp == nil {
		return errNoQP
	}
	return nil
}

// established sets what the connection manager leaves at an unusable default.
func (c *conn) established() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil || c.device.Link == verbs.LinkIWARP {
		return
	}
	if r := c.qp.setRNRTimer(rnrTimer); r != 0 {
		c.p.log.Debug("RNR timer left at the default", "device", c.device.Name, "errno", -r)
	}
}

func (c *conn) PrivateData() []byte { return c.request.private }

// PeerParams gives the request as the peer made it: the event has the roles from our point of view.
func (c *conn) PeerParams() verbs.ConnParams {
	return verbs.ConnParams{
		PrivateData:        c.request.private,
		ResponderResources: c.request.initiatorDepth, InitiatorDepth: c.request.responderResources,
		RetryCount: c.request.retryCount, RNRRetryCount: c.request.rnrRetryCount,
	}
}

// Accept agrees to the request and waits until the connection is up.
func (c *conn) Accept(ctx context.Context, p verbs.ConnParams) error {
	if err := c.ready(ctx); err != nil {
		return err
	}
	cp, err := c.params(p, int(c.request.responderResources), int(c.request.initiatorDepth))
	if err != nil {
		return err
	}
	done, err := c.call(func() int { return int(C.farblk_accept(c.id, cp)) })
	if err != nil {
		return err
	}
	if err := c.await(ctx, "rdma_accept", done); err != nil {
		return err
	}
	if _, err := c.step(ctx, established, 0); err != nil {
		return err
	}
	c.established()
	return nil
}

// Reject refuses the request, and closes the connection.
func (c *conn) Reject(private []byte) error {
	cp, err := c.params(verbs.ConnParams{PrivateData: private}, 0, 0)
	if err != nil {
		return err
	}
	done, err := c.call(func() int {
		return int(C.farblk_reject(c.id, unsafe.Pointer(&cp.private_data[0]), cp.private_len))
	})
	if err == nil {
		err = c.await(context.Background(), "rdma_reject", done)
	}
	_ = c.Close()
	return err
}
