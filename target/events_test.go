package target_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
)

// event waits for the event that request aer completes with.
func (h *host) event(t *testing.T, aer uint16) nvme.AsyncEvent {
	t.Helper()
	cqe, err := h.admin.await(aer)
	if err != nil || !cqe.Status().OK() {
		t.Fatalf("event: %v, %v", cqe.Status(), err)
	}
	return nvme.AsyncEvent(cqe.Result())
}

func (h *host) enableEvents(bits uint32) {
	h.admin.do(func(c *nvme.Command) { c.FillSetFeatures(nvme.FeatureAsyncEvents, 0, bits) })
}

func TestCaseH34NamespaceEvents(t *testing.T) {
	for name, store := range stores {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, target.Config{}, store.wrap...)
			s := b.subsystem(store.config(t))
			h := connectHost(t, b.addr, subNQN, 1, 32, 0)
			h.enableEvents(nvme.EventsNamespace)

			changed := func(want ...uint32) {
				t.Helper()
				p, err := h.admin.log(nvme.LogChangedNamespaces, 0, 4096)
				if err != nil {
					t.Fatal(err)
				}
				c, _ := nvme.ParseChangedNamespaces(p)
				slices.Sort(c.IDs)
				if !slices.Equal(c.IDs, want) {
					t.Errorf("changed %v, want %v", c.IDs, want)
				}
			}
			aer := h.aer()
			id, err := s.AddNamespace(target.NamespaceConfig{Size: 1 << 20})
			if err != nil || id != 2 {
				t.Fatal(id, err)
			}
			if ev := h.event(t, aer); ev != nvme.EventNamespaceChanged {
				t.Fatal(ev)
			}
			// The next event comes only when the log was read, and covers both changes.
			aer = h.aer()
			if err := s.ResizeNamespace(1, 16<<20); err != nil {
				t.Fatal(err)
			}
			if _, err := h.admin.awaitFor(aer, 20*time.Millisecond); err == nil {
				t.Fatal("an event before the log was read")
			}
			changed(1, 2)
			if ev := h.event(t, aer); ev != nvme.EventNamespaceChanged {
				t.Fatal(ev)
			}
			changed()

			// I/O across the old end, which lies inside the command.
			q := h.io[0]
			want := random(64 << 10)
			at := uint64(8<<20-32<<10) / 512
			if err := q.write(1, at, want, false, false); err != nil {
				t.Fatal(err)
			}
			if err := q.write(1, at+8, want[4096:12288], true, false); err != nil {
				t.Fatal(err)
			}
			if got, err := q.read(1, at, len(want)); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("data over the seam differ, %v", err)
			}
			if err := q.write(2, 0, want[:4096], false, false); err != nil {
				t.Fatalf("new namespace: %v", err)
			}

			// Smaller, and back: what lay beyond is gone.
			for _, size := range []uint64{4096, 16 << 20} {
				if err := s.ResizeNamespace(1, size); err != nil {
					t.Fatal(err)
				}
			}
			if got, err := q.read(1, at, len(want)); err != nil || !bytes.Equal(got, make([]byte, len(want))) {
				t.Errorf("old data after shrinking and growing, %v", err)
			}

			before := h.identity(t, 2)
			if err := s.RemoveNamespace(2); err != nil {
				t.Fatal(err)
			}
			if _, err := q.read(2, 0, 512); !errors.Is(err, nvme.StatusInvalidNamespace) {
				t.Errorf("removed namespace: %v", err)
			}

			// Another one in its place does not pass for it.
			if id, err := s.AddNamespace(target.NamespaceConfig{Size: 4 << 20}); err != nil || id != 2 {
				t.Fatal(id, err)
			}
			if d := h.identity(t, 2); d.UUID == before.UUID || d.NGUID == before.NGUID {
				t.Errorf("another namespace is identified as the one that was removed: %+v", d)
			}
		})
	}
}

// identity is what a host knows a namespace by again.
func (h *host) identity(t *testing.T, nsid uint32) nvme.NamespaceIDs {
	t.Helper()
	p, err := h.admin.identify(nvme.CNSNamespaceDescriptors, nsid)
	d, _ := nvme.ParseNamespaceIDs(p)
	if err != nil || d.UUID.IsZero() || d.NGUID.IsZero() {
		t.Fatalf("%+v, %v", d, err)
	}
	return d
}

