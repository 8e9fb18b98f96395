package target

import "sync/atomic"

// SyncGate stands in the way of a namespace's syncs.
type SyncGate struct {
	backend
	Writes atomic.Bool   // of writes too
	Began  chan struct{} // one has begun
	End    chan error    // lets it go on
	// Closed is closed with the namespace's store.
	Closed chan struct{}
}

// GateSyncs puts a gate before a namespace that no host has seen yet.
func (s *Subsystem) GateSyncs(id uint32) *SyncGate {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := &SyncGate{
		backend: s.namespaces[id].store, Began: make(chan struct{}), End: make(chan error), Closed: make(chan struct{}),
	}
	s.namespaces[id].store = g
	return g
}

func (g *SyncGate) sync() error {
	g.Began <- struct{}{}
	return <-g.End
}

func (g *SyncGate) writeAt(p []byte, off uint64) error {
	if err := g.write(); err != nil {
		return err
	}
	return g.backend.writeAt(p, off)
}

func (g *SyncGate) zero(off, n uint64) error {
	if err := g.write(); err != nil {
		return err
	}
	return g.backend.zero(off, n)
}

func (g *SyncGate) write() error {
	if !g.Writes.Load() {
		return nil
	}
	g.Began <- struct{}{}
	return <-g.End
}

func (g *SyncGate) close() error {
	close(g.Closed)
	return g.backend.close()
}

// Admitted returns how many queues have room taken.
func (t *Target) Admitted() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.admitted
}
