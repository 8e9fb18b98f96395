package host

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// A target that restarts may need some time to have its namespaces ready: I/O to one that cannot be identified yet waits,
// and loses nothing, not even what was under way. The others have all of the queue meanwhile.
func TestNamespaceThatIsNotReadyYet(t *testing.T) {
	const outage = 2 * time.Minute
	for name, x := range map[string]struct {
		begin func(ft *fakeTarget)
		cns   nvme.CNS // what is refused
		sick  nvme.StatusCode
	}{
		"after a reconnect": {(*fakeTarget).cut, nvme.CNSNamespace, nvme.StatusNamespaceNotReady},
		"after an event":    {func(ft *fakeTarget) { ft.live().event(nvme.EventNamespaceChanged) }, nvme.CNSNamespace, nvme.StatusInternalError},
		"its identifiers":   {(*fakeTarget).cut, nvme.CNSNamespaceDescriptors, nvme.StatusInternalError},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1<<20, 1<<20)
				var rec recorder
				cfg := testConfig(ft)
				cfg.NrIOQueues, cfg.QueueSize, cfg.OnEvent = 1, 16, rec.event
				c := connect(t, cfg)
				well, bad := c.Namespaces()[0], c.Namespaces()[1]
				io := bad.queues[0].io
				b := lease(t, bad, 4096)
				ft.change(func() {
					ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
						cmd := (*nvme.Command)(&r.Command)
						switch {
						case cmd.NSID() != 2:
							return false
						case isIO(q, r): // never
							return true
						case cmd.Opcode() == nvme.AdminIdentify && cmd.CNS() == x.cns:
							answer(q, r, 0, x.sick)
							return true
						}
						return false
					}
				})
				var waits []<-chan outcome
				for i := range 20 { // more than the queue has room for
					r := &blockdev.Request{Op: blockdev.Write, Off: int64(4096 * i), Data: b}
					if i < rangeBuffers { // and all of these
						r.Op, r.Data, r.Len = blockdev.Discard, nil, 4096
					}
					waits = append(waits, startRequest(bad, r))
				}
				cut := time.Now()
				x.begin(ft)
				time.Sleep(3 * time.Second)
				waits = append(waits, start(bad, blockdev.Read, 0, b))
				if name != "after an event" { // when the queue is full until the timeout
					if err := do(well, blockdev.Read, 0, b, 0); err != nil || time.Since(cut) > 4*time.Second {
						t.Error("the other:", err, "after", time.Since(cut))
					}
				}
				if err := do(well, blockdev.Discard, 0, nil, 4096); err != nil { // when old writes are dead
					t.Error("the other:", err)
				}
				if err := bad.Err(); !errors.Is(err, blockdev.ErrLost) || !errors.Is(err, x.sick) {
					t.Error("it waits for", err)
				}
				rec.expect(t, "namespace changed 2 1048576")
				time.Sleep(time.Until(cut.Add(outage)))
				for _, w := range waits {
					if len(w) > 0 {
						t.Fatal("one has ended")
					}
				}
				ft.change(func() { ft.intercept = nil })
				for _, w := range waits {
					if o := <-w; o.err != nil || o.at.Sub(cut) > outage+lastPausedLook+time.Second {
						t.Error(o.err, "after", o.at.Sub(cut))
					}
				}
				rec.expect(t, "namespace changed 2 1048576")
				synctest.Wait()
				io.mu.Lock()
				defer io.mu.Unlock()
				if len(io.commands) != 15 || io.parked != 0 || io.extra != 0 || len(io.ranges) != rangeBuffers || bad.Err() != nil {
					t.Error(len(io.commands), "records,", io.parked, "parked,", io.extra, "extra,", len(io.ranges), "range buffers,", bad.Err())
				}
			})
		})
	}
}

// A pause ends with the namespace's or the connection's, and without a limit it has none.
func TestEndOfAPause(t *testing.T) {
	for name, x := range map[string]struct {
		end  func(ft *fakeTarget, c *Controller, n *Namespace)
		want error
	}{
		"close":    {func(_ *fakeTarget, _ *Controller, n *Namespace) { n.Close() }, blockdev.ErrClosed},
		"shutdown": {func(_ *fakeTarget, c *Controller, _ *Namespace) { c.post(machineEvent{kind: evDelete}) }, blockdev.ErrClosed},
		"detach":   {func(ft *fakeTarget, _ *Controller, _ *Namespace) { ft.change(func() { delete(ft.spaces, 1) }) }, blockdev.ErrLost},
		"hopeless": {func(ft *fakeTarget, _ *Controller, _ *Namespace) {
			ft.sicken(nvme.CNSNamespace, 1, nvme.StatusNamespaceNotReady.WithDNR())
		}, nvme.StatusNamespaceNotReady},
		"well": {func(ft *fakeTarget, _ *Controller, _ *Namespace) { ft.change(func() { ft.intercept = nil }) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				ft := newFakeTarget(1 << 20)
				cfg := testConfig(ft)
				cfg.CtrlLossTimeout = -1
				c := connect(t, cfg)
				n := c.Namespaces()[0]
				b := lease(t, n, 4096)
				ft.once(func(q *fakeQueue, r *transport.Request) bool { return isIO(q, r) })
				sent := start(n, blockdev.Write, 0, b)
				synctest.Wait()
				ft.sicken(nvme.CNSNamespace, 1, nvme.StatusNamespaceNotReady)
				ft.cut()
				time.Sleep(time.Hour)
				waits := start(n, blockdev.Write, 0, b)
				time.Sleep(time.Hour)
				if len(sent)+len(waits) > 0 {
					t.Fatal("ended by itself")
				}
				x.end(ft, c, n)
				for _, w := range []<-chan outcome{sent, waits} {
					if o := <-w; !errors.Is(o.err, x.want) {
						t.Error(o.err)
					}
				}
			})
		})
	}
}
