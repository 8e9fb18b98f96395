package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"farblk/host"
	"farblk/transport"
)

// Options is what a session is given beside its Config.
type Options struct {
	Dialer transport.Dialer
	Logger *slog.Logger
	// NewExporter opens one way to export; nil for one that exports nothing.
	NewExporter func(ExportSpec, Surroundings) (Exporter, error)
	// Ready is called once, when the devices can be used. Its error ends the session.
	Ready func(*Result) error
}

// session is the process's one connection.
//
// Lock: mu guards ctrl, ways, exports, notes and failure, and is held over nothing that blocks. Only Run's own
// goroutine changes them.
type session struct {
	folder *Folder
	config *Config
	log    *slog.Logger

	mu      sync.Mutex
	ctrl    *host.Controller // nil until connected
	ways    []Exporter
	exports map[*host.Namespace][]shown
	notes   []string
	failure error // why the controller is dead

	cut      map[*host.Namespace]bool // not exported in all ways because the time was over; Run's own
	recorded []Leftover               // as in exports.json

	changed     chan struct{} // namespaces or state
	asks        chan ask
	cancelStart context.CancelFunc
	started     chan struct{} // closed when the start is over, just before others are told
	ended       chan struct{} // closed when everything is undone
}

// Run connects, exports and serves until ctx ends or somebody asks to disconnect; then it undoes all that and
// removes the folder, in a few seconds at most. It does the same when the start fails, and returns why. What it cannot
// undo it leaves to the next command that looks, with the folder.
func Run(ctx context.Context, f *Folder, c *Config, o Options) error {
	startCtx, cancelStart := context.WithCancel(ctx)
	defer cancelStart()
	s := &session{
		folder: f, config: c, log: o.Logger,
		exports: map[*host.Namespace][]shown{}, changed: make(chan struct{}, 1), asks: make(chan ask),
		cancelStart: cancelStart, started: make(chan struct{}), ended: make(chan struct{}),
	}
	f.keep = len(c.TakeOver) > 0 // until it is served again
	defer s.leave()
	l, err := f.listen()
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second}
	served := make(chan struct{})
	go func() {
		_ = srv.Serve(l)
		close(served)
	}()
	defer func() {
		close(s.ended)
		quick, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		if srv.Shutdown(quick) != nil { // lets answers go out
			_ = srv.Close()
		}
		<-served
	}()

	err = s.start(startCtx, &o)
	if err == nil {
		err = ctx.Err()
	}
	if startCtx.Err() != nil && ctx.Err() == nil { // askDisconnect
		err = errors.New("told to disconnect while it was connecting")
	}
	close(s.started)
	if err == nil { // from here on, being told to end is no failure
		err = o.Ready(s.result())
	}
	if err != nil && f.keep {
		return err // the process ends: the devices wait for the next one, no request of theirs may fail
	}
	if err != nil {
		s.end()
		return err
	}
	s.log.Info("connected", "subsystem", c.Subsystem, "address", c.Address().String(), "provider", c.Provider)
	s.serve(ctx)
	return nil
}

