package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// start submits a request and returns where its end, the error and the time, will be seen.
func start(n *Namespace, op blockdev.Op, off int64, data []byte) <-chan outcome {
	return startRequest(n, &blockdev.Request{Op: op, Off: off, Data: data})
}

func startRequest(n *Namespace, r *blockdev.Request) <-chan outcome {
	c := make(chan outcome, 1)
	r.Done = func(r *blockdev.Request) { c <- outcome{r.Err, time.Now()} }
	q := n.Queue(int(r.Off >> 12))
	q.Submit(r)
	q.Kick()
	return c
}

type outcome struct {
	err error
	at  time.Time
}

// isIO says whether r is an I/O command of one of the opcodes, or of any.
func isIO(q *fakeQueue, r *transport.Request, ops ...nvme.Opcode) bool {
	op := (*nvme.Command)(&r.Command).Opcode()
	return q.params.ID != 0 && op != nvme.OpcodeFabrics && (len(ops) == 0 || slices.Contains(ops, op))
}

// once makes f intercept until it says true for the first time.
func (t *fakeTarget) once(f func(q *fakeQueue, r *transport.Request) bool) {
	var mu sync.Mutex
	spent := false
	t.change(func() {
		t.intercept = func(q *fakeQueue, r *transport.Request) bool {
			mu.Lock()
			defer mu.Unlock()
			if spent || !f(q, r) {
				return false
			}
			spent = true
			return true
		}
	})
}

// blackhole makes the target answer nothing any more.
func (t *fakeTarget) blackhole() {
	t.change(func() {
		t.silent = true
		t.intercept = func(*fakeQueue, *transport.Request) bool { return true }
	})
}

func TestReconnectKeepsRequests(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[1]
		b := lease(t, n, 1<<20)
		fill(ft.spaces[2].data, 9)
		ft.blackhole()
		lost := start(n, blockdev.Read, 0, b) // 8 commands
		synctest.Wait()
		ft.change(func() { ft.intercept = nil })
		cut := time.Now()
		ft.cut()
		synctest.Wait()
		if s := c.State(); s != StateReconnecting {
			t.Fatal(s)
		}
		b2 := lease(t, n, 4096)
		waits := start(n, blockdev.Read, 4096, b2)
		for _, o := range []outcome{<-lost, <-waits} {
			if o.err != nil || o.at.Sub(cut) != time.Second {
				t.Error(o.err, "after", o.at.Sub(cut))
			}
		}
		if !bytes.Equal(b, ft.spaces[2].data) || !bytes.Equal(b2, ft.spaces[2].data[4096:8192]) {
			t.Error("other data")
		}
		if i := c.Info(); i.Resets != 1 || i.CNTLID != 2 {
			t.Errorf("%+v", i)
		}
	})
}

// The target holds a write, and carries it out when it gives up the old controller, which is long after the
// host has a new one.
func TestCaseH25NoResendBeforeTheOldPathIsDead(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		b1, b2, b3 := lease(t, n, 4096), lease(t, n, 4096), lease(t, n, 4096)
		fill(b1, 1)
		fill(b2, 2)
		const kato = 5 * time.Second
		ft.once(func(q *fakeQueue, r *transport.Request) bool {
			if !isIO(q, r, nvme.IOWrite) {
				return false
			}
			old := bytes.Clone(r.Data)
			time.AfterFunc(kato, func() { ft.change(func() { copy(ft.spaces[1].data, old) }) })
			return true
		})
		first := start(n, blockdev.Write, 0, b1)
		synctest.Wait()
		cut := time.Now()
		ft.cut()
		synctest.Wait()
		other := start(n, blockdev.Write, 8192, b2) // a new one must wait as well
		read := start(n, blockdev.Read, 8192, b3)
		if o := <-read; o.err != nil || o.at.Sub(cut) > 2*time.Second {
			t.Error("read:", o.err, "after", o.at.Sub(cut))
		}
		for _, o := range []outcome{<-first, <-other} {
			if d := o.at.Sub(cut); o.err != nil || d < kato || d > 2*kato {
				t.Error("write:", o.err, "after", d)
			}
		}
		if o := <-start(n, blockdev.Write, 0, b2); o.err != nil {
			t.Error(o.err)
		}
		time.Sleep(time.Minute)
		if !bytes.Equal(ft.spaces[1].data[:4096], b2) {
			t.Error("a write of the old connection has overwritten a later one")
		}
	})
}

