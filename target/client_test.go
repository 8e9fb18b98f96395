package target_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	subNQN  = "nqn.2024-01.org.example:sub"
	hostNQN = "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef"
	limit   = 20 * time.Second
)

// bed is a running target with one port, and what made it.
type bed struct {
	t      testing.TB
	target *target.Target
	addr   verbs.Addr // of port 1
	ports  uint16
}

func logger() *slog.Logger {
	if os.Getenv("TARGET_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// newBed starts a target on the loopback with a port for each wrap, and at
// least one.
func newBed(t testing.TB, c target.Config, wrap ...func(verbs.Listener) verbs.Listener) *bed {
	t.Helper()
	if c.Logger == nil {
		c.Logger = logger()
	}
	tg, err := target.New(c)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, target: tg}
	b.addr = b.listen(wrap...)
	t.Cleanup(func() {
		if err := tg.Close(); err != nil {
			t.Errorf("closing the target: %v", err)
		}
	})
	return b
}

// listen adds a port.
func (b *bed) listen(wrap ...func(verbs.Listener) verbs.Listener) verbs.Addr {
	l, err := iwarp.New(iwarp.Options{}).Listen(context.Background(), verbs.Addr{IP: netip.MustParseAddr("127.0.0.1")}, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	addr := l.Addr()
	for _, w := range wrap {
		l = w(l)
	}
	served := make(chan error, 1)
	b.ports++
	id := b.ports
	go func() { served <- b.target.ServePort(context.Background(), id, l) }()
	b.t.Cleanup(func() {
		b.target.Close()
		if err := <-served; err != nil && !errors.Is(err, target.ErrClosed) { // closed before it was served
			b.t.Errorf("serve: %v", err)
		}
	})
	return addr
}

// subsystem adds one with these namespaces.
func (b *bed) subsystem(ns ...target.NamespaceConfig) *target.Subsystem {
	b.t.Helper()
	s, err := b.target.AddSubsystem(target.SubsystemConfig{NQN: subNQN})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range ns {
		if _, err := s.AddNamespace(c); err != nil {
			b.t.Fatal(err)
		}
	}
	return s
}

// client is one NVMe queue of a host, as plain as can be.
type client struct {
	t     testing.TB
	conn  verbs.Conn
	qp    verbs.QP
	pd    verbs.PD
	mr    verbs.MR
	mem   []byte // depth command slots, depth response slots, then data
	qid   uint16
	depth int
	cid   uint16
	comps [64]verbs.Completion
	done  map[uint16][]nvme.Completion
	sent  int // sends without completion

	waiting bool       // a goroutine is in Wait
	waited  chan error // capacity 1: what it returned
}

const (
	slotSize = 64 + 8192
	dataSize = 4 << 20
)

// dial connects a queue pair; the queue still needs its Connect command.
func dial(t testing.TB, addr verbs.Addr, qid uint16, depth int) (*client, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := iwarp.New(iwarp.Options{}).Resolve(ctx, verbs.Route{Remote: addr})
	if err != nil {
		return nil, err
	}
	c := &client{t: t, conn: conn, qid: qid, depth: depth, done: map[uint16][]nvme.Completion{}, waited: make(chan error, 1)}
	n := depth*(slotSize+64) + dataSize
	c.mem, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if c.pd, err = conn.NewPD(); err != nil {
		t.Fatal(err)
	}
	if c.mr, err = c.pd.Register(c.mem, verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	if c.qp, err = conn.NewQP(c.pd, verbs.QPConfig{SendDepth: depth + 1, RecvDepth: depth + 1}); err != nil {
		t.Fatal(err)
	}
	for i := range depth {
		c.postRecv(i)
	}
	req := nvme.CMRequest{QID: qid, RQSize: uint16(depth), SQSize: uint16(depth - 1)}
	_, err = conn.Connect(ctx, verbs.ConnParams{PrivateData: req.Append(nil), ResponderResources: 16, RetryCount: 7, RNRRetryCount: 7})
	if err != nil {
		c.close()
		return nil, err
	}
	t.Cleanup(c.close)
	return c, nil
}

func (c *client) close() {
	if c.mem == nil {
		return
	}
	c.conn.Close()
	if c.waiting {
		<-c.waited
	}
	c.mr.Close()
	c.pd.Close()
	unix.Munmap(c.mem)
	c.mem = nil
}

func (c *client) postRecv(i int) {
	at := c.depth*slotSize + i*64
	if _, err := c.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SGE: verbs.SGE{Data: c.mem[at : at+64], LKey: c.mr.LKey()}}}); err != nil {
		c.t.Fatalf("posting a receive: %v", err)
	}
}

