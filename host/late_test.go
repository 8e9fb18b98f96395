package host

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// A command that never ends is given up after some resets; one that was only under way at the same time is not.
func TestCommandThatIsAlwaysLate(t *testing.T) {
	for _, op := range []blockdev.Op{blockdev.Read, blockdev.Write} {
		inTime(t, func(t *testing.T) {
			ft := newFakeTarget(1 << 20)
			c := connect(t, testConfig(ft))
			n := c.Namespaces()[0]
			b := lease(t, n, 4096)
			var reads atomic.Int32
			ft.change(func() {
				ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
					cmd := (*nvme.Command)(&r.Command)
					return isIO(q, r) && (cmd.SLBA() == 8 || cmd.SLBA() == 16 && reads.Add(1)%2 == 1)
				}
			})
			bad := start(n, op, 4096, b)
			for range maxLate {
				time.Sleep(15 * time.Second) // old writes are dead, and the bad one is under way again
				if o := <-start(n, blockdev.Read, 8192, b); o.err != nil {
					t.Error("under way at the same time:", o.err)
				}
			}
			o := <-bad
			var late *TimeoutError
			if !errors.As(o.err, &late) || !errors.Is(o.err, blockdev.ErrLost) || strings.Contains(o.err.Error(), "may have been") != (op == blockdev.Write) {
				t.Error(op, o.err)
			}
			if err := do(n, op, 0, b, 0); err != nil || c.Info().Resets != maxLate {
				t.Error(err, c.Info().Resets)
			}
		})
	}
}

// A controller that takes one command after the other and needs longer than the timeout for all that it is given: each
// comes to its turn after some resets, and none is given up. Unless one of them is never done with.
func TestSlowInTurn(t *testing.T) {
	for _, poison := range []int64{-1, 60} {
		inTime(t, func(t *testing.T) {
			const writes, inTimeout = 127, 20
			ft := newFakeTarget(1 << 20)
			cfg := testConfig(ft)
			cfg.NrIOQueues, cfg.IOTimeout = 1, 30*time.Second
			c := connect(t, cfg)
			n := c.Namespaces()[0]
			b := lease(t, n, 4096)
			var free time.Time // when the controller is done with what it has; q's poller's
			var last *fakeQueue
			stuck := false
			ft.change(func() {
				ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
					if !isIO(q, r) {
						return false
					}
					if q != last {
						last, free, stuck = q, time.Now(), false
					}
					if free.Before(time.Now()) {
						free = time.Now()
					}
					if stuck = stuck || int64((*nvme.Command)(&r.Command).SLBA()) == poison*8; !stuck {
						free = free.Add(cfg.IOTimeout / inTimeout)
						q.performLater(r, time.Until(free))
					}
					return true
				}
			})
			var all [writes]<-chan outcome
			for i := range all {
				all[i] = start(n, blockdev.Write, int64(i)*4096, b)
			}
			for i, w := range all {
				var late *TimeoutError
				if o := <-w; poison < 0 && o.err != nil || int64(i) == poison && !errors.As(o.err, &late) {
					t.Error(i, o.err)
				}
			}
			if r := c.Info().Resets; r < maxLate || r > 4*maxLate {
				t.Error(r, "resets")
			}
		})
	}
}

// A controller that deallocates slowly: what is too much for it at once is asked for in smaller parts.
func TestSlowDeallocate(t *testing.T) {
	const mib = 1 << 16 // scaled down
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(64 * mib)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		for i := range ft.spaces[1].data {
			ft.spaces[1].data[i] = 1
		}
		most, takes := int64(20*mib), 20*time.Second // in time, and how long
		sent := 0
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if !isIO(q, r, nvme.IODatasetManagement) {
					return false
				}
				sent++
				blocks := int64(0)
				for i := range (*nvme.Command)(&r.Command).Ranges() {
					x, _ := nvme.ParseRange(r.Data[i*nvme.RangeSize:])
					blocks += int64(x.Blocks)
				}
				if blocks<<9 <= most {
					q.performLater(r, takes)
				}
				return true
			}
		})
		if err := do(n, blockdev.Discard, 512, nil, 64*mib-1024); err != nil {
			t.Fatal(err)
		}
		for i, x := range ft.spaces[1].data {
			if x == 0 != (i >= 512 && i < 64*mib-512) {
				t.Fatal("byte", i, "is", x)
			}
		}
		if r := c.Info().Resets; r != 2 || sent != 2+5 {
			t.Error(r, "resets,", sent, "commands")
		}
		if err := do(n, blockdev.Discard, 0, nil, 64*mib); err != nil || c.Info().Resets != 2 || sent != 2+5+5 {
			t.Error("another:", err, c.Info().Resets, sent)
		}
		// It was only busy: the bound goes up again, as far as a deallocation can go.
		ft.change(func() { most, takes = 64*mib, time.Second })
		for i, want := range []int{5, 3, 2, 1} {
			sent = 0
			if err := do(n, blockdev.Discard, 0, nil, 64*mib); err != nil || c.Info().Resets != 2 || sent != want {
				t.Error(i, "after it was busy:", err, c.Info().Resets, sent)
			}
		}
	})
}

// pickyQueue refuses what a test wants it to.
type pickyQueue struct {
	instantQueue
	refuse error
}

func (q *pickyQueue) Submit(r *transport.Request) error {
	if q.refuse != nil {
		return q.refuse
	}
	r.Err = nil
	return q.instantQueue.Submit(r)
}

// What the transport refuses for another reason than the queue's state ends in an error, and what finds no room while
// nothing is under way is tried again by the clock.
func TestRequestsThatTheTransportRefuses(t *testing.T) {
	n := instantNamespace(t, 8)
	io := n.queues[0].io
	tq := &pickyQueue{}
	io.resume(tq, 7, true)
	bad := errors.New("no memory window")
	submit := func() *blockdev.Request {
		r := &blockdev.Request{Op: blockdev.Discard, Len: 4096, Done: func(r *blockdev.Request) { r.Owner = true }}
		n.Queue(0).Submit(r)
		return r
	}
	tq.refuse = bad
	if r := submit(); r.Owner != true || r.Err != bad {
		t.Error("refused at once:", r.Owner, r.Err)
	}
	tq.refuse = transport.ErrQueueFull
	r := submit()
	if r.Owner != nil {
		t.Fatal("no room:", r.Err)
	}
	tq.refuse = bad
	io.advanceClock(100)
	if r.Owner != true || r.Err != bad {
		t.Error("refused later:", r.Owner, r.Err)
	}
	tq.refuse = nil
	r = submit()
	lost := tq.pending[0]
	tq.pending = nil
	io.hold()
	lost.Err = &transport.LostError{Cause: errCut}
	lost.Done(lost)
	tq.refuse = bad
	io.resume(tq, 7, true)
	if r.Owner != true || r.Err != bad {
		t.Error("refused again:", r.Owner, r.Err)
	}
	tq.refuse = transport.ErrQueueFull
	r = submit()
	tq.refuse = nil
	io.advanceClock(100)
	n.Queue(0).Poll(0)
	if r.Owner != true || r.Err != nil {
		t.Error("room later:", r.Owner, r.Err)
	}
	if len(io.ranges) != 1 || io.inFlight != 0 || io.backlog != nil || io.again != nil {
		t.Error("something is left")
	}
}
