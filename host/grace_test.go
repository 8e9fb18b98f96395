package host

import (
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/transport"
)

// What the owner is told at the end about writes that the controller may still carry out.
func TestWritesMayLive(t *testing.T) {
	const kato, cqt = 20 * time.Second, 7 * time.Second // granted, not asked for
	const grace = kato + cqt
	unanswered := func(t *testing.T, ft *fakeTarget, n *Namespace, op blockdev.Op) <-chan outcome {
		ft.once(func(q *fakeQueue, r *transport.Request) bool { return isIO(q, r) })
		o := start(n, op, 0, lease(t, n, 4096))
		synctest.Wait()
		return o
	}
	for name, x := range map[string]struct {
		hold time.Duration
		run  func(t *testing.T, ft *fakeTarget, c *Controller, n *Namespace)
		want time.Duration
	}{
		"nothing under way": {0, func(t *testing.T, _ *fakeTarget, _ *Controller, n *Namespace) {
			if err := do(n, blockdev.Write, 0, lease(t, n, 4096), 0); err != nil {
				t.Error(err)
			}
		}, 0},
		"a read unanswered": {0, func(t *testing.T, ft *fakeTarget, _ *Controller, n *Namespace) {
			unanswered(t, ft, n, blockdev.Read)
		}, 0},
		// The controller confirms its shutdown.
		"a write unanswered": {0, func(t *testing.T, ft *fakeTarget, _ *Controller, n *Namespace) {
			unanswered(t, ft, n, blockdev.Write)
		}, grace},
		"target silent": {0, func(t *testing.T, ft *fakeTarget, _ *Controller, n *Namespace) {
			unanswered(t, ft, n, blockdev.Write)
			ft.blackhole()
		}, grace},
		"lost before": {0, func(t *testing.T, ft *fakeTarget, _ *Controller, n *Namespace) {
			unanswered(t, ft, n, blockdev.Write)
			ft.cut()
			time.Sleep(3 * time.Second)
		}, grace - 3*time.Second},
		"lost, and answered since": {0, func(t *testing.T, ft *fakeTarget, _ *Controller, n *Namespace) {
			o := unanswered(t, ft, n, blockdev.Write)
			ft.cut()
			if o := <-o; o.err != nil {
				t.Error(o.err)
			}
		}, 0},
		"given up": {0, func(t *testing.T, ft *fakeTarget, c *Controller, n *Namespace) {
			unanswered(t, ft, n, blockdev.Write)
			ft.change(func() { ft.id.SubNQN = "nqn.2024-01.org.example:other" })
			ft.cut()
			<-c.Done()
		}, grace - time.Second},
		"a process that died before": {time.Minute, func(*testing.T, *fakeTarget, *Controller, *Namespace) {
			time.Sleep(time.Second)
		}, time.Minute - time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1 << 20)
				ft.kato, ft.id.CQT = kato, uint16(cqt.Milliseconds())
				cfg := testConfig(ft)
				cfg.HoldWrites = x.hold
				c := connect(t, cfg)
				if g := c.Grace(); g != max(grace, x.hold) {
					t.Error("as long as it lives:", g)
				}
				x.run(t, ft, c, c.Namespaces()[0])
				begin := time.Now()
				select {
				case <-c.Done():
				default:
					if g := c.WritesMayLive(); g < grace {
						t.Error("not yet shut down:", g)
					}
				}
				_ = c.Shutdown(bg) // buffers are leased
				want := x.want
				if want != grace { // which counts from the end
					want = max(0, want-time.Since(begin))
				}
				if g := c.WritesMayLive(); g != want {
					t.Error(g, "instead of", want)
				}
				time.Sleep(want)
				if g := c.WritesMayLive(); g != 0 {
					t.Error("later:", g)
				}
			})
		})
	}
}
