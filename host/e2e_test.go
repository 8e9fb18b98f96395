package host_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
	"farblk/host"
	"farblk/host/nvme"
	"farblk/target"
	"farblk/target/misbehave"
	"farblk/transport"
	"farblk/transport/rdma"
	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

// These tests run the whole stack on the loopback: host, NVMe/RDMA, software iWARP, target.

const (
	hostNQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
	subNQN  = "nqn.2024-01.org.example:e2e"
	limit   = 20 * time.Second
)

// bed is a target with a port.
type bed struct {
	*target.Target
	sub  *target.Subsystem
	addr netip.AddrPort
}

func newBed(t testing.TB, cfg target.Config, spaces ...target.NamespaceConfig) *bed {
	return newScriptedBed(t, cfg, "", spaces...)
}

// newScriptedBed is newBed with a target that misbehaves.
func newScriptedBed(t testing.TB, cfg target.Config, script string, spaces ...target.NamespaceConfig) *bed {
	t.Helper()
	tg, err := target.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{Target: tg}
	t.Cleanup(func() {
		if err := tg.Close(); err != nil {
			t.Error("closing the target:", err)
		}
	})
	b.addr = b.listen(t, script)
	if b.sub, err = tg.AddSubsystem(target.SubsystemConfig{NQN: subNQN}); err != nil {
		t.Fatal(err)
	}
	for _, n := range spaces {
		if _, err := b.sub.AddNamespace(n); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func (b *bed) listen(t testing.TB, text string) netip.AddrPort {
	l, err := iwarp.New(iwarp.Options{}).Listen(context.Background(), verbs.Addr{IP: netip.MustParseAddr("127.0.0.1")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	a := l.Addr()
	script, err := misbehave.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if text != "" {
		l = misbehave.Wrap(l, script)
	}
	var served sync.WaitGroup
	served.Go(func() {
		if err := b.Serve(context.Background(), l); err != nil {
			t.Error("serve:", err)
		}
	})
	t.Cleanup(func() { b.Target.Close(); served.Wait() })
	return netip.AddrPortFrom(a.IP, a.Port)
}

func (b *bed) config() host.Config {
	id, _ := nvme.HostIDOf(hostNQN)
	return host.Config{
		Dialer:    rdma.NewDialer(iwarp.New(iwarp.Options{}), rdma.Options{}),
		Address:   transport.Address{Remote: b.addr.Addr(), Port: b.addr.Port()},
		SubsysNQN: subNQN, HostNQN: hostNQN, HostID: id, NrIOQueues: 2, PoolSize: 16 << 20,
	}
}

func dial(t testing.TB, cfg host.Config) *host.Controller {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := host.Connect(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		begin := time.Now()
		if err := c.Shutdown(context.Background()); err != nil {
			t.Error("shutdown:", err)
		}
		if d := time.Since(begin); d > 6*time.Second {
			t.Error("shutdown took", d)
		}
	})
	return c
}

func run(t testing.TB, n *host.Namespace, r *blockdev.Request) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	done, err := blockdev.SubmitWait(ctx, n, r)
	if ctx.Err() != nil {
		t.Fatalf("%v at %d: no end", r.Op, r.Off)
	}
	<-done
	return err
}

func buffer(t testing.TB, n *host.Namespace, size int) []byte {
	t.Helper()
	b := n.Pool().TryLease(size)
	if b == nil {
		t.Fatal("no buffer")
	}
	t.Cleanup(func() { n.Pool().Release(b) })
	return b
}

// device is a namespace with a connection of its own.
type device struct{ *host.Namespace }

func (d device) Close() error {
	return errors.Join(d.Namespace.Close(), d.Controller().Shutdown(context.Background()))
}

func TestEndToEndDevice(t *testing.T) {
	for name, n := range map[string]target.NamespaceConfig{
		"memory 512": {Size: 8 << 20},
		"file 4096":  {Size: 8 << 20, BlockSize: 4096, File: "disk"},
	} {
		t.Run(name, func(t *testing.T) {
			if n.File != "" {
				n.File = t.TempDir() + "/" + n.File
			}
			b := newBed(t, target.Config{MDTS: 5, QueueDepth: 32}, n)
			blockdevtest.Run(t, func(t *testing.T) blockdev.Device {
				c, err := host.Connect(context.Background(), b.config())
				if err != nil {
					t.Fatal(err)
				}
				return device{c.Namespaces()[0]}
			})
		})
	}
}

func TestEndToEndInfo(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20}, target.NamespaceConfig{Size: 2 << 20, BlockSize: 4096, ReadOnly: true})
	c := dial(t, b.config())
	i := c.Info()
	if i.Provider != "iwarp" || i.Model != "farblk target" || i.IOQueues != 2 || i.MaxTransfer != 1<<20 || i.InCapsule != 8192 {
		t.Errorf("%+v", i)
	}
	if n := c.Namespaces(); len(n) != 2 || n[1].Info().BlockSize != 4096 || !n[1].Info().ReadOnly || n[0].Info().ID == n[1].Info().ID {
		t.Errorf("%+v", n)
	}
	n := c.Namespaces()[0]
	buf := buffer(t, n, 4096)
	if err := run(t, n, &blockdev.Request{Op: blockdev.Write, Data: buf}); err != nil {
		t.Error(err)
	}
	if q := c.Counters().Queues[0].Transport; q.InCapsule != 2 || q.BytesWrite != 1024+4096 { // Connect's data too
		t.Errorf("%+v", q)
	}
	if s := b.sub.Stats(); s.Writes != 1 {
		t.Errorf("%+v", s)
	}
}

