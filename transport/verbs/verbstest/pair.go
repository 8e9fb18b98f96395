package verbstest

import (
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
)

// end is one side of a connection with registered memory of its own.
type end struct {
	t    testing.TB
	conn verbs.Conn
	pd   verbs.PD
	qp   verbs.QP
	mem  []byte
	mr   verbs.MR
	// private is the peer's private data.
	private []byte
	next    uint64 // ID of the next work request
	seen    []verbs.Completion
	buf     [16]verbs.Completion
}

// shape is how a pair is made; the zero value is usable.
type shape struct {
	qp      verbs.QPConfig
	mem     int
	access  verbs.Access
	reads   uint8 // IRD and ORD of both sides
	local   verbs.Addr
	sharePD verbs.PD // the active side's
}

const allAccess = verbs.LocalWrite | verbs.RemoteRead | verbs.RemoteWrite | verbs.ReadSink

func (s shape) filled() shape {
	if s.qp == (verbs.QPConfig{}) {
		s.qp = verbs.QPConfig{SendDepth: 64, RecvDepth: 64}
	}
	if s.mem == 0 {
		s.mem = 4 << 20
	}
	if s.access == 0 {
		s.access = allAccess
	}
	if s.reads == 0 {
		s.reads = 4
	}
	return s
}

func (s shape) params(private []byte) verbs.ConnParams {
	return verbs.ConnParams{
		PrivateData: private, ResponderResources: s.reads, InitiatorDepth: s.reads,
		RetryCount: 7, RNRRetryCount: 7,
	}
}

