package host

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// sicken makes Identify with that CNS answer s for namespace nsid, or for 0 all, until heal is called.
func (t *fakeTarget) sicken(cns nvme.CNS, nsid uint32, s nvme.StatusCode) (heal func()) {
	t.change(func() {
		t.intercept = func(q *fakeQueue, r *transport.Request) bool {
			cmd := (*nvme.Command)(&r.Command)
			if q.params.ID != 0 || cmd.Opcode() != nvme.AdminIdentify || cmd.CNS() != cns || nsid != 0 && cmd.NSID() != nsid {
				return false
			}
			answer(q, r, 0, s)
			return true
		}
	})
	return func() { t.change(func() { t.intercept = nil }) }
}

// A namespace that cannot be identified after a reconnect: the others go on, its own I/O fails, at once or when it has
// waited long enough, and when it is well again, and the same, so is its I/O.
func TestOneSickNamespace(t *testing.T) {
	for name, x := range map[string]struct {
		cns    nvme.CNS
		status nvme.StatusCode
		swap   bool
	}{
		"for good":    {nvme.CNSNamespace, nvme.StatusInternalError.WithDNR(), false},
		"for now":     {nvme.CNSNamespace, nvme.StatusNamespaceNotReady, false},
		"identifiers": {nvme.CNSNamespaceDescriptors, nvme.StatusInternalError, false},
		"swapped":     {nvme.CNSNamespace, nvme.StatusInternalError, true},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1<<20, 1<<20)
				var rec recorder
				cfg := testConfig(ft)
				cfg.OnEvent = rec.event
				cfg.FastIOFail = 20 * time.Second
				changes, atMost := []string{"namespace changed 2 1048576"}, 2*time.Second
				if !x.status.DNR() {
					changes, atMost = append(changes, changes[0]), firstDelay+cfg.FastIOFail+time.Second
				}
				c := connect(t, cfg)
				well, bad := c.Namespaces()[0], c.Namespaces()[1]
				b := lease(t, well, 4096)
				heal := ft.sicken(x.cns, 2, x.status)
				cut := time.Now()
				ft.cut()
				synctest.Wait()
				waits := start(bad, blockdev.Write, 0, b)
				if o := <-start(well, blockdev.Read, 0, b); o.err != nil || o.at.Sub(cut) > 2*time.Second {
					t.Error("the other:", o.err, "after", o.at.Sub(cut))
				}
				o := <-waits
				if d := o.at.Sub(cut); !errors.Is(o.err, x.status) || !errors.Is(bad.Err(), blockdev.ErrLost) || d > atMost || d < atMost-2*time.Second {
					t.Error("it:", o.err, "after", d)
				}
				time.Sleep(10 * time.Minute)
				rec.expect(t, changes...)
				looks := 0
				for _, l := range ft.takeLog() {
					if l == "admin Identify 0/2" {
						looks++
					}
				}
				if looks < 10 || looks > 40 || c.State() != StateLive || len(c.Namespaces()) != 2 {
					t.Error(looks, "looks,", c.State(), c.Namespaces())
				}
				heal()
				if x.swap {
					ft.change(func() { ft.spaces[2].ids.NGUID[5]++ })
				}
				time.Sleep(lastLookPause)
				err := do(bad, blockdev.Write, 0, b, 0)
				rec.expect(t, "namespace changed 2 1048576")
				if x.swap {
					if !errors.Is(err, blockdev.ErrChanged) {
						t.Error("swapped:", err)
					}
					return
				}
				if err != nil || c.Info().Resets != 1 {
					t.Error("well again:", err, c.Info().Resets)
				}
			})
		})
	}
}

