package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"farblk/transport"
	"farblk/transport/verbs"
)

// fake is a verbs provider whose far end is the test: it sees every work request and makes every completion.
type fake struct {
	mu       sync.Mutex
	refuse   []error // what the next Connects fail with
	device   verbs.Device
	requests []verbs.ConnParams // of the Connects that came
	mute     bool               // Disconnect leads to nothing
	// connecting, if set, holds up every Connect until it is closed: a target that does not answer, and a device
	// that lets go late.
	connecting chan struct{}
	closed     []string // queue pairs and memory, in the order of their end
	conns      []*fakeConn
	regErr     error
	live       int // PDs, MRs, windows, QPs and connections not closed
}

func newFake() *fake {
	return &fake{device: verbs.Device{Name: "fake0", MaxQPDepth: 1024, MaxResponderResources: 8, MemoryWindows: true}}
}

func (f *fake) count(n int) {
	f.mu.Lock()
	f.live += n
	f.mu.Unlock()
}

func (f *fake) note(closed string) {
	f.mu.Lock()
	f.closed = append(f.closed, closed)
	f.mu.Unlock()
}

func (f *fake) Name() string                     { return "fake" }
func (f *fake) Devices() ([]verbs.Device, error) { return []verbs.Device{f.device}, nil }
func (f *fake) Listen(context.Context, verbs.Addr, int) (verbs.Listener, error) {
	return nil, verbs.ErrUnsupported
}

func (f *fake) Resolve(_ context.Context, r verbs.Route) (verbs.Conn, error) {
	c := &fakeConn{f: f, route: r, gone: make(chan struct{})}
	f.count(1)
	f.mu.Lock()
	f.conns = append(f.conns, c)
	f.mu.Unlock()
	return c, nil
}

type fakePD struct{ f *fake }

func (p fakePD) Register(b []byte, a verbs.Access) (verbs.MR, error) {
	if p.f.regErr != nil {
		return nil, p.f.regErr
	}
	p.f.count(1)
	return &fakeMR{f: p.f, b: b, access: a}, nil
}

func (p fakePD) NewWindow() (verbs.Window, error) {
	p.f.count(1)
	return &fakeWindow{f: p.f}, nil
}
func (p fakePD) Close() error { p.f.count(-1); return nil }

type fakeMR struct {
	f      *fake
	b      []byte
	access verbs.Access
}

