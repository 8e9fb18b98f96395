package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// recorder keeps events as text.
type recorder struct {
	mu   sync.Mutex
	list []string
}

func (r *recorder) event(e Event) {
	if e.Kind == EventState {
		return
	}
	s := e.Kind.String()
	if e.Namespace != nil {
		s += fmt.Sprintf(" %d %d", e.Namespace.NSID(), e.Namespace.Info().Size)
	}
	r.mu.Lock()
	r.list = append(r.list, s)
	r.mu.Unlock()
}

// take waits until nothing moves any more and returns the events since the last call.
func (r *recorder) take() []string {
	time.Sleep(2 * eventPause)
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.list
	r.list = nil
	return l
}

func (r *recorder) expect(t *testing.T, want ...string) {
	t.Helper()
	if got := r.take(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestCaseH34NamespacesChange(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		var rec recorder
		cfg := testConfig(ft)
		cfg.OnEvent = rec.event
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		var sizes []int64
		cancel := n.Watch(func(i blockdev.Info) { sizes = append(sizes, i.Size) })
		changed := func(f func()) {
			ft.change(f)
			ft.live().event(nvme.EventNamespaceChanged)
		}

		changed(func() { ft.spaces[1].data = make([]byte, 2<<20); ft.spaces[1].id.NSZE *= 2 })
		rec.expect(t, "namespace changed 1 2097152")
		if err := do(n, blockdev.Write, 2<<20-4096, b, 0); err != nil || !slices.Equal(sizes, []int64{2 << 20}) {
			t.Error(err, sizes)
		}
		changed(func() { ft.spaces[1].id.NSATTR = nvme.NSAttrWriteProtected })
		rec.expect(t, "namespace changed 1 2097152")
		if err := do(n, blockdev.Write, 0, b, 0); !errors.Is(err, blockdev.ErrReadOnly) {
			t.Error(err)
		}
		changed(func() { ft.spaces[1].id.NSATTR = 0 })
		rec.expect(t, "namespace changed 1 2097152")
		cancel()

		var gone *fakeNamespace
		changed(func() { gone = ft.spaces[1]; delete(ft.spaces, 1) })
		rec.expect(t, "namespace removed 1 2097152")
		if err := do(n, blockdev.Read, 0, b, 0); !errors.Is(err, blockdev.ErrLost) || len(c.Namespaces()) != 1 {
			t.Error(err, c.Namespaces())
		}
		changed(func() { ft.spaces[1] = gone }) // the same one comes back
		rec.expect(t, "namespace added 1 2097152")
		if err := do(n, blockdev.Read, 0, b, 0); err != nil || c.Namespaces()[0] != n {
			t.Error(err)
		}
		changed(func() { delete(ft.spaces, 1) })
		rec.expect(t, "namespace removed 1 2097152")
		ft.add(1, 1<<20, 9).ids.UUID[0]++ // another one in its place
		ft.add(7, 1<<20, 12)
		changed(func() {})
		rec.expect(t, "namespace added 1 1048576", "namespace added 7 1048576")
		if err := do(n, blockdev.Read, 0, b, 0); !errors.Is(err, blockdev.ErrLost) {
			t.Error("the old one:", err)
		}
		for _, n := range c.Namespaces() {
			if err := do(n, blockdev.Read, 0, b, 0); err != nil {
				t.Error(n.NSID(), err)
			}
		}
		changed(func() {}) // nothing new, and no loop
		rec.expect(t)
		logs := 0
		for _, l := range ft.takeLog() {
			if l == "admin Get Log Page 0x4" {
				logs++
			}
		}
		if logs != 8 {
			t.Error("changed namespace list read", logs, "times")
		}
	})
}

func TestCaseE21ChangesDuringAnOutage(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		var rec recorder
		cfg := testConfig(ft)
		cfg.OnEvent = rec.event
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		ft.add(3, 1<<20, 9)
		ft.change(func() {
			ft.spaces[1].data = make([]byte, 2<<20)
			ft.spaces[1].id.NSZE *= 2
			delete(ft.spaces, 2)
		})
		ft.cut()
		if o := <-start(n, blockdev.Read, 0, b); o.err != nil {
			t.Error(o.err)
		}
		rec.expect(t, "namespace changed 1 2097152", "namespace added 3 1048576", "namespace removed 2 1048576")
		if err := do(n, blockdev.Write, 2<<20-4096, b, 0); err != nil {
			t.Error(err)
		}
	})
}

