package target

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"farblk/host/nvme"
)

// SubsystemConfig describes a subsystem to be added.
type SubsystemConfig struct {
	NQN string
	// Hosts are the host NQNs that may connect; empty lets all.
	Hosts []string
	// Serial, Model and Firmware are what Identify shows; empty takes defaults.
	Serial, Model, Firmware string
	// NoWriteCache hides the volatile write cache, so that hosts see no need to
	// flush.
	NoWriteCache bool
}

// Subsystem is an NVM subsystem of a running target.
type Subsystem struct {
	t           *Target
	cfg         SubsystemConfig
	isDiscovery bool
	removed     atomic.Bool

	mu         sync.Mutex
	hosts      []string
	namespaces map[uint32]*namespace
	leaving    []*namespace // removed, but some queue still holds a view
	ana        map[anaKey]nvme.ANAState
	anaCount   uint64
	old        Stats // of queues that have ended

	// changes moves with every change that queues' views depend on.
	changes atomic.Uint64
}

func newSubsystem(t *Target, c SubsystemConfig) *Subsystem {
	if c.Serial == "" {
		c.Serial = fmt.Sprintf("%020x", fnv64(c.NQN))
	}
	if c.Model == "" {
		c.Model = "farblk target"
	}
	if c.Firmware == "" {
		c.Firmware = "1.0"
	}
	s := &Subsystem{
		t: t, cfg: c, hosts: slices.Clone(c.Hosts),
		namespaces: make(map[uint32]*namespace),
		ana:        make(map[anaKey]nvme.ANAState),
	}
	s.changes.Store(1)
	return s
}

// fnv64 is FNV-1a, for a serial number that stays the same over restarts.
func fnv64(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// NQN returns the subsystem's name.
func (s *Subsystem) NQN() string { return s.cfg.NQN }

// AllowHosts replaces the list of host NQNs that may connect; none lets all.
// Hosts that are connected stay so.
func (s *Subsystem) AllowHosts(nqns ...string) {
	s.mu.Lock()
	s.hosts = slices.Clone(nqns)
	s.mu.Unlock()
	s.t.discoveryChanged()
}

func (s *Subsystem) allows(hostNQN string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.hosts) == 0 || slices.Contains(s.hosts, hostNQN)
}

// AddNamespace adds a namespace, tells connected hosts, and returns its ID.
func (s *Subsystem) AddNamespace(c NamespaceConfig) (uint32, error) {
	if err := c.check(); err != nil {
		return 0, err
	}
	n, err := c.open()
	if err != nil {
		return 0, err
	}
	if err := s.insert(n); err != nil {
		n.store.close()
		return 0, err
	}
	s.namespacesChanged(n.id)
	return n.id, nil
}

func (s *Subsystem) insert(n *namespace) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removed.Load() {
		return fmt.Errorf("subsystem %s was removed", s.cfg.NQN)
	}
	for id := uint32(1); n.id == 0; id++ {
		if id > maxNSID {
			return fmt.Errorf("subsystem %s has %d namespaces already", s.cfg.NQN, maxNSID)
		}
		if s.namespaces[id] == nil {
			n.id = id
		}
	}
	if s.namespaces[n.id] != nil {
		return fmt.Errorf("subsystem %s has a namespace %d already", s.cfg.NQN, n.id)
	}
	n.identify(s.cfg.NQN)
	s.namespaces[n.id] = n
	s.changes.Add(1)
	return nil
}

func (s *Subsystem) missing(id uint32) error {
	return fmt.Errorf("subsystem %s has no namespace %d", s.cfg.NQN, id)
}

// RemoveNamespace takes a namespace away and tells connected hosts. Commands
// that have begun on it end as usual.
func (s *Subsystem) RemoveNamespace(id uint32) error {
	s.mu.Lock()
	n := s.namespaces[id]
	if n == nil {
		s.mu.Unlock()
		return s.missing(id)
	}
	delete(s.namespaces, id)
	n.removed = true
	s.changes.Add(1)
	var err error
	if n.refs == 0 {
		err = s.t.release(n)
	} else {
		s.leaving = append(s.leaving, n)
	}
	s.mu.Unlock()
	// Queues that have nothing to do would hold it until they have.
	for _, q := range s.t.queueList(func(q *queue) bool { return q.subsystem.Load() == s && q.qid != 0 }) {
		q.forgetGone()
	}
	s.namespacesChanged(id)
	return err
}

