package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"farblk/host"
	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/rdma"
	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

// recorder is an Exporter that exports nothing and writes down what it was asked for. Of adds, it fails those whose
// namespace IDs are in bad, and while stuck all removals.
type recorder struct {
	asked []string
	bad   []uint32
	stuck bool
}

func (r *recorder) Add(ctx context.Context, n *host.Namespace) (Export, error) {
	if ctx.Err() != nil {
		return Export{}, ctx.Err()
	}
	r.asked = append(r.asked, fmt.Sprintf("add %d of %d", n.NSID(), n.Info().Size))
	if slices.Contains(r.bad, n.NSID()) {
		return Export{}, errors.New("bad")
	}
	return Export{Kind: KindFUSE, Path: fmt.Sprintf("/n%d", n.NSID())}, nil
}

func (r *recorder) Remove(_ context.Context, n *host.Namespace) error {
	r.asked = append(r.asked, fmt.Sprintf("remove %d", n.NSID()))
	if r.stuck {
		return errors.New("stuck")
	}
	return nil
}
func (r *recorder) Has(*host.Namespace) bool          { return true }
func (r *recorder) InUse() error                      { return nil }
func (r *recorder) Leftovers() []Leftover             { return nil }
func (r *recorder) Close(context.Context, bool) error { return nil }

// The exports follow the namespaces, also where another one has come under the ID of one that went before anybody
// looked.
func TestExportsFollowNamespaces(t *testing.T) {
	tg, err := target.New(target.Config{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := iwarp.New(iwarp.Options{}).Listen(t.Context(), verbs.Addr{IP: netip.MustParseAddr("127.0.0.1")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- tg.Serve(context.Background(), l) }()
	defer func() {
		if err := errors.Join(tg.Close(), <-served); err != nil {
			t.Error(err)
		}
	}()
	sub, err := tg.AddSubsystem(target.SubsystemConfig{NQN: "nqn.2024-01.org.example:t"})
	if err != nil {
		t.Fatal(err)
	}
	add := func(id uint32, size uint64) {
		if _, err := sub.AddNamespace(target.NamespaceConfig{ID: id, Size: size}); err != nil {
			t.Fatal(err)
		}
	}
	add(1, 1<<20)

	c := config()
	c.Remote, c.Port, c.Subsystem = l.Addr().IP, l.Addr().Port, sub.NQN()
	c.HostNQN = nvme.HostNQN(c.HostID)
	changed := make(chan host.Event, 100)
	h := c.Host(rdma.NewDialer(iwarp.New(iwarp.Options{}), rdma.Options{}), slog.New(slog.DiscardHandler))
	h.OnEvent = func(e host.Event) { changed <- e }
	ctrl, err := host.Connect(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := ctrl.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	happens := func(want host.EventKind) {
		for timeout := time.After(10 * time.Second); ; {
			select {
			case e := <-changed:
				if e.Kind == want {
					return
				}
			case <-timeout:
				t.Fatal("never: ", want)
			}
		}
	}

	r := &recorder{bad: []uint32{2}}
	s := &session{
		folder: &Folder{Path: t.TempDir()}, config: c, log: slog.New(slog.DiscardHandler), ctrl: ctrl, ways: []Exporter{r},
		exports: map[*host.Namespace][]shown{},
	}
	follow := func(fails bool, want ...string) {
		t.Helper()
		r.asked = nil
		if err := s.follow(t.Context()); (err != nil) != fails || !slices.Equal(r.asked, want) {
			t.Errorf("%v: %q, want %q", err, r.asked, want)
		}
	}
	follow(false, "add 1 of 1048576")
	follow(false)
	if err := sub.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	happens(host.EventNamespaceRemoved)
	add(1, 2<<20)
	happens(host.EventNamespaceAdded)
	follow(false, "remove 1", "add 1 of 2097152")
	if st := s.status(); len(st.Namespaces) != 1 || !slices.Equal(st.Namespaces[0].Exports, []Export{{Kind: KindFUSE, Path: "/n1"}}) {
		t.Errorf("%+v", st.Namespaces)
	}
	add(2, 1<<20)
	happens(host.EventNamespaceAdded)
	follow(true, "add 2 of 1048576")
	follow(false)
	add(3, 1<<20)
	happens(host.EventNamespaceAdded)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.follow(over); err == nil {
		t.Error("exported in no time")
	}
	follow(false, "add 3 of 1048576") // the time was over: tried again
	follow(false)
	if err := sub.RemoveNamespace(3); err != nil {
		t.Fatal(err)
	}
	happens(host.EventNamespaceRemoved)
	follow(false, "remove 3")
	if err := sub.RemoveNamespace(2); err != nil { // which was never exported
		t.Fatal(err)
	}
	happens(host.EventNamespaceRemoved)
	follow(false)
	if err := sub.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	happens(host.EventNamespaceRemoved)
	r.stuck = true
	follow(true, "remove 1")
	r.stuck = false
	follow(false, "remove 1") // tried again
	follow(false)
}
