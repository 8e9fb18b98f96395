package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"farblk/host"
	"farblk/transport"
)

// The parts of a disconnect, each bounded; together they stay below the five seconds that a user waits at most.
const (
	exportLimit     = 2 * time.Second
	shutdownLimit   = 1500 * time.Millisecond
	disconnectLimit = 4500 * time.Millisecond
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
	exports map[uint32]exported // by namespace ID
	notes   []string
	failure error // why the controller is dead

	recorded []Leftover // as in exports.json

	changed     chan struct{} // namespaces or state
	asks        chan ask
	cancelStart context.CancelFunc
	started     chan struct{} // closed when the start is over
	ended       chan struct{} // closed when everything is undone
}

// exported is a namespace and what it is exported as.
type exported struct {
	of *host.Namespace
	as []Export
}

// ask is somebody's wish to disconnect.
type ask struct {
	force bool
	reply chan<- error
}

// Run connects, exports and serves until ctx ends or somebody asks to disconnect; then it undoes all that and
// removes the folder, in a few seconds at most. It does the same when the start fails, and returns why.
func Run(ctx context.Context, f *Folder, c *Config, o Options) error {
	startCtx, cancelStart := context.WithCancel(ctx)
	defer cancelStart()
	s := &session{
		folder: f, config: c, log: o.Logger,
		exports: map[uint32]exported{}, changed: make(chan struct{}, 1), asks: make(chan ask),
		cancelStart: cancelStart, started: make(chan struct{}), ended: make(chan struct{}),
	}
	f.keep = len(c.TakeOver) > 0 // until it is served again
	defer f.Remove()
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
	if err == nil { // from here on, being told to end is no failure
		err = o.Ready(s.result())
	}
	if startCtx.Err() != nil && ctx.Err() == nil { // askDisconnect
		err = errors.New("told to disconnect while it was connecting")
	}
	close(s.started)
	if err != nil && f.keep {
		return err // the process ends: the devices wait for the next one, no request of theirs may fail
	}
	if err != nil {
		s.stop(false)
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
	h.ShutdownTimeout = shutdownLimit
	h.OnEvent = func(host.Event) {
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
	if c.HoldWrites > 0 {
		s.note(fmt.Sprintf("writes wait for %v at first: the target may still execute what a session that died had sent", c.HoldWrites.Round(time.Second)))
	}
	ctrl, err := host.Connect(ctx, h)
	if err != nil {
		return c.Explain(err)
	}
	s.mu.Lock()
	s.ctrl = ctrl
	s.mu.Unlock()
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

// follow makes the exports those of the namespaces that there are now. A namespace that cannot be exported is an
// error, but does not keep the others from it.
func (s *session) follow(ctx context.Context) error {
	now := map[uint32]*host.Namespace{}
	all := s.ctrl.Namespaces()
	for _, n := range all {
		now[n.NSID()] = n
	}
	s.mu.Lock()
	before := maps.Clone(s.exports)
	s.mu.Unlock()
	for id, e := range before {
		if now[id] == e.of {
			continue
		}
		// It has gone. Another one may have come under its ID.
		for _, w := range s.ways {
			w.Remove(ctx, id)
		}
		s.mu.Lock()
		delete(s.exports, id)
		s.mu.Unlock()
	}
	var errs []error
	for _, n := range all {
		id := n.NSID()
		if before[id].of == n {
			continue
		}
		if err := n.Err(); err != nil {
			errs = append(errs, fmt.Errorf("namespace %d cannot be used: %w", id, err))
			continue
		}
		list := []Export{}
		for _, w := range s.ways {
			e, err := w.Add(ctx, n)
			if err != nil {
				errs = append(errs, fmt.Errorf("namespace %d: %w", id, err))
				continue
			}
			list = append(list, e)
		}
		s.mu.Lock()
		s.exports[id] = exported{n, list}
		s.mu.Unlock()
	}
	s.record()
	return errors.Join(errs...)
}

// record writes down what is to be undone if this process dies.
func (s *session) record() {
	var all []Leftover
	for _, w := range s.ways {
		all = append(all, w.Leftovers()...)
	}
	if s.folder.keep { // not served again yet
		for _, l := range s.config.TakeOver {
			if !slices.Contains(all, l) {
				all = append(all, l)
			}
		}
	}
	if slices.Equal(all, s.recorded) {
		return
	}
	if err := writeJSON(s.folder.file("exports.json"), all); err != nil {
		s.log.Warn("cannot note the exports", "error", err)
		return
	}
	s.recorded = all
}

// serve follows events until it is time to end, and ends the connection.
func (s *session) serve(ctx context.Context) {
	dead := s.ctrl.Done()
	for {
		select {
		case <-ctx.Done():
			s.log.Info("told to end")
			s.stop(true)
			return
		case a := <-s.asks:
			if !a.force {
				if err := s.inUse(); err != nil {
					a.reply <- err
					continue
				}
			}
			s.log.Info("disconnecting", "force", a.force)
			s.stop(a.force)
			a.reply <- nil
			return
		case <-s.changed:
			limited, cancel := context.WithTimeout(ctx, exportLimit)
			if err := s.follow(limited); err != nil {
				s.log.Error("a namespace has changed and cannot be exported", "error", err)
			}
			cancel()
		case <-dead:
			dead = nil
			s.mu.Lock()
			s.failure = s.ctrl.Err()
			s.mu.Unlock()
			s.log.Error("the controller is lost: I/O fails until this connection is disconnected", "cause", s.ctrl.Err())
		}
	}
}

// askDisconnect is called by the control socket: it waits until everything is undone.
func (s *session) askDisconnect(ctx context.Context, force bool) error {
	select {
	case <-s.started:
	default:
		s.cancelStart()
	}
	reply := make(chan error, 1)
	select {
	case s.asks <- ask{force, reply}:
	case <-s.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-reply:
		return err
	case <-s.ended:
		return nil
	}
}

// inUse tells which exports are in use, and by whom.
func (s *session) inUse() error {
	for _, w := range s.ways {
		if err := w.InUse(); err != nil {
			return err
		}
	}
	return nil
}

// stop undoes what start did, whatever of it there is. Exports go first, so that their last writes reach the
// target; but when the target cannot be reached, the controller does, so that nobody waits for it.
func (s *session) stop(force bool) {
	shutdown := func() {
		if s.ctrl == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), shutdownLimit)
		defer cancel()
		if err := s.ctrl.Shutdown(ctx); err != nil {
			s.log.Warn("the controller was not shut down in an orderly way", "error", err)
		}
	}
	live := s.ctrl != nil && s.ctrl.State() == host.StateLive
	if !live {
		shutdown()
	}
	ctx, cancel := context.WithTimeout(context.Background(), exportLimit)
	defer cancel()
	var wg sync.WaitGroup
	for _, w := range s.ways {
		wg.Go(func() {
			if err := w.Close(ctx, force); err != nil {
				s.log.Error("an export was not removed in an orderly way", "error", err)
			}
		})
	}
	wg.Wait()
	if live {
		shutdown()
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
			Namespace: Namespace{NSID: n.NSID(), Size: i.Size, BlockSize: i.BlockSize, Exports: s.exports[n.NSID()].as},
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
		if ns.Exports == nil {
			ns.Exports = []Export{}
		}
		st.Namespaces = append(st.Namespaces, ns)
	}
	counters := s.ctrl.Counters()
	st.Counters = &counters
	return st
}