// ResizeNamespace changes a namespace's size in bytes and tells connected
// hosts. Growing gives zeros; a smaller namespace loses what lay beyond.
func (s *Subsystem) ResizeNamespace(id uint32, size uint64) error {
	s.mu.Lock()
	n := s.namespaces[id]
	if n == nil {
		s.mu.Unlock()
		return s.missing(id)
	}
	err := func() error {
		if size == 0 || size&(1<<n.blockShift-1) != 0 {
			return fmt.Errorf("size %d is not a multiple of the block size %d", size, 1<<n.blockShift)
		}
		if err := n.store.resize(n.bytes, size); err != nil {
			return err
		}
		n.bytes = size
		s.changes.Add(1)
		return nil
	}()
	s.mu.Unlock()
	if err == nil {
		s.namespacesChanged(id)
	}
	return err
}

// SetReadOnly changes whether a namespace is write protected and tells
// connected hosts.
func (s *Subsystem) SetReadOnly(id uint32, readOnly bool) error {
	return s.edit(id, func(n *namespace) { n.readOnly = readOnly })
}

// SetIdentity gives a namespace another NGUID and UUID, as a target that was
// set up anew would, and tells connected hosts.
func (s *Subsystem) SetIdentity(id uint32, nguid nvme.NGUID, uuid nvme.UUID) error {
	return s.edit(id, func(n *namespace) { n.nguid, n.uuid = nguid, uuid })
}

func (s *Subsystem) edit(id uint32, f func(*namespace)) error {
	s.mu.Lock()
	n := s.namespaces[id]
	if n != nil {
		f(n)
		s.changes.Add(1)
	}
	s.mu.Unlock()
	if n == nil {
		return s.missing(id)
	}
	s.namespacesChanged(id)
	return nil
}

// ReadAt reads a namespace's content directly, for tests and checksums.
func (s *Subsystem) ReadAt(id uint32, p []byte, off uint64) error {
	return s.direct(id, off, len(p), func(b backend) error { return b.readAt(p, off) })
}

// WriteAt writes a namespace's content directly.
func (s *Subsystem) WriteAt(id uint32, p []byte, off uint64) error {
	return s.direct(id, off, len(p), func(b backend) error { return b.writeAt(p, off) })
}

func (s *Subsystem) direct(id uint32, off uint64, n int, f func(backend) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	ns := s.namespaces[id]
	if ns == nil {
		return s.missing(id)
	}
	if off > ns.bytes || uint64(n) > ns.bytes-off {
		return fmt.Errorf("%d bytes at %d lie outside namespace %d", n, off, id)
	}
	return f(ns.store)
}

// ids returns the active namespace IDs above after, in order.
func (s *Subsystem) ids(after uint32) []uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []uint32
	for id := range s.namespaces {
		if id > after {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// with calls f with namespace id, under the lock; it returns false if there is
// none.
func (s *Subsystem) with(id uint32, f func(*namespace)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.namespaces[id]
	if n == nil {
		return false
	}
	f(n)
	return true
}

// unref takes back a reference to a namespace; s.mu is held.
func (s *Subsystem) unref(n *namespace) {
	if n.refs--; n.refs > 0 || !n.removed {
		return
	}
	s.leaving = slices.DeleteFunc(s.leaving, func(x *namespace) bool { return x == n })
	if err := s.t.release(n); err != nil {
		s.t.log.Error("freeing a namespace", "subsystem", s.cfg.NQN, "nsid", n.id, "err", err)
	}
}

// sync makes all namespaces durable.
func (s *Subsystem) sync() error {
	s.mu.Lock()
	list := slices.Collect(maps.Values(s.namespaces))
	for _, n := range list {
		n.refs++
	}
	s.mu.Unlock()
	var errs []error
	for _, n := range list {
		if err := n.store.sync(); err != nil {
			errs = append(errs, fmt.Errorf("namespace %d: %w", n.id, err))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range list {
		s.unref(n)
	}
	return errors.Join(errs...)
}

// release frees a namespace that nothing uses any more.
func (t *Target) release(n *namespace) error {
	var errs []error
	if m, ok := n.store.(*memory); ok {
		for _, d := range t.domainList() {
			for _, e := range m.extents() {
				errs = append(errs, d.forget(e))
			}
		}
	}
	return errors.Join(append(errs, n.store.close())...)
}

// dispose removes all namespaces of a subsystem that was removed itself.
func (s *Subsystem) dispose() {
	for _, id := range s.ids(0) {
		_ = s.RemoveNamespace(id)
	}
}

// free closes all backends; the domains are closed before.
func (s *Subsystem) free() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, n := range s.namespaces {
		errs = append(errs, n.store.close())
	}
	for _, n := range s.leaving {
		errs = append(errs, n.store.close())
	}
	clear(s.namespaces)
	s.leaving = nil
	return errors.Join(errs...)
}