// Several jobs write and check while the connections break again and again.
func TestCaseH20LossesUnderLoad(t *testing.T) {
	const area, jobs = 1 << 20, 4
	b := newBed(t, target.Config{MDTS: 5}, target.NamespaceConfig{Size: area * jobs})
	cfg := b.config()
	cfg.ReconnectDelay, cfg.KeepAlive = 10*time.Millisecond, time.Second
	c := dial(t, cfg)
	n := c.Namespaces()[0]
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for job := range jobs {
		buf := buffer(t, n, 256<<10)
		shadow := make([]byte, area)
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(job), 1))
			for {
				select {
				case <-stop:
					return
				default:
				}
				size := 512 * (1 + r.IntN(len(buf)/512))
				off := 512 * r.IntN((area-size)/512+1)
				req := &blockdev.Request{Op: blockdev.Read, Off: int64(job*area + off), Data: buf[:size]}
				if r.IntN(3) == 0 {
					req.Op = blockdev.Write
					for i := range req.Data {
						req.Data[i] = byte(r.Uint32())
					}
					copy(shadow[off:], req.Data)
				}
				if _, err := blockdev.SubmitWait(context.Background(), n, req); err != nil {
					t.Error(err)
					return
				}
				if req.Op == blockdev.Read && !bytes.Equal(req.Data, shadow[off:off+size]) {
					t.Errorf("job %d: other data at %d", job, off)
					return
				}
			}
		})
	}
	loaded := func() { // until all jobs are in full swing
		completed := func() (n uint64) {
			for _, q := range c.Counters().Queues {
				n += q.Completed
			}
			return n
		}
		before := completed()
		waitFor(t, func() bool { return completed() >= before+200 })
	}
	for range 3 {
		loaded()
		resets := c.Info().Resets
		b.DropConnections()
		waitFor(t, func() bool { return c.Info().Resets > resets && c.State() == host.StateLive })
	}
	loaded()
	close(stop)
	wg.Wait()
}

// waitFor waits for what tells nobody when it happens, such as a counter: it has to look now and then.
func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not happen")
		}
	}
}

func TestCaseH24IdentitySwapped(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	cfg := b.config()
	cfg.ReconnectDelay = 10 * time.Millisecond
	c := dial(t, cfg)
	n := c.Namespaces()[0]
	buf := buffer(t, n, 4096)
	b.DropConnections()
	if err := b.sub.SetIdentity(1, nvme.NGUID{9}, nvme.UUID{9}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return n.Err() != nil })
	if err := run(t, n, &blockdev.Request{Op: blockdev.Write, Data: buf}); !errors.Is(err, blockdev.ErrChanged) {
		t.Error(err)
	}
}

