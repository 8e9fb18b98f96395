package host_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/host"
	"farblk/host/nvme"
	"farblk/target"
)

// traffic writes and reads back blocks of n, eight at once on each queue, and checks what it reads.
func traffic(t *testing.T, n *host.Namespace, rounds int) {
	t.Helper()
	const size, width = 8192, 16
	bufs := make([][]byte, width)
	for i := range bufs {
		bufs[i] = buffer(t, n, size)
	}
	all := func(op blockdev.Op) {
		done := make(chan *blockdev.Request, width)
		for i, b := range bufs {
			r := &blockdev.Request{Op: op, Off: int64(i * size), Data: b, Done: func(r *blockdev.Request) { done <- r }}
			n.Queue(i).Submit(r)
		}
		for i := range n.Queues() {
			n.Queue(i).Kick()
		}
		end := time.After(limit)
		for range bufs {
			select {
			case r := <-done:
				if r.Err != nil {
					t.Errorf("%v at %d: %v", r.Op, r.Off, r.Err)
				}
			case <-end:
				t.Fatal(op, "has no end")
			}
		}
	}
	for round := range rounds {
		want := make([][]byte, width)
		for i, b := range bufs {
			for j := range b {
				b[j] = byte(round + i + j + j>>8)
			}
			want[i] = bytes.Clone(b)
		}
		all(blockdev.Write)
		for _, b := range bufs {
			clear(b)
		}
		all(blockdev.Read)
		for i, b := range bufs {
			if !bytes.Equal(b, want[i]) {
				t.Fatal("other data in", i)
			}
		}
	}
}

// TestMisbehavingTargets: whatever the target does once, every request ends well, with the right data, after
// as many resets as it takes.
func TestMisbehavingTargets(t *testing.T) {
	for name, x := range map[string]struct {
		script string
		resets bool
	}{
		"H35 unknown command ID": {"on read nth=5 unknown-cid", true},
		"H35 stale command ID":   {"on read nth=5 stale-cid", true},
		"H35 completed twice":    {"on read nth=5 duplicate", true},
		"H37 reordered":          {"on io every=3 delay 2ms", false},
		"H40 key invalidated":    {"on read nth=5 invalidate", true},
		"response dropped":       {"on read nth=5 drop", true},
		"write dropped":          {"on write nth=5 drop", true},
		"command ignored":        {"on write nth=5 ignore", true},
		"queue closed":           {"on read nth=20 close", true},
		"queue silent":           {"on read nth=20 blackhole", true},
		"data to a wrong key":    {"on read nth=5 bad-key", true},
		"status without DNR":     {"on io every=7 status 0x82", false}, // namespace not ready
		"keep-alive refused":     {"on keepalive nth=1 status 0x19", true},
		"keep-alive ignored":     {"on keepalive nth=1 ignore", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newScriptedBed(t, target.Config{}, x.script, target.NamespaceConfig{Size: 1 << 20})
			cfg := b.config()
			cfg.IOTimeout, cfg.ReconnectDelay, cfg.KeepAlive = 500*time.Millisecond, 10*time.Millisecond, 2*time.Second
			c := dial(t, cfg)
			n := c.Namespaces()[0]
			traffic(t, n, 3)
			if strings.HasPrefix(x.script, "on keepalive") {
				waitFor(t, func() bool { return c.Info().Resets > 0 })
				traffic(t, n, 1)
			}
			if r := c.Info().Resets; r > 0 != x.resets { // how many depends on the machine's speed
				t.Error(r, "resets, the cause:", c.Err())
			}
		})
	}
}

func TestMediaErrorOfATarget(t *testing.T) {
	b := newScriptedBed(t, target.Config{}, "on read lba=8 status 0x281 dnr", target.NamespaceConfig{Size: 1 << 20})
	c := dial(t, b.config())
	n := c.Namespaces()[0]
	buf := buffer(t, n, 4096)
	if err := run(t, n, &blockdev.Request{Op: blockdev.Read, Off: 4096, Data: buf}); !errors.Is(err, blockdev.ErrMedia) || !errors.Is(err, nvme.StatusUnrecoveredRead) {
		t.Error(err)
	}
	if err := run(t, n, &blockdev.Request{Op: blockdev.Read, Off: 8192, Data: buf}); err != nil || c.Info().Resets != 0 {
		t.Error(err, c.Info().Resets)
	}
}