func (m *fakeMR) LKey() uint32 { return 1 + uint32(m.access) }
func (m *fakeMR) RKey() uint32 { return 0x1000 + uint32(m.access) }
func (m *fakeMR) RemoteAddr(b []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

func (m *fakeMR) Close() error {
	m.f.note(fmt.Sprintf("%d bytes", len(m.b)))
	m.f.count(-1)
	return nil
}

type fakeWindow struct {
	f     *fake
	key   uint32
	bound bool
}

func (w *fakeWindow) Bind(mr verbs.MR, b []byte, _ verbs.Access) (uint32, uint64, error) {
	w.key += 0x10000
	w.bound = true
	return w.key, mr.RemoteAddr(b), nil
}
func (w *fakeWindow) Invalidate() error { w.bound = false; return nil }
func (w *fakeWindow) Close() error      { w.f.count(-1); return nil }

type fakeConn struct {
	f     *fake
	route verbs.Route
	qp    *fakeQP
	once  sync.Once
	shut  sync.Once
	gone  chan struct{}
	err   error
}

func (c *fakeConn) Provider() string       { return "fake" }
func (c *fakeConn) Device() verbs.Device   { return c.f.device }
func (c *fakeConn) LocalAddr() verbs.Addr  { return c.route.Local }
func (c *fakeConn) RemoteAddr() verbs.Addr { return c.route.Remote }
func (c *fakeConn) NewPD() (verbs.PD, error) {
	c.f.count(1)
	return fakePD{c.f}, nil
}

func (c *fakeConn) NewQP(_ verbs.PD, q verbs.QPConfig) (verbs.QP, error) {
	c.f.count(1)
	c.qp = &fakeQP{f: c.f, config: q, events: make(chan struct{}, 1), came: make(chan struct{}, 1), closed: make(chan struct{})}
	return c.qp, nil
}

func (c *fakeConn) Connect(ctx context.Context, p verbs.ConnParams) ([]byte, error) {
	if c.f.connecting != nil {
		<-c.f.connecting
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.f.requests = append(c.f.requests, p)
	if len(c.f.refuse) > 0 {
		err := c.f.refuse[0]
		c.f.refuse = c.f.refuse[1:]
		if err != nil {
			return nil, err
		}
	}
	accept := make([]byte, 196) // padded, as InfiniBand does
	binary.LittleEndian.PutUint16(accept[2:], uint16(c.qp.config.RecvDepth))
	return accept, nil
}
func (c *fakeConn) PrivateData() []byte                            { return nil }
func (c *fakeConn) PeerParams() verbs.ConnParams                   { return verbs.ConnParams{} }
func (c *fakeConn) Accept(context.Context, verbs.ConnParams) error { return verbs.ErrUnsupported }
func (c *fakeConn) Reject([]byte) error                            { return verbs.ErrUnsupported }
func (c *fakeConn) Disconnected() <-chan struct{}                  { return c.gone }
func (c *fakeConn) Err() error {
	select {
	case <-c.gone:
		return c.err
	default:
		return nil
	}
}

// cut ends the connection for the given reason.
func (c *fakeConn) cut(err error) {
	c.once.Do(func() { c.err = err; close(c.gone) })
}

func (c *fakeConn) Disconnect() error {
	if !c.f.mute {
		c.cut(verbs.ErrDisconnected)
	}
	return nil
}

func (c *fakeConn) Close() error {
	c.shut.Do(func() { c.f.count(-1) })
	return nil
}

type fakeQP struct {
	f      *fake
	config verbs.QPConfig
	once   sync.Once
	events chan struct{}
	closed chan struct{}

	mu    sync.Mutex
	sends []verbs.SendWR // not taken by the test
	recvs []verbs.RecvWR
	cq    []verbs.Completion
	armed bool
	came  chan struct{} // has an entry when commands came
	// auto answers every chain of commands at once: first all sends, then all responses.
	auto bool
}

func (q *fakeQP) PostSend(wrs []verbs.SendWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.isClosed() {
		return 0, verbs.ErrClosed
	}
	if q.auto {
		q.complete(wrs)
		return len(wrs), nil
	}
	q.sends = append(q.sends, wrs...)
	q.notify()
	select {
	case q.came <- struct{}{}:
	default:
	}
	return len(wrs), nil
}

func (q *fakeQP) isClosed() bool {
	select {
	case <-q.closed:
		return true
	default:
		return false
	}
}

func (q *fakeQP) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.isClosed() {
		return 0, verbs.ErrClosed
	}
	if len(q.recvs)+len(wrs) > q.config.RecvDepth {
		return 0, verbs.ErrQueueFull
	}
	q.recvs = append(q.recvs, wrs...)
	return len(wrs), nil
}

func (q *fakeQP) Poll(cs []verbs.Completion) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := copy(cs, q.cq)
	q.cq = q.cq[:copy(q.cq, q.cq[n:])]
	return n, nil
}

func (q *fakeQP) Arm() error {
	q.mu.Lock()
	q.armed = true
	q.mu.Unlock()
	return nil
}

func (q *fakeQP) Wait() error {
	select {
	case <-q.events:
		return nil
	case <-q.closed:
		return verbs.ErrClosed
	}
}

// Close may be called twice, but a queue has no need to: the second one shows as an object too few.
func (q *fakeQP) Close() error {
	q.f.count(-1)
	q.once.Do(func() {
		close(q.closed)
		q.f.note("queue pair")
	})
	return nil
}

// notify fires the armed event if there is a completion. mu is held.
func (q *fakeQP) notify() {
	if q.armed && len(q.cq) > 0 {
		q.armed = false
		select {
		case q.events <- struct{}{}:
		default:
		}
	}
}