// data returns n bytes at off of the data area and their keyed descriptor.
func (c *client) data(off, n int) ([]byte, nvme.SGL) {
	b := c.mem[c.depth*(slotSize+64)+off:][:n:n]
	return b, nvme.KeyedSGL(c.mr.RemoteAddr(b), uint32(n), c.mr.RKey())
}

// send posts a command, with data in its capsule if given, and returns its ID.
func (c *client) send(cmd nvme.Command, inline []byte) uint16 {
	c.t.Helper()
	c.cid++
	cmd.SetCID(c.cid)
	at := int(c.cid) % c.depth * slotSize
	b := c.mem[at : at+64+len(inline)]
	copy(b, cmd[:])
	copy(b[64:], inline)
	wr := verbs.SendWR{ID: 1 << 32, Op: verbs.OpSend, Flags: verbs.Signaled, NumSGE: 1}
	wr.SGEs[0] = verbs.SGE{Data: b, LKey: c.mr.LKey()}
	if _, err := c.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		c.t.Fatalf("posting a send: %v", err)
	}
	c.sent++
	return c.cid
}

var (
	errLost    = errors.New("connection lost")
	errTimeout = errors.New("nothing came in time")
)

// poll takes what has come; it waits if nothing has.
func (c *client) poll(deadline time.Time) error {
	for armed := false; ; {
		n, err := c.qp.Poll(c.comps[:])
		if err != nil {
			return err
		}
		for _, e := range c.comps[:n] {
			if e.Status != verbs.StatusOK {
				return fmt.Errorf("%w: %s %s", errLost, e.Op, e.Status)
			}
			if e.Op != verbs.OpRecv {
				c.sent--
				continue
			}
			at := c.depth*slotSize + int(e.ID)*64
			var cqe nvme.Completion
			copy(cqe[:], c.mem[at:])
			c.done[cqe.CID()] = append(c.done[cqe.CID()], cqe)
			c.postRecv(int(e.ID))
		}
		if n > 0 {
			return nil
		}
		if !armed {
			if err := c.qp.Arm(); err != nil {
				return err
			}
			armed = true // nothing is lost: poll once more before waiting
			continue
		}
		if !c.waiting {
			c.waiting = true
			go func() { c.waited <- c.qp.Wait() }()
		}
		timeout := time.NewTimer(time.Until(deadline))
		select {
		case err := <-c.waited:
			c.waiting, armed = false, false
			if err != nil {
				return err
			}
		case <-timeout.C:
			return errTimeout
		}
		timeout.Stop()
	}
}

// await waits for the completion of a command.
func (c *client) await(cid uint16) (nvme.Completion, error) {
	return c.awaitFor(cid, limit)
}

func (c *client) awaitFor(cid uint16, d time.Duration) (nvme.Completion, error) {
	deadline := time.Now().Add(d)
	for {
		if l := c.done[cid]; len(l) > 0 {
			c.done[cid] = l[1:]
			return l[0], nil
		}
		if err := c.poll(deadline); err != nil {
			return nvme.Completion{}, err
		}
	}
}