func TestCaseH21ShutdownEndToEnd(t *testing.T) {
	b := newScriptedBed(t, target.Config{}, "on property-set nth=2 blackhole", target.NamespaceConfig{Size: 1 << 20})
	cfg := b.config()
	cfg.ShutdownTimeout = 300 * time.Millisecond
	c := dial(t, cfg)
	begin := time.Now()
	if err := c.Shutdown(context.Background()); err != nil || time.Since(begin) > 2*time.Second {
		t.Error(err, "after", time.Since(begin))
	}
}

func TestCaseH18EndToEnd(t *testing.T) {
	b := newScriptedBed(t, target.Config{}, "on log log=0x70 records 1099511627776")
	cfg := b.config()
	_, err := host.Discover(context.Background(), host.DiscoverConfig{
		Dialer: cfg.Dialer, Address: cfg.Address, HostNQN: cfg.HostNQN, HostID: cfg.HostID,
	})
	if err == nil || !strings.Contains(err.Error(), "1099511627776 records") {
		t.Error(err)
	}
}

// The identity changes between two looks at the same namespace.
func TestCaseH24EndToEnd(t *testing.T) {
	b := newScriptedBed(t, target.Config{}, "on identify cns=0 nth=2.. swap-nguid\non identify cns=3 nth=2.. swap-nguid", target.NamespaceConfig{Size: 1 << 20})
	cfg := b.config()
	cfg.ReconnectDelay = 10 * time.Millisecond
	c := dial(t, cfg)
	n := c.Namespaces()[0]
	buf := buffer(t, n, 4096)
	b.DropConnections()
	waitFor(t, func() bool { return c.Info().Resets == 1 })
	if err := run(t, n, &blockdev.Request{Op: blockdev.Write, Data: buf}); !errors.Is(err, blockdev.ErrChanged) {
		t.Error(err)
	}
}

func TestConnectToMisbehavingTargets(t *testing.T) {
	for name, x := range map[string]struct {
		script string
		queues int // 0: an error is right
	}{
		"H06 slow connect":           {"on connect qid=0 delay 300ms", 4},
		"H08 queues rejected":        {"on cm qid=3-9 reject 6", 2},
		"queue never accepted":       {"on cm qid=3 ignore", 2},
		"admin never accepted":       {"on cm qid=0 ignore", 0},
		"admin rejected":             {"on cm qid=0 reject 6", 0},
		"H40 Connect never answered": {"on connect qid=0 ignore", 0},
		"closed at Identify":         {"on identify close", 0},
		"silent at Identify":         {"on identify blackhole", 0},
		"another controller":         {"on identify cns=1 patch 78=ffff", 0},
		"no keyed SGLs":              {"on identify cns=1 patch 536=00000000", 0},
		"in-capsule offset":          {"on identify cns=1 patch 1800=0400", 0},
		"list that loops":            {"on identify cns=2 patch 4=01000000", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newScriptedBed(t, target.Config{}, x.script, target.NamespaceConfig{Size: 1 << 20})
			cfg := b.config()
			cfg.NrIOQueues, cfg.ConnectTimeout, cfg.AdminTimeout = 4, time.Second, 500*time.Millisecond
			begin := time.Now()
			c, err := host.Connect(context.Background(), cfg)
			if d := time.Since(begin); d > 5*time.Second {
				t.Error("took", d)
			}
			if err != nil {
				if x.queues > 0 {
					t.Error(err)
				}
				t.Log(err)
				return
			}
			if got := c.Info().IOQueues; got != x.queues {
				t.Error(got, "queues")
			}
			if err := c.Shutdown(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}
