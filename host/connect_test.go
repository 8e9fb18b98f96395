package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

func rejected(p transport.QueueParams, class error, reason int) error {
	return &transport.ConnectError{Addr: "10.0.0.1:4420", Queue: p.ID, Class: class, Reason: reason, Err: class}
}

func isConnect(r *transport.Request) bool {
	cmd := (*nvme.Command)(&r.Command)
	return cmd.Opcode() == nvme.OpcodeFabrics && cmd.FabricsType() == nvme.FabricsConnect
}

func TestConnectSequence(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		want := []string{
			"admin Connect", "admin Property Get CAP", "admin Property Get VS", "admin Property Set CC", "admin Property Get CSTS",
			"admin Identify 1/0", "admin Identify 6/0", "admin Get Features", "admin Set Features", "admin Asynchronous Event Request",
			"admin Set Features", "io1 Connect", "io2 Connect", "admin Identify 2/0", "admin Identify 0/1", "admin Identify 3/1",
		}
		if got := ft.takeLog(); !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
		for i, want := range []transport.QueueParams{{ID: 0, Depth: 32}, {ID: 1, Depth: 128, ControllerID: 1, InCapsule: 4096}} {
			if got := ft.opened[i]; got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		}
		if id := c.Namespaces()[0].Info().ID; id != "uuid.02000000-0000-0000-0000-000000000001" {
			t.Error(id)
		}
	})
}

func TestCaseH02DefaultPort(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		connect(t, testConfig(ft))
		if a := ft.live().addr; a.Port != 4420 {
			t.Error("port", a.Port)
		}
	})
}

func TestCaseH01StaleConnection(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		tries := 0
		ft.onOpen = func(_ context.Context, p transport.QueueParams) error {
			if tries++; tries <= 2 {
				return rejected(p, transport.ErrStale, 10)
			}
			return nil
		}
		begin := time.Now()
		connect(t, testConfig(ft))
		if d := time.Since(begin); d != 2*time.Second || ft.dials != 3 {
			t.Error(d, ft.dials, "dials")
		}
	})
}

func TestCaseH05QueueSizeZeroBased(t *testing.T) {
	for entries, want := range map[int]int{32: 32, 16: 16, 1024: 128, 127: 127} {
		inTime(t, func(t *testing.T) {
			ft := newFakeTarget(1 << 20)
			ft.caps = nvme.MakeCapabilities(entries, time.Second)
			var sqsize uint16
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if isConnect(r) && q.params.ID == 1 {
					sqsize = (*nvme.Command)(&r.Command).ConnectSQSize()
				}
				return false
			}
			c := connect(t, testConfig(ft))
			if c.Info().QueueSize != want || int(sqsize) != want-1 || ft.opened[1].Depth != want {
				t.Error(entries, c.Info().QueueSize, sqsize, ft.opened[1].Depth)
			}
		})
	}
}

func TestCaseH38EntriesOfMAXCMD(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.id.MAXCMD = 20
		if c := connect(t, testConfig(ft)); c.Info().QueueSize != 20 {
			t.Error(c.Info().QueueSize)
		}
	})
}

func TestCaseH06SlowConnect(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
			if isConnect(r) {
				q.performLater(r, 2*time.Second)
			}
			return isConnect(r)
		}
		connect(t, testConfig(ft))
	})
}

func TestCaseH07KeepAliveBeforeQueues(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.onOpen = func(context.Context, transport.QueueParams) error {
			time.Sleep(300 * time.Millisecond)
			return nil
		}
		cfg := testConfig(ft)
		cfg.NrIOQueues, cfg.KeepAlive = 32, time.Second
		connect(t, cfg)
		time.Sleep(time.Minute)
		if ft.expired != 0 || ft.dials != 1 {
			t.Error(ft.expired, "keep-alive timers expired,", ft.dials, "dials")
		}
	})
}

func TestKeepAliveAsTheControllerHasIt(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.kato = 8 * time.Second
		var alive atomic.Int32
		ft.intercept = func(_ *fakeQueue, r *transport.Request) bool {
			if (*nvme.Command)(&r.Command).Opcode() == nvme.AdminKeepAlive {
				alive.Add(1)
			}
			return false
		}
		c := connect(t, testConfig(ft))
		time.Sleep(41 * time.Second)
		if c.Info().KeepAlive != ft.kato || alive.Load() != 10 {
			t.Error(c.Info().KeepAlive, alive.Load(), "keep-alives")
		}
	})
}