// start connects and exports. What it has made when it fails, stop undoes.
func (s *session) start(ctx context.Context, o *Options) error {
	c := s.config
	if needsHardening(c.Exports) {
		defer hardenMemory(s.log) // when everything is allocated
	}
	h := c.Host(o.Dialer, s.log)
	h.ShutdownTimeout = shutdownLimit - 300*time.Millisecond // the rest is for taking apart
	h.OnEvent = func(host.Event) {
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
	if c.HoldWrites > 0 {
		s.note(fmt.Sprintf("writes wait for %v at first: the target may still execute what an earlier connection had sent", c.HoldWrites.Round(time.Second)))
	}
	ctrl, err := host.Connect(ctx, h)
	if err != nil {
		return c.Explain(err)
	}
	s.mu.Lock()
	s.ctrl = ctrl
	s.mu.Unlock()
	if err := s.noteGrace(); err != nil {
		return err
	}
	for _, spec := range c.Exports {
		w, err := o.NewExporter(spec, Surroundings{
			Folder: s.folder.Path, Config: c, Log: s.log, Note: s.note, Record: s.record,
			TakeOver: c.TakeOver,
		})
		if err != nil {
			return err
		}
		if w == nil {
			continue
		}
		s.mu.Lock()
		s.ways = append(s.ways, w)
		s.mu.Unlock()
	}
	if err := s.follow(ctx); err != nil {
		return err
	}
	for _, l := range c.TakeOver {
		if !slices.ContainsFunc(s.ways, func(w Exporter) bool { return slices.Contains(w.Leftovers(), l) }) {
			return fmt.Errorf("%s of the connection that died is in use and would not be served: export as before, or 'farblk disconnect --force %s'", l.Path, c.Name)
		}
	}
	s.folder.keep = false
	return nil
}

// noteGrace writes down how long the controller may go on with what is sent from now on, should this process die.
func (s *session) noteGrace() error {
	grace := s.ctrl.Grace()
	s.mu.Lock()
	same := s.config.Grace == grace
	s.config.Grace = grace
	c := *s.config
	s.mu.Unlock()
	if same {
		return nil
	}
	if err := writeJSON(s.folder.file("config.json"), &c); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	return nil
}

// serve follows events until it is time to end, and ends the connection.
func (s *session) serve(ctx context.Context) {
	dead := s.ctrl.Done()
	for {
		select {
		case <-ctx.Done():
			s.log.Info("told to end")
			s.end()
			return
		case a := <-s.asks:
			err := s.disconnect(a.force)
			if err != nil && !a.force {
				s.log.Info("not disconnected", "reason", err)
				a.reply <- err
				continue
			}
			a.reply <- err
			return
		case <-s.changed:
			if err := s.noteGrace(); err != nil {
				s.log.Error("cannot note for how long the target may go on after a crash", "error", err)
			}
			limited, cancel := context.WithTimeout(ctx, exportLimit)
			if err := s.follow(limited); err != nil {
				s.log.Error("a namespace has changed and cannot be exported", "error", err)
			}
			over := limited.Err() != nil
			cancel()
			if over && len(s.cut) > 0 { // nothing else would ask for it
				select {
				case s.changed <- struct{}{}:
				default:
				}
			}
		case <-dead:
			dead = nil
			s.mu.Lock()
			s.failure = s.ctrl.Err()
			s.mu.Unlock()
			s.log.Error("the controller is lost: I/O fails until this connection is disconnected", "cause", s.ctrl.Err())
		}
	}
}

func (s *session) controller() *host.Controller {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ctrl
}

func (s *session) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.notes, text) {
		s.notes = append(s.notes, text)
	}
}

// result describes the connection as it is now.
func (s *session) result() *Result {
	st := s.status()
	r := &Result{
		Name: st.Name, Subsystem: st.Config.Subsystem, Transport: "rdma", Provider: st.Config.Provider,
		Device: st.Device, Address: st.Address, Namespaces: []Namespace{},
	}
	for _, n := range st.Namespaces {
		r.Namespaces = append(r.Namespaces, n.Namespace)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Notes = slices.Concat(s.config.Notes, s.notes)
	return r
}

// status is the answer to GET /status.
func (s *session) status() *Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &Status{
		Name: s.config.Name, PID: os.Getpid(), State: "connecting", Config: *s.config,
		Address: s.config.Address().String(), Namespaces: []NamespaceStatus{},
	}
	if s.ctrl == nil {
		return st
	}
	st.State = s.ctrl.State().String()
	if err := s.ctrl.Err(); err != nil && st.State != host.StateLive.String() {
		st.Error = err.Error()
	}
	info := s.ctrl.Info()
	st.Device, st.ControllerID = info.Device, info.CNTLID
	st.Model, st.Serial, st.Firmware = info.Model, info.Serial, info.Firmware
	st.IOQueues, st.QueueSize, st.MaxTransfer = info.IOQueues, info.QueueSize, info.MaxTransfer
	for _, n := range s.ctrl.Namespaces() {
		i := n.Info()
		ns := NamespaceStatus{
			Namespace: Namespace{NSID: n.NSID(), Size: i.Size, BlockSize: i.BlockSize, Exports: []Export{}},
			Used:      n.Usage(), ReadOnly: i.ReadOnly,
		}
		if err := n.Err(); err != nil {
			ns.Error = err.Error()
		}
		if a := n.ANAState(); a != 0 {
			ns.ANA = a.String()
		}
		ids := n.IDs()
		if !ids.EUI64.IsZero() {
			ns.EUI64 = ids.EUI64.String()
		}
		if !ids.NGUID.IsZero() {
			ns.NGUID = ids.NGUID.String()
		}
		if !ids.UUID.IsZero() {
			ns.UUID = ids.UUID.String()
		}
		for _, e := range s.exports[n] {
			ns.Exports = append(ns.Exports, e.export)
		}
		st.Namespaces = append(st.Namespaces, ns)
	}
	counters := s.ctrl.Counters()
	st.Counters = &counters
	return st
}
