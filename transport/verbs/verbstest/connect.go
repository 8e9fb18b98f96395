package verbstest

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"farblk/transport/verbs"
)

func testDevices(t *testing.T, p verbs.Provider, o Options) {
	ds, err := p.Devices()
	if err != nil || len(ds) == 0 {
		t.Fatalf("Devices: %v, %v", ds, err)
	}
	c := resolve(t, p, verbs.Route{Remote: listen(t, p, o).Addr()})
	d := c.Device()
	if d.Name == "" || d.Link == verbs.LinkUnknown || d.MaxQPDepth < 64 || d.MaxSGE < 1 || d.MaxSGE > verbs.MaxSGE ||
		d.MaxCQE < 128 || d.MaxResponderResources < 1 || d.MaxInitiatorDepth < 1 {
		t.Errorf("implausible device %+v", d)
	}
	if c.Provider() != p.Name() {
		t.Errorf("connection is of provider %q, the provider is %q", c.Provider(), p.Name())
	}
	for _, other := range ds {
		if other == d {
			return
		}
	}
	t.Errorf("the connection's device %+v is not in %+v", d, ds)
}

func testPrivateData(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	cl, sv := connectTo(t, p, l, shape{reads: 3})
	if !bytes.HasPrefix(cl.private, []byte("from the passive side")) || !bytes.HasPrefix(sv.private, []byte("from the active side")) {
		t.Errorf("private data: active side got %q, passive side got %q", cl.private, sv.private)
	}
	if got := sv.conn.PeerParams().ResponderResources; got != 3 {
		t.Errorf("passive side sees %d responder resources of the peer, want 3", got)
	}
	if r, a := cl.conn.RemoteAddr(), l.Addr(); r.IP.WithZone("") != a.IP.WithZone("") || r.Port != a.Port {
		t.Errorf("active side's remote address is %v, want %v", r, a)
	}
	if l, r := cl.conn.LocalAddr(), sv.conn.RemoteAddr(); l.IP.WithZone("") != r.IP.WithZone("") {
		t.Errorf("active side is at %v but the passive side sees %v", l, r)
	}
}

// offer starts a connection attempt that the passive side has received and not answered.
func offer(t *testing.T, p verbs.Provider, o Options) (active, passive *end, result <-chan error) {
	t.Helper()
	l := listen(t, p, o)
	s := shape{mem: 1 << 16}.filled()
	cl, err := equip(t, resolve(t, p, verbs.Route{Remote: l.Addr()}), s)
	if err != nil {
		t.Fatal(err)
	}
	ch := make(chan error, 1)
	go func() {
		_, err := cl.conn.Connect(timed(t), s.params([]byte("hello")))
		ch <- err
	}()
	c, err := l.Accept(timed(t))
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	sv, err := equip(t, c, s)
	if err != nil {
		t.Fatal(err)
	}
	return cl, sv, ch
}

func testReject(t *testing.T, p verbs.Provider, o Options) {
	_, sv, result := offer(t, p, o)
	if err := sv.conn.Reject([]byte("no!?")); err != nil {
		t.Fatalf("reject: %v", err)
	}
	err := <-result
	var r *verbs.RejectError
	if !errors.As(err, &r) || !r.Consumer {
		t.Fatalf("active side got %v (%+v), want a reject by the consumer", err, r)
	}
	if !o.PlainReject && !bytes.HasPrefix(r.PrivateData, []byte("no!?")) {
		t.Errorf("reject carries %q", r.PrivateData)
	}
}

func testNobodyListens(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	a := l.Addr()
	mustClose(t, "listener", l.Close)
	cl, err := equip(t, resolve(t, p, verbs.Route{Remote: a}), shape{mem: 4096}.filled())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cl.conn.Connect(timed(t), shape{reads: 1}.params(nil)); !errors.Is(err, verbs.ErrRefused) {
		t.Errorf("connect where nobody listens: %v, want %v", err, verbs.ErrRefused)
	}
}

