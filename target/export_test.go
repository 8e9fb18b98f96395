package target

// SyncGate stands in the way of a namespace's syncs.
type SyncGate struct {
	backend
	Began chan struct{} // a sync has begun
	End   chan error    // lets it end
	// Closed is closed with the namespace's store.
	Closed chan struct{}
}

// GateSyncs puts a gate before a namespace that no host has seen yet.
func (s *Subsystem) GateSyncs(id uint32) *SyncGate {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := &SyncGate{s.namespaces[id].store, make(chan struct{}), make(chan error), make(chan struct{})}
	s.namespaces[id].store = g
	return g
}

func (g *SyncGate) sync() error {
	g.Began <- struct{}{}
	return <-g.End
}

func (g *SyncGate) close() error {
	close(g.Closed)
	return g.backend.close()
}