func TestCaseH34NamespacesComeAndGo(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	events := make(chan host.Event, 16)
	cfg := b.config()
	cfg.OnEvent = func(e host.Event) {
		if e.Kind != host.EventState {
			events <- e
		}
	}
	c := dial(t, cfg)
	n := c.Namespaces()[0]
	buf := buffer(t, n, 4096)
	expect := func(kind host.EventKind, nsid uint32, size int64) *host.Namespace {
		t.Helper()
		select {
		case e := <-events:
			if e.Kind != kind || e.Namespace.NSID() != nsid || e.Namespace.Info().Size != size {
				t.Fatalf("%v of %d (%d bytes)", e.Kind, e.Namespace.NSID(), e.Namespace.Info().Size)
			}
			return e.Namespace
		case <-time.After(limit):
			t.Fatal("no event")
			return nil
		}
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(b.sub.ResizeNamespace(1, 2<<20))
	expect(host.EventNamespaceChanged, 1, 2<<20)
	check(run(t, n, &blockdev.Request{Op: blockdev.Write, Off: 2<<20 - 4096, Data: buf}))
	_, err := b.sub.AddNamespace(target.NamespaceConfig{ID: 5, Size: 1 << 20, BlockSize: 4096})
	check(err)
	check(run(t, expect(host.EventNamespaceAdded, 5, 1<<20), &blockdev.Request{Op: blockdev.Read, Data: buf}))
	check(b.sub.RemoveNamespace(5))
	expect(host.EventNamespaceRemoved, 5, 1<<20)
	check(b.sub.SetReadOnly(1, true))
	expect(host.EventNamespaceChanged, 1, 2<<20)
	if err := run(t, n, &blockdev.Request{Op: blockdev.Write, Data: buf}); !errors.Is(err, blockdev.ErrReadOnly) {
		t.Error(err)
	}
}

func TestEndToEndDiscovery(t *testing.T) {
	b := newBed(t, target.Config{})
	b.AddReferral(target.Referral{Addr: b.addr}) // to itself
	cfg := b.config()
	logs, err := host.Discover(context.Background(), host.DiscoverConfig{
		Dialer: cfg.Dialer, Address: cfg.Address, HostNQN: cfg.HostNQN, HostID: cfg.HostID, FollowReferrals: true,
	})
	if err != nil || len(logs) != 1 {
		t.Fatal(logs, err)
	}
	found := false
	for _, e := range logs[0].Entries {
		if e.SubNQN == subNQN {
			addr, err := host.EntryAddress(e, cfg.Address)
			found = err == nil && addr == cfg.Address
		}
	}
	if !found {
		t.Errorf("%+v", logs[0].Entries)
	}
}

func TestEndToEndConnectErrors(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	for name, x := range map[string]struct {
		change func(c *host.Config)
		is     error
	}{
		"unknown subsystem": {func(c *host.Config) { c.SubsysNQN += "x" }, nvme.StatusConnectInvalidParameters},
		"host not allowed":  {func(*host.Config) { b.sub.AllowHosts("nqn.2024-01.org.example:other") }, nvme.StatusConnectInvalidHost},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := b.config()
			x.change(&cfg)
			defer b.sub.AllowHosts()
			begin := time.Now()
			_, err := host.Connect(context.Background(), cfg)
			if !errors.Is(err, x.is) || time.Since(begin) > 5*time.Second {
				t.Error(err, "after", time.Since(begin))
			}
		})
	}
}

func TestCaseH03NothingListensEndToEnd(t *testing.T) {
	cfg := (&bed{addr: netip.MustParseAddrPort("127.0.0.1:1")}).config()
	_, err := host.Connect(context.Background(), cfg)
	if !errors.Is(err, transport.ErrRefused) || !strings.Contains(err.Error(), "nothing listens at 127.0.0.1:1") {
		t.Error(err)
	}
}