// Nothing comes back any more, and nobody says so.
func TestCaseH19CablePulled(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		cfg := testConfig(ft)
		cfg.FastIOFail, cfg.CtrlLossTimeout = 10*time.Second, time.Minute
		var states []State
		cfg.OnEvent = func(e Event) { states = append(states, e.State) }
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		time.Sleep(7 * time.Second)
		ft.blackhole()
		ft.change(func() { ft.onDial = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() } })
		pulled := time.Now()
		o := <-start(n, blockdev.Write, 0, b)
		if d := o.at.Sub(pulled); !errors.Is(o.err, blockdev.ErrLost) || d > 8*time.Second+cfg.FastIOFail {
			t.Error(o.err, "after", d)
		}
		o = <-start(n, blockdev.Read, 0, b)
		if d := time.Since(o.at); !errors.Is(o.err, blockdev.ErrLost) || d != 0 {
			t.Error("later ones must fail at once:", o.err, d)
		}
		<-c.Done()
		if d := time.Since(pulled); c.State() != StateDead || d > 70*time.Second {
			t.Error(c.State(), "after", d)
		}
		var timeout *TimeoutError
		if err := c.Err(); !errors.As(err, &timeout) || !strings.Contains(err.Error(), "Keep Alive") {
			t.Error("first cause:", err)
		}
		if want := []State{StateConnecting, StateLive, StateResetting, StateReconnecting, StateDead}; !slices.Equal(states, want) {
			t.Error(states)
		}
	})
}

func TestCaseH21ShutdownOfADeadTarget(t *testing.T) {
	for _, underWay := range []bool{false, true} {
		inTime(t, func(t *testing.T) {
			ft := newFakeTarget(1 << 20)
			c := connect(t, testConfig(ft))
			n := c.Namespaces()[0]
			b := lease(t, n, 4096)
			ft.blackhole()
			var o <-chan outcome
			if underWay {
				o = start(n, blockdev.Write, 0, b)
			}
			begin := time.Now()
			_ = c.Shutdown(bg) // b is leased
			if d := time.Since(begin); d > 5*time.Second {
				t.Error("took", d)
			}
			if underWay {
				if o := <-o; !errors.Is(o.err, blockdev.ErrClosed) {
					t.Error(o.err)
				}
			}
		})
	}
}

func TestCaseH24NamespaceSwapped(t *testing.T) {
	only := func(ids nvme.NamespaceIDs) func(*fakeNamespace) { return func(n *fakeNamespace) { n.ids = ids } }
	for name, x := range map[string]struct {
		before func(n *fakeNamespace) // or nil
		swap   func(ft *fakeTarget, n *fakeNamespace)
	}{
		"nguid":      {nil, func(_ *fakeTarget, n *fakeNamespace) { n.ids.NGUID[5]++ }},
		"uuid":       {nil, func(_ *fakeTarget, n *fakeNamespace) { n.ids.UUID[5]++ }},
		"eui64":      {only(nvme.NamespaceIDs{EUI64: nvme.EUI64{7}}), func(_ *fakeTarget, n *fakeNamespace) { n.ids.EUI64[5]++ }},
		"ids gone":   {nil, func(_ *fakeTarget, n *fakeNamespace) { n.ids = nvme.NamespaceIDs{} }},
		"block size": {nil, func(_ *fakeTarget, n *fakeNamespace) { n.id.LBAF[0].LBADS, n.id.NSZE = 12, n.id.NSZE/8 }},
		// without an identifier, how it looks must do
		"size":   {only(nvme.NamespaceIDs{}), func(_ *fakeTarget, n *fakeNamespace) { n.id.NSZE /= 2 }},
		"serial": {only(nvme.NamespaceIDs{}), func(ft *fakeTarget, _ *fakeNamespace) { ft.id.SN += "2" }},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1<<20, 1<<20)
				if x.before != nil {
					x.before(ft.spaces[1])
				}
				var events []string
				cfg := testConfig(ft)
				cfg.OnEvent = func(e Event) {
					if e.Namespace != nil {
						events = append(events, fmt.Sprintln(e.Kind, e.Namespace.NSID(), errors.Is(e.Err, blockdev.ErrChanged)))
					}
				}
				c := connect(t, cfg)
				n, other := c.Namespaces()[0], c.Namespaces()[1]
				b := lease(t, n, 4096)
				ft.once(func(q *fakeQueue, r *transport.Request) bool { return isIO(q, r) })
				lost := start(n, blockdev.Write, 0, b)
				synctest.Wait()
				ft.change(func() { x.swap(ft, ft.spaces[1]) })
				ft.cut()
				synctest.Wait()
				waits := start(n, blockdev.Write, 4096, b)
				if o := <-lost; !errors.Is(o.err, blockdev.ErrChanged) {
					t.Error("lost:", o.err)
				}
				if o := <-waits; !errors.Is(o.err, blockdev.ErrChanged) {
					t.Error("waiting:", o.err)
				}
				if err := do(n, blockdev.Read, 0, b, 0); !errors.Is(err, blockdev.ErrChanged) {
					t.Error("new:", err)
				}
				if err := do(other, blockdev.Read, 0, b, 0); err != nil {
					t.Error("another namespace:", err)
				}
				if !slices.Equal(events, []string{"namespace changed 1 true\n"}) {
					t.Error(events)
				}
				if bytes.ContainsFunc(ft.spaces[1].data, func(r rune) bool { return r != 0 }) {
					t.Error("it was written to")
				}
			})
		})
	}
}