func TestANAChange(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.id.CMIC, ft.id.NANAGRPID, ft.id.ANAGRPMAX = nvme.CMICANA, 2, 2
		state := func(s nvme.ANAState) {
			ft.ana = nvme.ANALog{ChangeCount: 1, Groups: []nvme.ANAGroup{{ID: 1, State: s, NSIDs: []uint32{1}}}}
		}
		state(nvme.ANAInaccessible)
		ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
			ft.mu.Lock()
			bad := ft.ana.Groups[0].State == nvme.ANAInaccessible
			ft.mu.Unlock()
			if isIO(q, r) && bad {
				answer(q, r, 0, nvme.StatusANAInaccessible)
				return true
			}
			return false
		}
		cfg := testConfig(ft)
		cfg.FastIOFail = 20 * time.Second
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		if n.ANAState() != nvme.ANAInaccessible {
			t.Error(n.ANAState())
		}
		b := lease(t, n, 4096)
		begin := time.Now()
		end := start(n, blockdev.Write, 0, b)
		time.Sleep(7300 * time.Millisecond)
		ft.change(func() { state(nvme.ANAOptimized) })
		ft.live().event(nvme.EventANAChanged)
		if o := <-end; o.err != nil || o.at.Sub(begin) != 7300*time.Millisecond {
			t.Error(o.err, o.at.Sub(begin))
		}
		if n.ANAState() != nvme.ANAOptimized {
			t.Error(n.ANAState())
		}
		ft.change(func() { state(nvme.ANAInaccessible) })
		begin = time.Now()
		if o := <-start(n, blockdev.Write, 0, b); !errors.Is(o.err, blockdev.ErrLost) || o.at.Sub(begin) > 21*time.Second {
			t.Error(o.err, o.at.Sub(begin))
		}
		if c.Info().Resets != 0 {
			t.Error("reset")
		}
	})
}

// As long as the ANA log cannot be read, what it said last stands, and the log says it once.
func TestANALogFails(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.id.CMIC, ft.id.NANAGRPID, ft.id.ANAGRPMAX = nvme.CMICANA, 1, 1
		ft.ana = nvme.ANALog{ChangeCount: 1, Groups: []nvme.ANAGroup{{ID: 1, State: nvme.ANANonOptimized, NSIDs: []uint32{1}}}}
		var log strings.Builder
		cfg := testConfig(ft)
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		for round := range 2 {
			ft.change(func() {
				ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
					cmd := (*nvme.Command)(&r.Command)
					if q.params.ID != 0 || cmd.Opcode() != nvme.AdminGetLogPage || cmd.LogID() != nvme.LogANA {
						return false
					}
					answer(q, r, 0, nvme.StatusInternalError)
					return true
				}
			})
			ft.live().event(nvme.EventANAChanged)
			time.Sleep(time.Hour)
			if s := n.ANAState(); s != nvme.ANANonOptimized {
				t.Error(s)
			}
			ft.change(func() { ft.intercept = nil })
			time.Sleep(lastLookPause)
			synctest.Wait()
			if w := strings.Count(log.String(), "how the controller reaches"); w != round+1 {
				t.Error(w, "warnings:", log.String())
			}
		}
	})
}

// A controller that reports something without end is heard, but not all the time.
func TestEventStorm(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		const smart = nvme.AsyncEvent(nvme.EventSMART | uint32(nvme.LogSMART)<<16)
		ft.takeLog()
		for range 1000 {
			ft.live().event(smart)
		}
		time.Sleep(time.Second)
		heard := 0
		for _, l := range ft.takeLog() {
			if l == "admin Get Log Page 0x2" {
				heard++
			}
		}
		if heard < 5 || heard > 12 || c.State() != StateLive {
			t.Error(heard, "events heard")
		}
	})
}

func TestAdminCommands(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		page := make([]byte, 20000)
		fill(page, 5)
		ft.change(func() { ft.logs[nvme.LogError] = page })
		buf := make([]byte, 20000)
		var cmd nvme.Command
		cmd.FillGetLogPage(nvme.LogError, nvme.AllNamespaces, 0, 20000, true)
		if _, err := c.Admin(bg, &cmd, buf, transport.ToHost); err != nil || !slices.Equal(buf, page) {
			t.Error(err)
		}
		cmd.FillAbort(1, 1)
		if _, err := c.Admin(bg, &cmd, nil, transport.None); !errors.Is(err, nvme.StatusInvalidOpcode) {
			t.Error(err)
		}
		ft.blackhole()
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		cmd.FillIdentify(nvme.CNSController, 0, 0)
		if _, err := c.Admin(ctx, &cmd, buf[:8000], transport.ToHost); err == nil {
			t.Error("no error")
		}
		ft.cut()
		synctest.Wait()
		if _, err := c.Admin(bg, &cmd, buf[:4096], transport.ToHost); !errors.Is(err, blockdev.ErrLost) {
			t.Error(err)
		}
		if n := c.pool.Leased(); n != 0 || len(c.cmds.free) != adminSlots {
			t.Error(n, "bytes leased", len(c.cmds.free), "slots free")
		}
	})
}