// Where the controller takes traffic for a sign of life, a busy host sends no Keep Alive, an idle one does.
func TestTrafficBasedKeepAlive(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.id.CTRATT = nvme.CTRATTTrafficKeep
		ft.kato = time.Hour // this fake counts only Keep Alives
		var alive atomic.Int32
		ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
			cmd := (*nvme.Command)(&r.Command)
			if q.params.ID == 0 && cmd.Opcode() == nvme.AdminGetFeatures {
				answer(q, r, 4000, 0)
				return true
			}
			if q.params.ID == 0 && cmd.Opcode() == nvme.AdminKeepAlive {
				alive.Add(1)
			}
			return false
		}
		n := connect(t, testConfig(ft)).Namespaces()[0]
		b := lease(t, n, 4096)
		for range 20 {
			time.Sleep(time.Second)
			if o := <-start(n, blockdev.Read, 0, b); o.err != nil {
				t.Fatal(o.err)
			}
		}
		if a := alive.Load(); a != 0 {
			t.Error(a, "Keep Alives while busy")
		}
		time.Sleep(20 * time.Second)
		if a := alive.Load(); a < 8 {
			t.Error(a, "Keep Alives while idle")
		}
	})
}

func TestCaseH08TargetRunsOutOfQueues(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.onOpen = func(_ context.Context, p transport.QueueParams) error {
			if p.ID > 3 {
				return rejected(p, transport.ErrRejected, 6)
			}
			return nil
		}
		cfg := testConfig(ft)
		cfg.NrIOQueues = 8
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		if n.Queues() != 3 {
			t.Error(n.Queues())
		}
		b := lease(t, n, 4096)
		for i := range 3 {
			if o := <-start(n, blockdev.Read, int64(i)<<12, b); o.err != nil {
				t.Error(o.err)
			}
		}
	})
}

func TestCaseH09FewerQueuesGranted(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.ios = 63
		cfg := testConfig(ft)
		cfg.NrIOQueues, cfg.QueueSize = 128, 16
		if c := connect(t, cfg); c.Info().IOQueues != 63 {
			t.Error(c.Info().IOQueues)
		}
	})
}

func TestRefusedControllers(t *testing.T) {
	for name, x := range map[string]struct {
		change func(ft *fakeTarget)
		want   string
	}{
		"no SGL":         {func(ft *fakeTarget) { ft.id.SGLS = nvme.SGLSKeyed }, "keyed SGLs"},
		"no keyed SGL":   {func(ft *fakeTarget) { ft.id.SGLS = 1 }, "keyed SGLs"},
		"IOCCSZ":         {func(ft *fakeTarget) { ft.id.IOCCSZ = 3 }, "command capsules of 48 bytes"},
		"IORCSZ":         {func(ft *fakeTarget) { ft.id.IORCSZ = 0 }, "response capsules"},
		"ICDOFF":         {func(ft *fakeTarget) { ft.id.ICDOFF = 4 }, "offset"},
		"SQES":           {func(ft *fakeTarget) { ft.id.SQES = 0x77 }, "SQES"},
		"page size":      {func(ft *fakeTarget) { ft.caps |= 1 << 48 }, "pages of 8192"},
		"command set":    {func(ft *fakeTarget) { ft.caps &^= 1 << 37 }, "NVM command set"},
		"discovery":      {func(ft *fakeTarget) { ft.id.CNTRLTYPE = nvme.ControllerDiscovery }, "discovery controller"},
		"administrative": {func(ft *fakeTarget) { ft.id.CNTRLTYPE = nvme.ControllerAdmin }, "administrative"},
		"list loops": {func(ft *fakeTarget) {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				cmd := (*nvme.Command)(&r.Command)
				if cmd.Opcode() != nvme.AdminIdentify || cmd.CNS() != nvme.CNSActiveNamespaces || q.params.ID != 0 {
					return false
				}
				ids := make([]uint32, nvme.MaxNamespaceList)
				for i := range ids {
					ids[i] = uint32(i + 1)
				}
				copy(r.Data, nvme.AppendNamespaceList(nil, ids))
				answer(q, r, 0, 0)
				return true
			}
		}, "after 0x400"},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1 << 20)
				x.change(ft)
				_, err := Connect(bg, testConfig(ft))
				if err == nil || !strings.Contains(err.Error(), x.want) {
					t.Error(err)
				}
				if ft.dials != 1 {
					t.Error(ft.dials, "dials")
				}
			})
		})
	}
}