func TestCaseH20LossInABurst(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		cfg := testConfig(ft)
		cfg.QueueSize = 16
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		for round := range 1000 {
			var outcomes []<-chan outcome
			count := 0
			ft.change(func() {
				ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
					if !isIO(q, r) {
						return false
					}
					ft.mu.Lock()
					count++
					k := count
					ft.mu.Unlock()
					if k == 1+round%20 {
						ft.cut()
					}
					return k > round%20
				}
			})
			for i := range 40 {
				op := blockdev.Read
				if i%3 == 0 {
					op = blockdev.Flush
				}
				outcomes = append(outcomes, start(n, op, int64(i%2)<<12, b))
			}
			synctest.Wait()
			ft.change(func() { ft.intercept = nil })
			for _, o := range outcomes {
				if o := <-o; o.err != nil {
					t.Fatal(o.err)
				}
			}
		}
		if r := c.Info().Resets; r != 1000 {
			t.Error(r, "resets")
		}
		for i, q := range c.queues {
			free := 0
			for c := q.free; c != nil; c = c.next {
				free++
			}
			if free != 15 || q.inFlight != 0 || q.again != nil || len(q.ranges) != rangeBuffers {
				t.Errorf("queue %d: %d records, %d in flight", i, free, q.inFlight)
			}
		}
	})
}

func TestCommandTimeout(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		ft.once(func(q *fakeQueue, r *transport.Request) bool { return isIO(q, r) })
		begin := time.Now()
		o := <-start(n, blockdev.Read, 0, b)
		if d := o.at.Sub(begin); o.err != nil || d < 30*time.Second || d > 33*time.Second {
			t.Error(o.err, "after", d)
		}
		if c.Info().Resets != 1 {
			t.Error("not reset")
		}
	})
}

func TestReconnectWithFewerQueues(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		cfg := testConfig(ft)
		cfg.NrIOQueues, cfg.QueueSize = 4, 32
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		if n.Queues() != 4 {
			t.Fatal(n.Queues())
		}
		b := lease(t, n, 4096)
		ft.blackhole()
		var outcomes []<-chan outcome
		for i := range 4 * 31 {
			outcomes = append(outcomes, start(n, blockdev.Read, int64(i%200)<<12, b))
		}
		synctest.Wait()
		ft.change(func() {
			ft.intercept, ft.ios = nil, 2
			ft.caps = nvme.MakeCapabilities(16, time.Second)
		})
		ft.cut()
		for _, o := range outcomes {
			if o := <-o; o.err != nil {
				t.Fatal(o.err)
			}
		}
		if i := c.Info(); i.IOQueues != 2 || i.QueueSize != 16 || n.Queues() != 4 {
			t.Errorf("%+v", i)
		}
	})
}

func TestReconnectGivesUp(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		// The subsystem is gone when the host comes back; the target says not to retry.
		ft.change(func() { ft.id.SubNQN = "nqn.2024-01.org.example:other" })
		cut := time.Now()
		ft.cut()
		o := <-start(n, blockdev.Read, 0, b)
		<-c.Done()
		if d := time.Since(cut); !errors.Is(o.err, blockdev.ErrLost) || !errors.Is(o.err, nvme.StatusConnectInvalidParameters) || d > 2*time.Second {
			t.Error(o.err, "after", d)
		}
	})
}

// A process that died may have left writes under way; the one that takes over holds its own back.
func TestHoldWrites(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		cfg := testConfig(ft)
		cfg.HoldWrites = GraceTime(5 * time.Second)
		begin := time.Now()
		n := connect(t, cfg).Namespaces()[0]
		b := lease(t, n, 4096)
		w, r := start(n, blockdev.Write, 0, b), start(n, blockdev.Read, 0, b)
		if o := <-r; o.err != nil || !o.at.Equal(begin) {
			t.Error(o.err, o.at.Sub(begin))
		}
		if o := <-w; o.err != nil || o.at.Sub(begin) != cfg.HoldWrites {
			t.Error(o.err, o.at.Sub(begin))
		}
	})
}