// TestCaseH24RestartedTarget: hosts know a file again after a restart, but take neither new memory nor a file made
// anew for what they wrote to.
func TestCaseH24RestartedTarget(t *testing.T) {
	start := func(c target.NamespaceConfig) nvme.NamespaceIDs {
		b := newBed(t, target.Config{})
		b.subsystem(c)
		return connectHost(t, b.addr, subNQN, 0, 0, 0).identity(t, 1)
	}
	memory := target.NamespaceConfig{Size: 1 << 20}
	if a, b := start(memory), start(memory); a.UUID == b.UUID || a.NGUID == b.NGUID {
		t.Errorf("memory passes for what is gone: %+v", b)
	}
	memory.UUID, memory.NGUID = nvme.UUID{1}, nvme.NGUID{2}
	if d := start(memory); d.UUID != memory.UUID || d.NGUID != memory.NGUID {
		t.Errorf("identity %+v is not the one that was given", d)
	}
	file := target.NamespaceConfig{Size: 1 << 20, File: filepath.Join(t.TempDir(), "disk")}
	first := start(file)
	if d := start(file); d != first {
		t.Errorf("a file is not known again: %+v, %+v", d, first)
	}
	if err := os.Remove(file.File); err != nil {
		t.Fatal(err)
	}
	if d := start(file); d.UUID == first.UUID || d.NGUID == first.NGUID {
		t.Errorf("a file that was made anew passes for the old one: %+v", d)
	}
}