func testConnectDeadline(t *testing.T, p verbs.Provider, o Options) {
	cl, err := equip(t, resolve(t, p, verbs.Route{Remote: listen(t, p, o).Addr()}), shape{mem: 4096}.filled())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err = cl.conn.Connect(ctx, shape{reads: 1}.params(nil))
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, verbs.ErrTimeout) {
		t.Errorf("connect that nobody answers: %v", err)
	}
	if d := time.Since(start); d > 10*time.Second { // a bound that a busy machine keeps
		t.Errorf("a deadline of 200 ms took %v", d)
	}
}

func testResolveCancelled(t *testing.T, p verbs.Provider, o Options) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	c, err := p.Resolve(ctx, verbs.Route{Remote: listen(t, p, o).Addr()})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("resolve with a cancelled context: %v", err)
	}
	if err == nil {
		mustClose(t, "connection", c.Close)
	}
}

func testCloseDuringConnect(t *testing.T, p verbs.Provider, o Options) {
	cl, sv, result := offer(t, p, o)
	mustClose(t, "connecting side", cl.conn.Close)
	if err := <-result; !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("interrupted connect: %v, want %v", err, verbs.ErrClosed)
	}
	mustClose(t, "unanswered request", sv.conn.Close)
}

// testQPCloseDuringConnect frees the queue pair first, as an owner does who gives up on an attempt. The passive side
// does not answer, or accepts when it is too late.
func testQPCloseDuringConnect(t *testing.T, p verbs.Provider, o Options) {
	for name, accepts := range map[string]bool{"no answer": false, "accepted": true} {
		t.Run(name, func(t *testing.T) {
			cl, sv, result := offer(t, p, o)
			start := time.Now()
			mustClose(t, "queue pair", cl.qp.Close)
			mustClose(t, "region", cl.mr.Close)
			if accepts {
				done := make(chan struct{})
				defer func() { <-done }()
				defer sv.conn.Close()
				go func() {
					defer close(done)
					_ = sv.conn.Accept(timed(t), shape{reads: 1}.params(nil)) // may succeed: the active side ends it later
				}()
				if err := <-result; err == nil {
					t.Error("connected without a queue pair")
				}
			}
			mustClose(t, "connecting side", cl.conn.Close)
			if d := time.Since(start); d > 8*time.Second { // siw takes DrainTimeout and more for each; its handshake ends after 10 s
				t.Errorf("closing took %v", d)
			}
			if !accepts {
				if err := <-result; err == nil {
					t.Error("connected without a queue pair")
				}
			}
			if _, err := cl.qp.Poll(cl.buf[:]); !errors.Is(err, verbs.ErrClosed) {
				t.Errorf("Poll after close: %v", err)
			}
		})
	}
}

func testListenerClose(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	result := make(chan error, 1)
	go func() {
		_, err := l.Accept(timed(t))
		result <- err
	}()
	mustClose(t, "listener", l.Close)
	if err := <-result; !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("interrupted accept: %v, want %v", err, verbs.ErrClosed)
	}
	if _, err := l.Accept(timed(t)); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("accept after close: %v, want %v", err, verbs.ErrClosed)
	}
}

func testAcceptDeadline(t *testing.T, p verbs.Provider, o Options) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := listen(t, p, o).Accept(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("accept where nobody connects: %v, want %v", err, context.DeadlineExceeded)
	}
}

func testAcceptAfterPeerLeft(t *testing.T, p verbs.Provider, o Options) {
	cl, sv, result := offer(t, p, o)
	mustClose(t, "connecting side", cl.conn.Close)
	<-result
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := sv.conn.Accept(ctx, shape{reads: 1}.params(nil)); err == nil {
		// On iWARP the passive side is up when it has answered; the end shows just after.
		_ = sv.down()
	}
}