// timed is a context that ends with the suite's limit or the test.
func timed(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// mapped is zeroed memory outside the Go heap.
func mapped(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatalf("mmap of %d bytes: %v", n, err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func listen(t testing.TB, p verbs.Provider, o Options) verbs.Listener {
	t.Helper()
	l, err := p.Listen(timed(t), o.Listen, 0)
	if err != nil {
		t.Fatalf("listen on %v: %v", o.Listen, err)
	}
	t.Cleanup(func() { mustClose(t, "listener", l.Close) })
	if a := l.Addr(); a.Port == 0 || a.IP != o.Listen.IP {
		t.Fatalf("listener is at %v, asked for %v and any port", a, o.Listen)
	}
	return l
}

func resolve(t testing.TB, p verbs.Provider, r verbs.Route) verbs.Conn {
	t.Helper()
	c, err := p.Resolve(timed(t), r)
	if err != nil {
		t.Fatalf("resolve %v: %v", r.Remote, err)
	}
	t.Cleanup(func() { mustClose(t, "connection", c.Close) })
	return c
}

// equip gives a connection domain, queue pair and memory.
func equip(t testing.TB, c verbs.Conn, s shape) (*end, error) {
	e := &end{t: t, conn: c, pd: s.sharePD}
	var err error
	if e.pd == nil {
		if e.pd, err = c.NewPD(); err != nil {
			return nil, err
		}
		t.Cleanup(func() { mustClose(t, "domain", e.pd.Close) })
	}
	e.mem = mapped(t, s.mem)
	if e.mr, err = e.pd.Register(e.mem, s.access); err != nil {
		return nil, err
	}
	t.Cleanup(func() { mustClose(t, "region", e.mr.Close) })
	if e.qp, err = c.NewQP(e.pd, s.qp); err != nil {
		return nil, err
	}
	// Cleanups run last in, first out: the connection goes before its region, the region before its domain.
	t.Cleanup(func() { mustClose(t, "connection", c.Close) })
	return e, nil
}

func mustClose(t testing.TB, what string, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("close of the %s: %v", what, err)
		}
	case <-time.After(limit):
		t.Errorf("close of the %s has not returned", what)
	}
}

// connect makes a listener and a connected pair: the active end and the passive one.
func connect(t testing.TB, p verbs.Provider, o Options, s shape) (*end, *end) {
	t.Helper()
	return connectTo(t, p, listen(t, p, o), s)
}

// connectTo connects to l. The active end's first SEND has been received when it returns: an iWARP responder
// may not send before (RFC 5044 section 7.1.3).
func connectTo(t testing.TB, p verbs.Provider, l verbs.Listener, s shape) (*end, *end) {
	t.Helper()
	s = s.filled()
	ctx := timed(t)
	type accepted struct {
		end *end
		err error
	}
	ch := make(chan accepted, 1)
	passive := s
	passive.sharePD = nil
	go func() {
		c, err := l.Accept(ctx)
		if err != nil {
			ch <- accepted{err: err}
			return
		}
		sv, err := equip(t, c, passive)
		if err == nil {
			sv.private = c.PrivateData()
			if _, err = sv.qp.PostRecv([]verbs.RecvWR{sv.recvWR(0, 64)}); err == nil {
				err = c.Accept(ctx, s.params([]byte("from the passive side")))
			}
		}
		ch <- accepted{sv, err}
	}()
	cl, err := equip(t, resolve(t, p, verbs.Route{Remote: l.Addr(), Local: s.local}), s)
	if err != nil {
		t.Fatalf("active side: %v", err)
	}
	cl.private, err = cl.conn.Connect(ctx, s.params([]byte("from the active side")))
	a := <-ch
	if err != nil || a.err != nil {
		t.Fatalf("connect: active side: %v; passive side: %v", err, a.err)
	}
	sv := a.end
	cl.post(cl.send(0, 1))
	cl.await(1, verbs.StatusOK)
	sv.await(1, verbs.StatusOK)
	return cl, sv
}

func (e *end) sge(off, n int) verbs.SGE {
	return verbs.SGE{Data: e.mem[off : off+n], LKey: e.mr.LKey()}
}

func (e *end) id() uint64 { e.next++; return e.next }

// send is a signaled SEND of n bytes at off of the end's memory.
func (e *end) send(off, n int) verbs.SendWR {
	w := verbs.SendWR{ID: e.id(), Op: verbs.OpSend, Flags: verbs.Signaled, NumSGE: 1}
	w.SGEs[0] = e.sge(off, n)
	return w
}

// rdma is a signaled RDMA READ or WRITE of n bytes between off here and peerOff there.
func (e *end) rdma(op verbs.Opcode, off int, peer *end, peerOff, n int) verbs.SendWR {
	w := e.send(off, n)
	w.Op, w.RKey = op, peer.mr.RKey()
	w.RemoteAddr = peer.mr.RemoteAddr(peer.mem) + uint64(peerOff)
	return w
}

func (e *end) recvWR(off, n int) verbs.RecvWR {
	return verbs.RecvWR{ID: e.id(), SGE: e.sge(off, n)}
}

func (e *end) post(wrs ...verbs.SendWR) {
	e.t.Helper()
	if n, err := e.qp.PostSend(wrs); err != nil || n != len(wrs) {
		e.t.Fatalf("PostSend of %d posted %d: %v", len(wrs), n, err)
	}
}

func (e *end) recv(off, n int) uint64 {
	e.t.Helper()
	w := e.recvWR(off, n)
	if k, err := e.qp.PostRecv([]verbs.RecvWR{w}); err != nil || k != 1 {
		e.t.Fatalf("PostRecv posted %d: %v", k, err)
	}
	return w.ID
}

// take waits until n completions have come, and returns them in their order.
func (e *end) take(n int) []verbs.Completion {
	e.t.Helper()
	watch := time.AfterFunc(limit, func() { _ = e.conn.Close() })
	defer watch.Stop()
	for len(e.seen) < n {
		k, err := e.poll()
		if err == nil && k == 0 {
			if err = e.qp.Arm(); err == nil {
				if k, err = e.poll(); err == nil && k == 0 {
					err = e.qp.Wait()
				}
			}
		}
		if err != nil {
			e.t.Fatalf("waiting for completion %d of %d: %v (connection: %v)", len(e.seen)+1, n, err, e.conn.Err())
		}
	}
	got := append([]verbs.Completion(nil), e.seen[:n]...)
	e.seen = e.seen[:copy(e.seen, e.seen[n:])]
	return got
}

func (e *end) poll() (int, error) {
	k, err := e.qp.Poll(e.buf[:])
	e.seen = append(e.seen, e.buf[:k]...)
	return k, err
}

// await takes n completions, which must all have the status.
func (e *end) await(n int, status verbs.Status) []verbs.Completion {
	e.t.Helper()
	cs := e.take(n)
	for _, c := range cs {
		if c.Status != status {
			e.t.Fatalf("%v %d ended with %q (vendor error %#x), want %q", c.Op, c.ID, c.Status, c.VendorError, status)
		}
	}
	return cs
}

// down waits until the connection is known to be down, polling as an owner does, and returns why.
func (e *end) down() error {
	e.t.Helper()
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-e.conn.Disconnected():
			if e.conn.Err() == nil {
				e.t.Fatal("Disconnected is closed but Err is nil")
			}
			return e.conn.Err()
		case <-timeout.C:
			e.t.Fatal("the connection has not gone down")
		case <-tick.C:
			if _, err := e.poll(); err != nil && !errors.Is(err, verbs.ErrClosed) {
				e.t.Fatalf("poll: %v", err)
			}
		}
	}
}

// fill writes a pattern that differs by seed and position.
func fill(b []byte, seed int) {
	x := uint32(seed)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
}
