package host

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"farblk/blockdev"
	"farblk/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var bg = context.Background()

func testConfig(t *fakeTarget) Config {
	return Config{
		Dialer: fakeDialer{t}, Address: transport.Address{Remote: netip.MustParseAddr("127.0.0.1")},
		SubsysNQN: subsysNQN, HostNQN: testNQN, HostID: testHostID, NrIOQueues: 2, PoolSize: 4 << 20,
	}
}

// connect connects, and at the end of the test checks that everything can be given back.
func connect(tb testing.TB, cfg Config) *Controller {
	tb.Helper()
	c, err := Connect(bg, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { shut(tb, c) })
	return c
}

func shut(tb testing.TB, c *Controller) {
	tb.Helper()
	if err := c.Shutdown(bg); err != nil {
		tb.Error("shutdown:", err)
	}
}

// inTime runs a test in a bubble with its own clock.
func inTime(t *testing.T, f func(t *testing.T)) { t.Helper(); synctest.Test(t, f) }

// do runs one request and waits for it.
func do(n *Namespace, op blockdev.Op, off int64, data []byte, length int64) error {
	r := &blockdev.Request{Op: op, Off: off, Data: data, Len: length}
	_, err := blockdev.SubmitWait(bg, n, r)
	return err
}

func lease(tb testing.TB, n *Namespace, size int) []byte {
	b := n.Pool().TryLease(size)
	if b == nil {
		tb.Fatal("no buffer")
	}
	tb.Cleanup(func() { n.Pool().Release(b) })
	return b
}

func fill(b []byte, seed byte) []byte {
	for i := range b {
		b[i] = seed + byte(i>>9) + byte(i)
	}
	return b
}

func TestConnectReadWriteFlush(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 2<<20)
		ft.add(3, 1<<20, 12)
		c := connect(t, testConfig(ft))
		if c.State() != StateLive || len(c.Namespaces()) != 3 {
			t.Fatal(c.State(), c.Namespaces())
		}
		for _, n := range c.Namespaces() {
			b := lease(t, n, 64<<10)
			want := bytes.Clone(fill(b, byte(n.NSID())))
			if err := do(n, blockdev.Write, 4096, b, 0); err != nil {
				t.Fatal(err)
			}
			clear(b)
			if err := do(n, blockdev.Read, 4096, b, 0); err != nil || !bytes.Equal(b, want) {
				t.Fatal(err, "or other data")
			}
			if !bytes.Equal(ft.spaces[n.NSID()].data[4096:][:len(want)], want) {
				t.Error("the target has other data")
			}
			if err := do(n, blockdev.Flush, 0, nil, 0); err != nil {
				t.Error(err)
			}
		}
		if i := c.Info(); i.IOQueues != 2 || i.QueueSize != 128 || i.MaxTransfer != 128<<10 || i.InCapsule != 4096 || i.Model != "Fake" {
			t.Errorf("%+v", i)
		}
	})
}

func TestRequestsThatNeedNoCommand(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.id.VWC, ft.id.ONCS = 0, 0
		ft.add(2, 1<<20, 12).id.NSATTR = 1
		c := connect(t, testConfig(ft))
		n, ro := c.Namespaces()[0], c.Namespaces()[1]
		b := lease(t, n, 8192)
		ft.takeLog()
		for _, x := range []struct {
			n    *Namespace
			op   blockdev.Op
			off  int64
			data []byte
			len  int64
			want error
		}{
			{n, blockdev.Flush, 0, nil, 0, nil},
			{n, blockdev.Read, 0, b[:0], 0, blockdev.ErrRange},
			{n, blockdev.Read, 100, b[:512], 0, blockdev.ErrAlignment},
			{ro, blockdev.Read, 512, b[:4096], 0, blockdev.ErrAlignment},
			{n, blockdev.Read, 1 << 20, b[:512], 0, blockdev.ErrRange},
			{n, blockdev.Read, 1<<20 - 512, b[:1024], 0, blockdev.ErrRange},
			{n, blockdev.Read, -512, b[:512], 0, blockdev.ErrRange},
			{n, blockdev.Read, 1<<63 - 512, b[:512], 0, blockdev.ErrRange},
			{ro, blockdev.Write, 0, b[:4096], 0, blockdev.ErrReadOnly},
			{n, blockdev.Discard, 0, nil, 512, blockdev.ErrUnsupported},
			{n, blockdev.WriteZeroes, 0, nil, 512, blockdev.ErrUnsupported},
			{n, blockdev.Op(99), 0, nil, 512, blockdev.ErrUnsupported},
		} {
			if err := do(x.n, x.op, x.off, x.data, x.len); !errors.Is(err, x.want) {
				t.Errorf("%v at %d of %d: %v, want %v", x.op, x.off, len(x.data), err, x.want)
			}
		}
		if l := ft.takeLog(); len(l) > 0 {
			t.Error("commands were sent:", l)
		}
	})
}

func TestShutdownEndsEverything(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		_ = b
		ctx, cancel := context.WithTimeout(bg, time.Minute)
		defer cancel()
		if err := c.Shutdown(ctx); err == nil {
			t.Error("a leased buffer was not noticed")
		}
		if err := do(n, blockdev.Flush, 0, nil, 0); !errors.Is(err, blockdev.ErrClosed) {
			t.Error(err)
		}
		if !ft.live().cc.ShutdownRequested() {
			t.Error("the controller was not told")
		}
	})
}