func TestConnectErrors(t *testing.T) {
	fail := func(what string, result uint64, s nvme.StatusCode) func(ft *fakeTarget) {
		return func(ft *fakeTarget) {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if describe(q, (*nvme.Command)(&r.Command)) != what {
					return false
				}
				answer(q, r, result, s)
				return true
			}
		}
	}
	var connectError *transport.ConnectError
	for name, x := range map[string]struct {
		change func(ft *fakeTarget)
		is     func(error) bool
		within time.Duration
	}{
		"unknown subsystem": {
			func(ft *fakeTarget) { ft.id.SubNQN = "nqn.2024-01.org.example:else" },
			func(err error) bool {
				return errors.Is(err, nvme.StatusConnectInvalidParameters) && strings.Contains(err.Error(), "subsystem NQN")
			}, 0,
		},
		"host not allowed": {
			fail("admin Connect", 0, nvme.StatusConnectInvalidHost.WithDNR()),
			func(err error) bool { return errors.Is(err, nvme.StatusConnectInvalidHost) }, 0,
		},
		"authentication":    {fail("admin Connect", 1|1<<17, 0), func(err error) bool { return errors.Is(err, ErrAuthRequired) }, 0},
		"other controller":  {fail("admin Connect", 99, 0), func(err error) bool { return errors.Is(err, ErrIdentity) }, 0},
		"other on a queue":  {fail("io1 Connect", 99, 0), func(err error) bool { return errors.Is(err, ErrIdentity) }, 0},
		"controller fatal":  {fail("admin Property Get CSTS", 2, 0), func(err error) bool { return strings.Contains(err.Error(), "fatal") }, 0},
		"never ready":       {fail("admin Property Get CSTS", 0, 0), func(err error) bool { return strings.Contains(err.Error(), "CSTS.RDY") }, time.Second},
		"no I/O queues":     {fail("admin Set Features", 0, nvme.StatusInvalidField), func(err error) bool { return strings.Contains(err.Error(), "asking for 2 I/O queues") }, 0},
		"Connect times out": {func(ft *fakeTarget) { ft.blackhole() }, func(err error) bool { return strings.Contains(err.Error(), "no answer within 4s") }, 4 * time.Second},
		"dial times out": {
			func(ft *fakeTarget) { ft.onDial = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() } },
			func(err error) bool { return errors.As(err, &connectError) && errors.Is(err, transport.ErrTimeout) }, 4 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1 << 20)
				x.change(ft)
				begin := time.Now()
				_, err := Connect(bg, testConfig(ft))
				if err == nil || !x.is(err) || errors.Is(err, blockdev.ErrLost) {
					t.Errorf("%v (%T)", err, err)
				}
				if d := time.Since(begin); d > x.within {
					t.Error("took", d)
				}
			})
		})
	}
}

func TestConnectCancelled(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.blackhole()
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		begin := time.Now()
		if _, err := Connect(ctx, testConfig(ft)); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Second {
			t.Error(err, time.Since(begin))
		}
	})
}

func TestNamespacesThatCannotBeUsed(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.add(2, 1<<20, 9).id.LBAF[0].MS = 8
		ft.add(3, 1<<20, 9).id.DPS = 1
		ft.add(4, 1<<20, 9).ids = nvme.NamespaceIDs{HasCSI: true, CSI: 2}
		ft.add(5, 1<<20, 9).id.NCAP = 0
		ft.add(6, 1<<20, 9).id.NSZE = 1 << 60
		ft.add(7, 1<<20, 9).id.LBAF[0].LBADS = 17
		ft.add(8, 1<<20, 12)
		var ids []uint32
		for _, n := range connect(t, testConfig(ft)).Namespaces() {
			ids = append(ids, n.NSID())
		}
		if fmt.Sprint(ids) != "[1 8]" {
			t.Error(ids)
		}
	})
}

func TestCaseH11OneSpelling(t *testing.T) {
	for _, a := range []string{"10.0.0.1", "::ffff:10.0.0.1", "::ffff:a00:1"} {
		cfg := testConfig(newFakeTarget())
		cfg.Address.Remote = netip.MustParseAddr(a)
		if err := cfg.complete(); err != nil || cfg.Address.String() != "10.0.0.1:4420" {
			t.Error(a, "is", cfg.Address, err)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	for _, change := range []func(c *Config){
		func(c *Config) { c.Dialer = nil },
		func(c *Config) { c.Address = transport.Address{} },
		func(c *Config) { c.NrIOQueues = -1 },
		func(c *Config) { c.QueueSize = 15 },
		func(c *Config) { c.QueueSize = 1025 },
		func(c *Config) { c.PoolSize = 4096 },
		func(c *Config) { c.IOTimeout = -1 },
		func(c *Config) { c.SubsysNQN = "disk" },
		func(c *Config) { c.HostNQN = "me" },
		func(c *Config) { c.HostID[0]++ }, // H12
	} {
		cfg := testConfig(newFakeTarget())
		change(&cfg)
		var bad *ConfigError
		if _, err := Connect(bg, cfg); !errors.As(err, &bad) {
			t.Errorf("%v", err)
		}
	}
}