func TestANA(t *testing.T) {
	b := newBed(t, target.Config{})
	second := b.listen()
	s := b.subsystem(target.NamespaceConfig{Size: 1 << 20}, target.NamespaceConfig{Size: 1 << 20, ANAGroup: 3})
	h1 := connectHost(t, b.addr, subNQN, 1, 32, 0)
	h2 := connectHost(t, second, subNQN, 1, 32, 0)
	h2.enableEvents(nvme.EventsANA)
	aer := h2.aer()
	if err := s.SetANAState(2, 3, nvme.ANAInaccessible); err != nil {
		t.Fatal(err)
	}
	if ev := h2.event(t, aer); ev != nvme.EventANAChanged {
		t.Fatal(ev)
	}
	p, err := h2.admin.log(nvme.LogANA, 0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	log, err := nvme.ParseANALog(p)
	if err != nil || len(log.Groups) != 2 || log.Groups[0].State != nvme.ANAOptimized ||
		log.Groups[1].State != nvme.ANAInaccessible || !slices.Equal(log.Groups[1].NSIDs, []uint32{2}) {
		t.Errorf("%+v, %v", log, err)
	}
	if _, err := h2.io[0].read(2, 0, 512); !errors.Is(err, nvme.StatusANAInaccessible) {
		t.Errorf("inaccessible: %v", err)
	}
	for _, q := range []*client{h1.io[0], h2.io[0]} {
		if _, err := q.read(1, 0, 512); err != nil {
			t.Error(err)
		}
	}
	if _, err := h1.io[0].read(2, 0, 512); err != nil {
		t.Errorf("the other port: %v", err)
	}
}

func TestKeepAlive(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem(target.NamespaceConfig{Size: 1 << 20})
	const kato = 300 * time.Millisecond
	// alive keeps a host alive for longer than it may be silent. It is false if a busy machine made the host silent.
	alive := func() (*host, bool) {
		h := connectHost(t, b.addr, subNQN, 1, 32, limit)
		begin := time.Now()
		last := begin
		for i := 0; time.Since(begin) < 2*kato; i++ {
			now := time.Now()
			cqe, err := h.admin.try(func(c *nvme.Command) {
				switch i {
				case 0:
					c.FillSetFeatures(nvme.FeatureKeepAlive, 0, 250)
				case 1:
					c.FillGetFeatures(nvme.FeatureKeepAlive, 0)
				default:
					c.FillKeepAlive()
				}
			}, nil)
			if err == nil {
				_, err = h.io[0].read(1, 0, 512)
			}
			switch gap := time.Since(last); {
			case err != nil && gap >= kato:
				t.Logf("the host was silent for %v", gap)
				return nil, false
			case err != nil:
				t.Fatalf("a host that keeps alive: %v", err)
			case i == 1 && cqe.Result() != uint32(kato.Milliseconds()): // rounded up to what KAS says
				t.Errorf("KATO %d ms", cqe.Result())
			case i != 1:
				last = now
			}
		}
		return h, true
	}
	h, ok := alive()
	for !ok {
		h, ok = alive()
	}
	// A silent host loses the whole association.
	start := time.Now()
	for _, q := range []*client{h.admin, h.io[0]} {
		if _, err := q.awaitFor(0xFFFF, limit); !errors.Is(err, errLost) {
			t.Errorf("queue %d of a silent host: %v", q.qid, err)
		}
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("noticed after %v", d)
	}
}

func TestAsyncEventLimitAndAbort(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem()
	h := connectHost(t, b.addr, subNQN, 0, 0, 0)
	var ids []uint16
	for range 4 {
		ids = append(ids, h.aer())
	}
	if cqe, err := h.admin.await(h.aer()); err != nil || cqe.Status().Code() != nvme.StatusAERLimit {
		t.Errorf("fifth request: %v, %v", cqe.Status(), err)
	}
	if cqe := h.admin.do(func(c *nvme.Command) { c.FillAbort(0, ids[1]) }); cqe.Result()&1 != 0 {
		t.Error("not aborted")
	}
	if cqe, err := h.admin.await(ids[1]); err != nil || cqe.Status().Code() != nvme.StatusAbortRequested {
		t.Errorf("aborted request: %v, %v", cqe.Status(), err)
	}
	if cqe := h.admin.do(func(c *nvme.Command) { c.FillAbort(0, ids[1]) }); cqe.Result()&1 != 1 {
		t.Error("aborted twice")
	}
}

func TestControllerResetAndShutdown(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem(target.NamespaceConfig{Size: 1 << 20})
	h := connectHost(t, b.addr, subNQN, 2, 32, 0)
	h.io[0].do(func(c *nvme.Command) { c.FillDisconnect() })
	set := func(cc nvme.Configuration, ok func(nvme.ControllerStatus) bool) {
		t.Helper()
		h.setCC(cc)
		waitFor(t, "the controller's status", func() bool { return ok(h.status()) })
	}
	zero := func(st nvme.ControllerStatus) bool { return st == 0 }
	set(nvme.EnableConfiguration|nvme.ConfigShutdown, nvme.ControllerStatus.ShutdownComplete)
	set(0, zero)
	if _, err := h.io[1].awaitFor(0xFFFF, limit); !errors.Is(err, errLost) {
		t.Errorf("I/O queue after reset: %v", err)
	}
	if _, err := h.admin.identify(nvme.CNSController, 0); !errors.Is(err, nvme.StatusSequenceError) {
		t.Errorf("Identify before enable: %v", err)
	}
	set(nvme.EnableConfiguration, nvme.ControllerStatus.Ready)
	set(0, zero)
	set(nvme.ConfigEnable|5<<16|4<<20, nvme.ControllerStatus.Fatal) // entries of 32 bytes
}

func (h *host) setCC(cc nvme.Configuration) {
	h.admin.do(func(c *nvme.Command) { c.FillPropertySet(nvme.PropertyCC, uint64(cc)) })
}

func (h *host) status() nvme.ControllerStatus {
	cqe := h.admin.do(func(c *nvme.Command) { c.FillPropertyGet(nvme.PropertyCSTS) })
	return nvme.ControllerStatus(cqe.Result())
}

// TestManyHosts connects and vanishes, with commands under way, and checks that
// nothing of it stays.
func TestManyHosts(t *testing.T) {
	b := newBed(t, target.Config{MaxQueues: 6})
	s := b.subsystem(target.NamespaceConfig{Size: 8 << 20}, target.NamespaceConfig{Size: 8 << 20, File: filepath.Join(t.TempDir(), "disk")})
	for range 10 {
		h1 := connectHost(t, b.addr, subNQN, 2, 64, 0)
		h2 := connectHost(t, b.addr, subNQN, 2, 64, 0)
		_, err := dial(t, b.addr, 0, 32)
		var rej *verbs.RejectError
		if !errors.As(err, &rej) || rej.PrivateData[2] != byte(nvme.RejectNoResources) {
			t.Fatalf("seventh queue: %v", err)
		}
		for _, h := range []*host{h1, h2} {
			for _, q := range h.io {
				for i := range 63 {
					_, sgl := q.data(0, 32<<10)
					var c nvme.Command
					if c.FillWrite(uint32(i%2+1), 0, 64, false); i%3 == 0 {
						c.FillRead(uint32(i%2+1), 0, 64)
					}
					c.SetSGL(sgl)
					q.send(c, nil)
				}
				q.close()
			}
			h.admin.close()
		}
		waitFor(t, "room for new hosts", func() bool { return b.target.Admitted() == 0 })
		if n := s.Stats().Queues; n != 0 {
			t.Errorf("%d queues of hosts that are gone", n)
		}
	}
	if err := b.target.RemoveSubsystem(subNQN); err != nil {
		t.Error(err)
	}
}

func TestCaseH06SilentConnection(t *testing.T) {
	t.Parallel()
	b := newBed(t, target.Config{ConnectTimeout: time.Second}) // which also bounds how long dial may take
	b.subsystem()
	c, err := dial(t, b.addr, 0, 32)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.awaitFor(0xFFFF, limit); !errors.Is(err, errLost) {
		t.Errorf("a connection without Connect: %v", err)
	}
}