func testListenTwice(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	if l2, err := p.Listen(timed(t), l.Addr(), 0); !errors.Is(err, verbs.ErrAddrInUse) {
		t.Errorf("second listener on %v: %v, want %v", l.Addr(), err, verbs.ErrAddrInUse)
		if err == nil {
			mustClose(t, "second listener", l2.Close)
		}
	}
}

func testListenElsewhere(t *testing.T, p verbs.Provider, _ Options) {
	a := verbs.Addr{IP: netip.MustParseAddr("192.0.2.1")} // RFC 5737: on no machine
	l, err := p.Listen(timed(t), a, 0)
	if !errors.Is(err, verbs.ErrAddrNotAvailable) {
		t.Errorf("listen on %v: %v, want %v", a, err, verbs.ErrAddrNotAvailable)
	}
	if err == nil {
		mustClose(t, "listener", l.Close)
	}
}

func testSourceAddressShared(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	local := o.Listen
	local.Port = 0
	ports := map[uint16]bool{}
	for range 3 {
		cl, _ := connectTo(t, p, l, shape{mem: 4096, local: local})
		a := cl.conn.LocalAddr()
		if a.IP != local.IP {
			t.Errorf("bound to %v, asked for %v", a, local)
		}
		ports[a.Port] = true
	}
	if len(ports) != 3 {
		t.Errorf("three connections from %v use the ports %v", local.IP, ports)
	}
}

func testSharedPD(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	first, sv := connectTo(t, p, l, shape{})
	fill(first.mem[:4096], 7)
	first.post(first.rdma(verbs.OpRDMAWrite, 0, sv, 0, 4096))
	first.await(1, verbs.StatusOK)
	for i := range 3 {
		cl, sv := connectTo(t, p, l, shape{sharePD: first.pd})
		// The first connection's region serves the others: same domain.
		w := cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, 4096)
		w.SGEs[0] = first.sge(0, 4096)
		cl.post(w, cl.rdma(verbs.OpRDMARead, 0, sv, 0, 4096))
		cl.await(2, verbs.StatusOK)
		if !bytes.Equal(cl.mem[:4096], first.mem[:4096]) {
			t.Errorf("connection %d in a shared domain: data differs", i+2)
		}
	}
}

func testDisconnect(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	select {
	case <-cl.conn.Disconnected():
		t.Fatalf("down before anybody disconnected: %v", cl.conn.Err())
	default:
	}
	if err := cl.conn.Err(); err != nil {
		t.Fatalf("Err before the end: %v", err)
	}
	if err := cl.conn.Disconnect(); err != nil {
		t.Fatalf("disconnect: %v", err)
	}
	if err := sv.down(); !errors.Is(err, verbs.ErrDisconnected) {
		t.Errorf("passive side: %v, want %v", err, verbs.ErrDisconnected)
	}
	_ = cl.down()
	if err := cl.conn.Disconnect(); err != nil {
		t.Errorf("second disconnect: %v", err)
	}
}

func testPeerCloses(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	mustClose(t, "passive side", sv.conn.Close)
	if err := cl.down(); !errors.Is(err, verbs.ErrDisconnected) {
		t.Errorf("active side: %v, want %v", err, verbs.ErrDisconnected)
	}
}

func testCloseTwice(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	for range 2 {
		mustClose(t, "queue pair", cl.qp.Close)
	}
	for range 2 {
		mustClose(t, "active side", cl.conn.Close)
		mustClose(t, "passive side", sv.conn.Close)
	}
	if cl.conn.Err() == nil {
		t.Error("Err after close is nil")
	}
	if err := cl.qp.Wait(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Wait after close: %v", err)
	}
	if _, err := cl.qp.PostSend(make([]verbs.SendWR, 1)); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("PostSend after close: %v", err)
	}
	if _, err := cl.qp.Poll(cl.buf[:]); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Poll after close: %v", err)
	}
	if err := cl.qp.Arm(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Arm after close: %v", err)
	}
}