// sent makes the send completion of a work request. mu is held.
func (q *fakeQP) sent(id uint64) {
	q.cq = append(q.cq, verbs.Completion{ID: id, Op: verbs.OpSend})
	q.notify()
}

// respond sends a 16-byte response. mu is held.
func (q *fakeQP) respond(cid uint16, result uint64) {
	r := q.recvs[0]
	q.recvs = q.recvs[:copy(q.recvs, q.recvs[1:])]
	clear(r.SGE.Data)
	binary.LittleEndian.PutUint64(r.SGE.Data, result)
	binary.LittleEndian.PutUint16(r.SGE.Data[12:], cid)
	q.cq = append(q.cq, verbs.Completion{ID: r.ID, Op: verbs.OpRecv, Bytes: 16})
	q.notify()
}

// far is the test's hold on the far end of the newest queue.
func (f *fake) far() *fakeQP {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conns[len(f.conns)-1].qp
}

// take removes the i-th command that waits at the far end.
func (q *fakeQP) take(t *testing.T, i int) verbs.SendWR {
	t.Helper()
	q.mu.Lock()
	defer q.mu.Unlock()
	if i >= len(q.sends) {
		t.Fatalf("command %d of %d", i, len(q.sends))
	}
	wr := q.sends[i]
	q.sends = append(q.sends[:i], q.sends[i+1:]...)
	return wr
}

func cidOf(wr verbs.SendWR) uint16 { return binary.LittleEndian.Uint16(wr.SGEs[0].Data[2:]) }

func (q *fakeQP) completeSend(wr verbs.SendWR) {
	q.mu.Lock()
	q.sent(wr.ID)
	q.mu.Unlock()
}

func (q *fakeQP) answer(cid uint16, result uint64) {
	q.mu.Lock()
	q.respond(cid, result)
	q.mu.Unlock()
}

// completeAll completes every command that waits, first all sends, then all responses, and returns how many.
func (q *fakeQP) completeAll() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.sends)
	q.complete(q.sends)
	q.sends = q.sends[:0]
	return n
}

// complete is completeAll of wrs. mu is held.
func (q *fakeQP) complete(wrs []verbs.SendWR) {
	for i := range wrs {
		q.sent(wrs[i].ID)
	}
	for i := range wrs {
		q.respond(cidOf(wrs[i]), 0)
	}
}

// answerAll answers commands until stop, now and then a little later.
func (q *fakeQP) answerAll(stop <-chan struct{}) {
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		case <-q.came:
		}
		for range i % 4 {
			runtime.Gosched()
		}
		q.completeAll()
	}
}

// region is memory outside the Go heap.
func region(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// open dials f and opens one queue; everything is closed, and its absence of leaks checked, at the end.
func open(t testing.TB, f *fake, p transport.QueueParams, o Options) (transport.Association, transport.Queue, []byte) {
	t.Helper()
	mem := region(t, 1<<20)
	a, err := NewDialer(f, o).Dial(context.Background(), transport.Address{}, mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if f.live != 0 {
			t.Errorf("%d verbs objects left", f.live)
		}
	})
	q, err := a.OpenQueue(context.Background(), p)
	if err != nil {
		t.Fatal(err)
	}
	return a, q, mem
}

// recorder makes requests and remembers which ended.
type recorder struct {
	mu    sync.Mutex
	ended []*transport.Request
}

func (r *recorder) request(data []byte, d transport.Direction) *transport.Request {
	return &transport.Request{Data: data, Direction: d, Done: func(req *transport.Request) {
		r.mu.Lock()
		r.ended = append(r.ended, req)
		r.mu.Unlock()
	}}
}

func (r *recorder) count(req *transport.Request) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range r.ended {
		if x == req {
			n++
		}
	}
	return n
}

func lostWith[T error](err error) bool {
	var lost *transport.LostError
	var cause T
	return errors.As(err, &lost) && errors.As(err, &cause)
}
