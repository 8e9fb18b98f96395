package session

import (
	"net/http"
	"testing"
	"time"
)

// answering stands for a session's process: it answers GET /status with st, or never if st is nil.
func answering(t *testing.T, f *Folder, st *Status) {
	t.Helper()
	l, err := f.listen()
	if err != nil {
		t.Fatal(err)
	}
	end, served := make(chan struct{}), make(chan struct{})
	srv := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if st == nil {
			<-end
			return
		}
		reply(w, http.StatusOK, st)
	})}
	go func() {
		_ = srv.Serve(l)
		close(served)
	}()
	t.Cleanup(func() {
		close(end)
		_ = srv.Close()
		<-served
		f.Remove()
	})
}

// List shows one controller that resets, one that cannot be asked, and one that is well, in bounded time.
func TestCaseH15ListWhileResetting(t *testing.T) {
	t.Parallel() // it waits for StatusTimeout
	d, _ := stateDir(t, nil)
	for _, st := range []*Status{{State: "resetting", Error: "connection lost"}, nil, {State: "live"}} {
		c := config()
		f := create(t, d, c, true)
		if st != nil {
			st.Name = c.Name
		}
		answering(t, f, st)
	}
	begin := time.Now()
	all, err := d.List()
	if took := time.Since(begin); err != nil || len(all) != 3 || took > StatusTimeout+2*time.Second {
		t.Fatalf("%+v, %v after %v", all, err, took)
	}
	for i, want := range []string{"resetting", Unresponsive, "live"} {
		if all[i].State != want || want != "live" && all[i].Error == "" {
			t.Errorf("%s: %s (%s), want %s", all[i].Name, all[i].State, all[i].Error, want)
		}
	}
}

// A connection can be named by whatever of it a user has before the eyes.
func TestCaseH16NamesOfAConnection(t *testing.T) {
	d, _ := stateDir(t, nil)
	c := config()
	f := create(t, d, c, false)
	answering(t, f, &Status{Name: c.Name, Config: *c, State: "live", Namespaces: []NamespaceStatus{
		{Namespace: Namespace{NSID: 3, Exports: []Export{
			{Kind: KindNBD, Path: "/dev/nbd7"},
			{Kind: KindFUSE, Path: "/mnt/files/n3"},
			{Kind: KindFUSE, Path: "/mnt/one"},
			{Kind: KindNBDUnix, Path: "/run/x.sock", URI: "nbd+unix:///n3?socket=/run/x.sock"},
		}}},
	}})
	for _, what := range []string{
		"farblk0", "farblk0n3", "nqn.a", "/dev/nbd7", "/dev/../dev/nbd7", "/mnt/files/n3", "/mnt/files", "/mnt/one", "/run/x.sock",
		"nbd+unix:///n3?socket=/run/x.sock",
	} {
		if found, err := d.Find(what); err != nil || len(found) != 1 || found[0].Name != "farblk0" {
			t.Errorf("%s: %+v, %v", what, found, err)
		}
	}
	for _, what := range []string{"farblk1", "farblk0n1", "nqn.b", "/dev/nbd0", "/dev/nbd70", "/mnt/files/n1", "/"} {
		if found, err := d.Find(what); err != nil || len(found) != 0 {
			t.Errorf("%s: %+v, %v", what, found, err)
		}
	}
}

// A session that is just starting has no socket yet.
func TestListWaitsForTheSocket(t *testing.T) {
	d, _ := stateDir(t, nil)
	f := create(t, d, config(), false)
	listening := make(chan struct{})
	time.AfterFunc(50*time.Millisecond, func() {
		answering(t, f, &Status{Name: "farblk0", State: "live"})
		close(listening)
	})
	all, err := d.List()
	<-listening
	if err != nil || len(all) != 1 || all[0].State != "live" {
		t.Errorf("%+v, %v", all, err)
	}
}