// What an fsync becomes is counted by the target.
func TestCaseE10FlushEndToEnd(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	n := dial(t, b.config()).Namespaces()[0]
	buf := buffer(t, n, 4096)
	for _, r := range []blockdev.Request{{Op: blockdev.Write, Data: buf}, {Op: blockdev.Write, Data: buf, Flags: blockdev.FUA}, {Op: blockdev.Flush}} {
		if err := run(t, n, &r); err != nil {
			t.Error(err)
		}
	}
	if s := b.sub.Stats(); s.Writes != 2 || s.FUAWrites != 1 || s.Flushes != 1 {
		t.Errorf("%+v", s)
	}
}

// No size or block number is cut to 32 bits on the way.
func TestCaseE13EndToEnd(t *testing.T) {
	const size = 10 << 40
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: size})
	n := dial(t, b.config()).Namespaces()[0]
	if got := n.Info().Size; got != size {
		t.Fatal("size", got)
	}
	buf := buffer(t, n, 4096)
	at := func(op blockdev.Op, off int64) {
		t.Helper()
		if err := run(t, n, &blockdev.Request{Op: op, Off: off, Data: buf}); err != nil {
			t.Fatal(err)
		}
	}
	for i, off := range []int64{size - 4096, (size - 4096) % (1 << 41), (size - 4096) % (1 << 32)} { // 2^32 blocks, or bytes, apart
		copy(buf, bytes.Repeat([]byte{byte(i + 1)}, len(buf)))
		at(blockdev.Write, off)
	}
	at(blockdev.Read, size-4096)
	if !bytes.Equal(buf, bytes.Repeat([]byte{1}, len(buf))) {
		t.Error("the last block holds", buf[0])
	}
}

// A connection with nothing to do leaves the processor alone, here with its target in the same process.
func TestCaseE16Idle(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	n := dial(t, b.config()).Namespaces()[0]
	traffic(t, n, 1)
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	time.Sleep(100 * time.Millisecond) // what polls, and the garbage collector, come to rest
	before := used()
	time.Sleep(500 * time.Millisecond) // what is measured: nothing happens
	if d := used() - before; d > 50*time.Millisecond {
		t.Errorf("%v of processor time in 500 ms without work", d)
	}
}

func TestCaseH10LocalAddress(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	cfg := b.config()
	cfg.NrIOQueues, cfg.Address.Local = 4, netip.MustParseAddr("127.0.0.1")
	if c := dial(t, cfg); c.Info().IOQueues != 4 {
		t.Error(c.Info().IOQueues)
	}
}

// A target that cannot take more queues than three.
func TestCaseH08EndToEnd(t *testing.T) {
	b := newBed(t, target.Config{MaxQueues: 3}, target.NamespaceConfig{Size: 1 << 20})
	cfg := b.config()
	cfg.NrIOQueues = 8
	if c := dial(t, cfg); c.Info().IOQueues != 2 {
		t.Error(c.Info().IOQueues)
	}
}

// 4 KiB random reads, 32 at once on one queue, polled: host and target share the machine.
func BenchmarkEndToEndRead4K(b *testing.B) {
	bed := newBed(b, target.Config{}, target.NamespaceConfig{Size: 64 << 20})
	cfg := bed.config()
	cfg.NrIOQueues = 1
	n := dial(b, cfg).Namespaces()[0]
	q := n.Queue(0)
	left, done := b.N, 0
	r := rand.New(rand.NewPCG(1, 1))
	requests := make([]blockdev.Request, min(32, b.N))
	for i := range requests {
		requests[i] = blockdev.Request{Data: buffer(b, n, 4096), Done: func(x *blockdev.Request) {
			if x.Err != nil {
				b.Error(x.Err)
			}
			if done++; left > 0 {
				left--
				x.Off = int64(r.IntN(64<<20/4096)) << 12
				q.Submit(x)
			}
		}}
	}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range requests {
		left--
		q.Submit(&requests[i])
	}
	for n := b.N; done < n; {
		if q.Poll(time.Second) == 0 && done < n {
			time.Sleep(10 * time.Microsecond) // somebody else polls: leave the processor to the target
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}