// What is sick when it is first seen is left out until it is well; and nothing is no connection.
func TestSickNamespaceAtConnect(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		var rec recorder
		cfg := testConfig(ft)
		cfg.OnEvent = rec.event
		heal := ft.sicken(nvme.CNSNamespace, 0, nvme.StatusInternalError)
		if _, err := Connect(bg, cfg); !errors.Is(err, nvme.StatusInternalError) {
			t.Fatal(err)
		}
		heal()
		heal = ft.sicken(nvme.CNSNamespace, 2, nvme.StatusInternalError)
		c := connect(t, cfg)
		if n := c.Namespaces(); len(n) != 1 || n[0].NSID() != 1 {
			t.Fatal(n)
		}
		time.Sleep(time.Hour)
		heal()
		time.Sleep(lastLookPause)
		rec.expect(t, "namespace added 2 1048576")
		if n := c.Namespaces(); len(n) != 2 || do(n[1], blockdev.Flush, 0, nil, 0) != nil {
			t.Error(n)
		}
	})
}

// An event that cannot be followed at once is followed later, and the next one comes.
func TestEventFollowedLater(t *testing.T) {
	for _, x := range []struct {
		cns  nvme.CNS
		nsid uint32
	}{{nvme.CNSActiveNamespaces, 0}, {nvme.CNSNamespace, 2}} {
		inTime(t, func(t *testing.T) {
			ft := newFakeTarget(1 << 20)
			var rec recorder
			cfg := testConfig(ft)
			cfg.OnEvent = rec.event
			connect(t, cfg)
			heal := ft.sicken(x.cns, x.nsid, nvme.StatusNamespaceNotReady)
			ft.add(2, 1<<20, 9)
			ft.live().event(nvme.EventNamespaceChanged)
			rec.expect(t)
			heal()
			time.Sleep(time.Second)
			rec.expect(t, "namespace added 2 1048576")
			ft.takeLog()
			time.Sleep(time.Hour)
			if l := ft.takeLog(); slices.Contains(l, "admin Identify 2/0") {
				t.Error("looked at without a reason:", l)
			}
			ft.add(3, 1<<20, 9)
			ft.live().event(nvme.EventNamespaceChanged)
			rec.expect(t, "namespace added 3 1048576")
		})
	}
}

// Closing a namespace waits for what is under way also when another scan has taken it out of the queues meanwhile.
func TestQueueRemovedTwice(t *testing.T) {
	n := instantNamespace(t, 8)
	q := &n.queues[0]
	q.Submit(&blockdev.Request{Op: blockdev.Flush, Done: func(*blockdev.Request) {}})
	drained := []<-chan struct{}{q.io.remove(q, blockdev.ErrClosed), q.io.remove(q, blockdev.ErrLost)}
	for i, want := range []bool{false, true} {
		for j, c := range drained {
			closed := false
			select {
			case <-c:
				closed = true
			default:
			}
			if closed != want {
				t.Error("step", i, "call", j, "drained:", closed)
			}
		}
		q.Poll(0)
	}
	<-q.io.remove(q, blockdev.ErrLost)
	if !errors.Is(q.removed, blockdev.ErrClosed) {
		t.Error(q.removed)
	}
}

// One namespace after another in the same place: those before leave nothing behind.
func TestReplacedNamespaces(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		c := connect(t, testConfig(ft))
		for i := range 5 {
			old := c.Namespaces()[1]
			ft.change(func() { delete(ft.spaces, 2) })
			ft.live().event(nvme.EventNamespaceChanged)
			time.Sleep(time.Second)
			ft.add(2, 1<<20, 9).ids.UUID[5] = byte(i + 1)
			ft.live().event(nvme.EventNamespaceChanged)
			time.Sleep(time.Second)
			if err := do(old, blockdev.Flush, 0, nil, 0); !errors.Is(err, blockdev.ErrLost) {
				t.Error("the old one:", err)
			}
			if err := do(c.Namespaces()[1], blockdev.Flush, 0, nil, 0); err != nil {
				t.Error("the new one:", err)
			}
		}
		for i, q := range c.ioQueues() {
			if len(q.queues) != 2 {
				t.Errorf("queue %d has %d namespaces", i, len(q.queues))
			}
		}
	})
}
