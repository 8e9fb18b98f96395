package session

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/host"
	"farblk/host/nvme"
	"farblk/target"
	"farblk/target/misbehave"
	"farblk/transport/rdma"
	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

// These tests run whole sessions, on the loopback over software iWARP, with an exporter of their own.

// fakeExporter exports nothing, and ends as its test wants.
type fakeExporter struct {
	added   chan *host.Namespace
	onClose func(force bool) error

	mu     sync.Mutex
	has    map[*host.Namespace]bool
	closes []bool // force of each Close
}

func (e *fakeExporter) Add(_ context.Context, n *host.Namespace) (Export, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.has[n] = true
	e.added <- n
	return Export{Kind: KindNBD, Path: "/dev/fake"}, nil
}

func (e *fakeExporter) Has(n *host.Namespace) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.has[n]
}

func (e *fakeExporter) Remove(_ context.Context, n *host.Namespace) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.has, n)
	return nil
}

func (e *fakeExporter) InUse() error { return nil }

func (e *fakeExporter) Leftovers() (all []Leftover) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for n := range e.has {
		all = append(all, Leftover{Kind: KindNBD, Path: "/dev/fake", NSID: n.NSID()})
	}
	return all
}

func (e *fakeExporter) Close(_ context.Context, force bool) error {
	e.mu.Lock()
	e.closes = append(e.closes, force)
	e.mu.Unlock()
	if e.onClose != nil {
		if err := e.onClose(force); err != nil {
			return err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.has)
	return nil
}

// running is a session that runs, and its target.
type running struct {
	*Folder
	target *target.Target
	script *misbehave.Script
	sub    *target.Subsystem
	ended  chan error
	stop   context.CancelFunc
}

// runSession starts a target that misbehaves as script says, and a session of it in d.
func runSession(t *testing.T, d *StateDir, script string, e *fakeExporter) *running {
	t.Helper()
	rules, err := misbehave.Parse(script)
	if err != nil {
		t.Fatal(err)
	}
	tg, err := target.New(target.Config{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := iwarp.New(iwarp.Options{}).Listen(t.Context(), verbs.Addr{IP: netip.MustParseAddr("127.0.0.1")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().Port
	var served sync.WaitGroup
	served.Go(func() { _ = tg.Serve(context.Background(), misbehave.Wrap(l, rules)) })
	t.Cleanup(func() {
		if err := tg.Close(); err != nil {
			t.Error(err)
		}
		served.Wait()
	})
	r := &running{target: tg, script: rules, ended: make(chan error, 1)}
	if r.sub, err = tg.AddSubsystem(target.SubsystemConfig{NQN: "nqn.2024-01.org.example:run"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.sub.AddNamespace(target.NamespaceConfig{Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	c := config()
	c.Subsystem, c.HostNQN = r.sub.NQN(), nvme.HostNQN(c.HostID)
	c.Remote, c.Port, c.NrIOQueues, c.PoolSize = netip.MustParseAddr("127.0.0.1"), port, 1, 8<<20
	c.Exports = []ExportSpec{{Kind: KindNone}}
	r.Folder = create(t, d, c, false)
	if err := r.Own(); err != nil {
		t.Fatal(err)
	}
	e.has, e.added = map[*host.Namespace]bool{}, make(chan *host.Namespace, 1)
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	ready := make(chan struct{})
	go func() {
		r.ended <- Run(ctx, r.Folder, c, Options{
			Dialer: rdma.NewDialer(iwarp.New(iwarp.Options{}), rdma.Options{}), Logger: slog.New(slog.DiscardHandler),
			NewExporter: func(ExportSpec, Surroundings) (Exporter, error) { return e, nil },
			Ready:       func(*Result) error { close(ready); return nil },
		})
	}()
	t.Cleanup(stop)
	select {
	case <-ready:
	case err := <-r.ended:
		t.Fatal(err)
	}
	return r
}

// disconnect asks as the command does.
func (r *running) disconnect(t *testing.T, force bool) error {
	t.Helper()
	return askToDisconnect(t.Context(), r.Path, force)
}

// wait waits for the end of Run, which is to be well.
func (r *running) wait(t *testing.T) {
	t.Helper()
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
}

// A write is under way when the connection is lost; the user disconnects and connects again, on another path. What is
// written then must wait for the old write, as it would have within one session.
func TestCaseH25DisconnectRemembersOldWrites(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(r *running) error{
		"forced": func(r *running) error { return r.disconnect(t, true) },
		"told":   func(r *running) error { r.stop(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := stateDir(t, nil)
			e := new(fakeExporter)
			r := runSession(t, d, "on write ignore", e)
			n := <-e.added
			b := n.Pool().TryLease(4096)
			done := make(chan struct{})
			q := n.Queue(0)
			q.Submit(&blockdev.Request{Op: blockdev.Write, Data: b, Done: func(*blockdev.Request) { n.Pool().Release(b); close(done) }})
			q.Kick()
			for r.script.Fired(1) == 0 {
				time.Sleep(time.Millisecond)
			}
			r.target.DropConnections()
			if err := end(r); err != nil {
				t.Error(err)
			}
			<-done
			r.wait(t)
			if _, err := os.Stat(r.Path); err == nil {
				t.Error("the folder is still there")
			}
			c := config()
			c.Subsystem = r.sub.NQN()
			create(t, d, c, false).Remove()
			if c.HoldWrites <= 0 { // less than it was by what this machine took
				t.Errorf("writes are held for %v", c.HoldWrites)
			}
		})
	}
}

// Without anything under way nothing has to wait.
func TestOrderlyEndHoldsNothing(t *testing.T) {
	t.Parallel()
	d, _ := stateDir(t, nil)
	r := runSession(t, d, "", new(fakeExporter))
	if err := r.disconnect(t, false); err != nil {
		t.Error(err)
	}
	r.wait(t)
	if _, err := os.Stat(d.crashFile()); err == nil {
		t.Error("there is a note")
	}
}

// What came into use a moment ago, or is not done in time, is not taken away by a disconnect that was not forced: it
// says so and the session goes on. Whoever tells the process to end gets it ended.
func TestDisconnectDoesNotForce(t *testing.T) { // not parallel: it depends on answers in time
	busy := error(&BusyError{Detail: "/dev/fake is in use"})
	for name, tt := range map[string]struct {
		err  error
		want func(error) bool
	}{
		"in use":     {busy, func(err error) bool { var b *BusyError; return errors.As(err, &b) }},
		"unfinished": {context.DeadlineExceeded, func(err error) bool { var u *UnfinishedError; return errors.As(err, &u) }},
		"failed":     {errors.New("cannot be synced"), func(err error) bool { var u *UnfinishedError; return errors.As(err, &u) }},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := stateDir(t, nil)
			e := &fakeExporter{onClose: func(force bool) error {
				if force {
					return nil
				}
				return tt.err
			}}
			r := runSession(t, d, "", e)
			if err := d.Disconnect(t.Context(), "farblk0", false); !tt.want(err) {
				t.Errorf("%v", err)
			}
			all, err := d.List()
			if err != nil || len(all) != 1 || all[0].State != "live" || len(all[0].Namespaces) != 1 || len(all[0].Namespaces[0].Exports) != 1 {
				t.Errorf("%+v, %v", all, err)
			}
			r.stop()
			r.wait(t)
			if len(e.closes) != 3 || e.closes[0] || e.closes[1] || !e.closes[2] {
				t.Errorf("closed with force %v", e.closes)
			}
		})
	}
}

// While the target is away, what waits for it is not lost to a disconnect that was not forced.
func TestDisconnectWhileTheTargetIsAway(t *testing.T) {
	t.Parallel()
	d, _ := stateDir(t, nil)
	e := &fakeExporter{onClose: func(force bool) error {
		if force {
			return nil
		}
		return errors.New("/dev/fake cannot be synced")
	}}
	r := runSession(t, d, "on write ignore", e)
	n := <-e.added
	b := n.Pool().TryLease(4096)
	done := make(chan error, 1)
	q := n.Queue(0)
	q.Submit(&blockdev.Request{Op: blockdev.Write, Data: b, Done: func(r *blockdev.Request) { n.Pool().Release(b); done <- r.Err }})
	q.Kick()
	for r.script.Fired(1) == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := r.target.Close(); err != nil {
		t.Error(err)
	}
	for state := "live"; state == "live"; {
		all, err := d.List()
		if err != nil || len(all) != 1 {
			t.Fatalf("%+v, %v", all, err)
		}
		state = all[0].State
	}
	var unfinished *UnfinishedError
	if err := r.disconnect(t, false); !errors.As(err, &unfinished) || !strings.Contains(err.Error(), "away") {
		t.Error(err)
	}
	select {
	case err := <-done:
		t.Error("the write has ended:", err)
	default:
	}
	if err := r.disconnect(t, true); err != nil {
		t.Error(err)
	}
	if err := <-done; err == nil {
		t.Error("the write was done")
	}
	r.wait(t)
}

// What even force could not remove is still known to the next command.
func TestCaseE17NotRemoved(t *testing.T) {
	t.Parallel()
	d, asked := stateDir(t, nil)
	e := &fakeExporter{onClose: func(bool) error { return errors.New("the kernel does not answer") }}
	r := runSession(t, d, "", e)
	if err := r.disconnect(t, true); err == nil {
		t.Error("no error")
	}
	r.wait(t)
	if left := readLeftovers(r.Path); len(left) != 1 || left[0].Path != "/dev/fake" {
		t.Errorf("%+v", left)
	}
	if err := d.Disconnect(t.Context(), "farblk0", true); err != nil || asked["/dev/fake"] != 1 {
		t.Error(err, asked)
	}
}

// The time after a crash is what the controller granted, which can be more than it was asked for.
func TestGraceIsAsGranted(t *testing.T) {
	t.Parallel()
	d, _ := stateDir(t, nil)
	r := runSession(t, d, "on get-features feature=15 result 120000", new(fakeExporter))
	c, err := readConfig(r.Path)
	if err != nil || c.grace() < 2*time.Minute {
		t.Errorf("%v, %v", c.grace(), err)
	}
	r.stop()
	r.wait(t)
}