// do runs a command and fails the test on anything but success.
func (c *client) do(fill func(*nvme.Command)) nvme.Completion {
	c.t.Helper()
	cqe, err := c.try(fill, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	return cqe
}

// try runs a command; the error is the transport's or a *nvme.StatusError.
func (c *client) try(fill func(*nvme.Command), inline []byte) (nvme.Completion, error) {
	c.t.Helper()
	var cmd nvme.Command
	fill(&cmd)
	cqe, err := c.await(c.send(cmd, inline))
	if err == nil {
		err = nvme.CommandError(&cmd, c.qid == 0, &cqe)
	}
	return cqe, err
}

// connect sends the Connect command and returns the controller ID.
func (c *client) connect(sub, host string, cntlid uint16, kato time.Duration) (uint16, error) {
	id, _ := nvme.HostIDOf(hostNQN)
	b, sgl := c.data(0, nvme.ConnectDataSize)
	copy(b, nvme.ConnectData{HostID: id, CNTLID: cntlid, SubNQN: sub, HostNQN: host}.Append(nil))
	cqe, err := c.try(func(cmd *nvme.Command) {
		cmd.FillConnect(c.qid, uint16(c.depth), 0, uint32(kato.Milliseconds()))
		cmd.SetSGL(sgl)
	}, nil)
	return nvme.ConnectResult(cqe.Result()).CNTLID(), err
}

// host is a connected controller with I/O queues.
type host struct {
	admin *client
	io    []*client
	id    uint16
}

// connectHost brings a controller up as a host does.
func connectHost(t testing.TB, addr verbs.Addr, sub string, queues, depth int, kato time.Duration) *host {
	t.Helper()
	admin, err := dial(t, addr, 0, 32)
	if err != nil {
		t.Fatal(err)
	}
	h := &host{admin: admin}
	if h.id, err = admin.connect(sub, hostNQN, nvme.AnyController, kato); err != nil {
		t.Fatal(err)
	}
	admin.do(func(c *nvme.Command) { c.FillPropertySet(nvme.PropertyCC, uint64(nvme.EnableConfiguration)) })
	cqe := admin.do(func(c *nvme.Command) { c.FillPropertyGet(nvme.PropertyCSTS) })
	if !nvme.ControllerStatus(cqe.Result()).Ready() {
		t.Fatal("controller is not ready")
	}
	if queues > 0 {
		cqe = admin.do(func(c *nvme.Command) {
			c.FillSetFeatures(nvme.FeatureNumberOfQueues, 0, uint32(nvme.MakeQueueCount(queues)))
		})
		if got := nvme.QueueCount(cqe.Result()).Queues(); got < queues {
			t.Fatalf("%d queues granted, %d wanted", got, queues)
		}
	}
	for qid := 1; qid <= queues; qid++ {
		c, err := dial(t, addr, uint16(qid), depth)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.connect(sub, hostNQN, h.id, 0); err != nil {
			t.Fatal(err)
		}
		h.io = append(h.io, c)
	}
	return h
}

// admin commands with data.

func (c *client) identify(cns nvme.CNS, nsid uint32) ([]byte, error) {
	b, sgl := c.data(0, nvme.IdentifySize)
	_, err := c.try(func(cmd *nvme.Command) { cmd.FillIdentify(cns, nsid, 0); cmd.SetSGL(sgl) }, nil)
	return b, err
}

func (c *client) log(id nvme.LogID, off uint64, n int) ([]byte, error) {
	b, sgl := c.data(0, n)
	_, err := c.try(func(cmd *nvme.Command) {
		cmd.FillGetLogPage(id, nvme.AllNamespaces, off, uint32(n), false)
		cmd.SetSGL(sgl)
	}, nil)
	return b, err
}

// read and write move n bytes of blocks of 512 at the start of the data area.
func (c *client) read(nsid uint32, slba uint64, n int) ([]byte, error) {
	b, sgl := c.data(0, n)
	_, err := c.try(func(cmd *nvme.Command) { cmd.FillRead(nsid, slba, uint32(n/512)); cmd.SetSGL(sgl) }, nil)
	return b, err
}

func (c *client) write(nsid uint32, slba uint64, p []byte, inCapsule, fua bool) error {
	b, sgl := c.data(0, len(p))
	copy(b, p)
	var inline []byte
	if inCapsule {
		inline, sgl = b, nvme.InCapsuleSGL(uint32(len(p)))
	}
	_, err := c.try(func(cmd *nvme.Command) { cmd.FillWrite(nsid, slba, uint32(len(p)/512), fua); cmd.SetSGL(sgl) }, inline)
	return err
}
