// Package target is a small NVMe over Fabrics target for RDMA: a discovery
// service and NVM subsystems whose namespaces live in memory or in files, over
// any verbs provider. It is made for trying farblk out and for tests; it has no
// authentication, no reservations and no persistence of its configuration.
//
// # Data path
//
// One connection is one NVMe queue is one queue pair, run by one goroutine. It
// polls, handles every command of that poll, and posts what they need as one
// chain of receives and one chain of sends. The memory of a namespace is itself
// registered: a Read is an RDMA WRITE straight out of it with the response
// behind it in the same chain, a Write is an RDMA READ straight into it.
// Namespaces in files go through registered buffers of the queue, and so do
// Reads over software iWARP, whose checksums cover memory that must not change
// before it is sent, and Writes over an iWARP adapter, which lets a host write on
// its own to whatever an RDMA READ may fill. Nothing is allocated for a command. Only what has to become
// durable in a file is synced aside, by a goroutine that lives for as long as some
// command of the queue waits for it.
//
// # Locks
//
// Each queue's lock guards its queue pair and records; its goroutine holds it
// while it works and lets go while it waits, so that others can complete an
// asynchronous event, a synced command, or end the queue in between. Order:
//
//	admin queue -> I/O queue -> Target.mu -> Subsystem.mu -> Target.domMu -> domain.mu
package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// Config are a target's limits. The zero value is ready to use.
type Config struct {
	// Logger gets connects, disconnects and faults, never anything per command.
	Logger *slog.Logger
	// QueueDepth is the most entries of an I/O queue; 0 means 128.
	QueueDepth int
	// IOQueues is the most I/O queues that one controller grants; 0 means 16.
	IOQueues int
	// MaxQueues is the most queues of all controllers together. A connection
	// past it is rejected for want of resources, unless one has been without its
	// Connect command for a second, which then is dropped. 0 means 1024.
	MaxQueues int
	// InCapsule is the bytes of data that an I/O command capsule has room for,
	// a multiple of 16; 0 means 8192, below 0 none.
	InCapsule int
	// MDTS is the largest transfer, as a power of two in pages of 4096 bytes.
	// 0 means 8 (1 MiB); below 0 no limit is reported, and 1 MiB still holds.
	MDTS int
	// ReadDepth is the most RDMA READs that a queue has under way; 0 means 32.
	ReadDepth int
	// ConnectTimeout is how long a connection may take from the request to its
	// Connect command; 0 means 10 s.
	ConnectTimeout time.Duration
}

const (
	adminDepth = 32 // NVMe over RDMA 3.5: entries of an admin queue
	maxMDTS    = 8
	pageSize   = 4096
)

func (c *Config) fill() error {
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	set(&c.QueueDepth, 128)
	set(&c.IOQueues, 16)
	set(&c.MaxQueues, 1024)
	set(&c.InCapsule, 8192)
	set(&c.MDTS, maxMDTS)
	set(&c.ReadDepth, 32)
	c.InCapsule = max(c.InCapsule, 0)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = 10 * time.Second
	}
	switch {
	case c.QueueDepth < 2 || c.QueueDepth > 1024:
		return fmt.Errorf("queue depth %d is not in 2 to 1024", c.QueueDepth)
	case c.IOQueues < 1 || c.IOQueues > 1024:
		return fmt.Errorf("%d I/O queues is not in 1 to 1024", c.IOQueues)
	case c.InCapsule%16 != 0 || c.InCapsule > 1<<16:
		return fmt.Errorf("in-capsule size %d is not a multiple of 16 up to 65536", c.InCapsule)
	case c.MDTS > maxMDTS:
		return fmt.Errorf("MDTS %d is above %d", c.MDTS, maxMDTS)
	case c.ReadDepth < 1 || c.ReadDepth > 255:
		return fmt.Errorf("read depth %d is not in 1 to 255", c.ReadDepth)
	}
	return nil
}

// ErrClosed says that the target was closed. As all errors here it does not begin with "target:": the command that
// shows it does.
var ErrClosed = errors.New("target closed")

// Target serves subsystems to hosts. Its methods may be called from any
// goroutine, while it runs.
type Target struct {
	cfg Config
	log *slog.Logger

	mu          sync.Mutex
	closed      bool
	subsystems  map[string]*Subsystem
	discovery   *Subsystem
	referrals   []Referral
	ports       []*port
	admitted    int       // connections that have a queue, or are about to
	warned      time.Time // when a rejected connection was last worth a warning
	queues      map[*queue]struct{}
	controllers map[uint16]*controller
	lastCNTLID  uint16
	wg          sync.WaitGroup // queues and Serve calls

	domMu   sync.Mutex
	domains map[domainKey]*domain

	generation atomic.Uint64 // of the discovery log
	ctx        context.Context
	stop       context.CancelFunc
}

// New makes a target with a discovery service and no subsystems.
func New(c Config) (*Target, error) {
	if err := c.fill(); err != nil {
		return nil, err
	}
	t := &Target{
		cfg: c, log: c.Logger,
		subsystems:  make(map[string]*Subsystem),
		domains:     make(map[domainKey]*domain),
		queues:      make(map[*queue]struct{}),
		controllers: make(map[uint16]*controller),
	}
	t.ctx, t.stop = context.WithCancel(context.Background())
	t.discovery = newSubsystem(t, SubsystemConfig{NQN: nvme.DiscoveryNQN})
	t.discovery.isDiscovery = true
	t.generation.Store(1)
	return t, nil
}

// port is one listener with the ID that discovery and ANA know it by.
type port struct {
	id   uint16
	addr verbs.Addr
}

// Serve is ServePort with the lowest free port ID.
func (t *Target) Serve(ctx context.Context, l verbs.Listener) error {
	return t.ServePort(ctx, 0, l)
}

// ServePort accepts connections from l until ctx ends, the target is closed, or
// l fails, and closes l. Connections live on until Close. Discovery and ANA know
// the listener as port id; 0 takes the lowest free one. It returns nil unless
// l failed or the ID is taken.
func (t *Target) ServePort(ctx context.Context, id uint16, l verbs.Listener) error {
	defer l.Close()
	p, err := t.addPort(id, l.Addr())
	if err != nil {
		return err
	}
	defer t.wg.Done()
	defer t.removePort(p)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	for {
		conn, err := l.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("port %d: %w", p.id, err)
		}
		t.mu.Lock()
		closed := t.closed
		if !closed {
			t.wg.Add(1)
		}
		t.mu.Unlock()
		if closed {
			conn.Close()
			return nil
		}
		go func() {
			defer t.wg.Done()
			t.serveConn(p, conn)
		}()
	}
}

func (t *Target) addPort(id uint16, addr verbs.Addr) (*port, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	taken := func(id uint16) bool {
		return slices.ContainsFunc(t.ports, func(p *port) bool { return p.id == id })
	}
	switch {
	case t.closed:
		return nil, ErrClosed
	case id != 0 && taken(id):
		return nil, fmt.Errorf("port %d is taken", id)
	case id == 0:
		for id = 1; taken(id); id++ {
		}
	}
	p := &port{id, addr}
	t.ports = append(t.ports, p)
	slices.SortFunc(t.ports, func(a, b *port) int { return int(a.id) - int(b.id) })
	t.generation.Add(1)
	t.wg.Add(1)
	return p, nil
}

func (t *Target) removePort(p *port) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ports = slices.DeleteFunc(t.ports, func(x *port) bool { return x == p })
	t.generation.Add(1)
}

// Close ends all connections, waits for every Serve and every queue, and frees
// the namespaces' memory. It can be called twice.
func (t *Target) Close() error {
	t.mu.Lock()
	first := !t.closed
	t.closed = true
	t.mu.Unlock()
	t.stop()
	t.DropConnections()
	t.wg.Wait()
	if !first {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for _, d := range t.domainList() {
		errs = append(errs, d.close())
	}
	for _, s := range t.subsystems {
		errs = append(errs, s.free())
	}
	return errors.Join(errs...)
}

// DropConnections ends every connection at once, as a target that crashes or
// loses its network does. Hosts may connect again.
func (t *Target) DropConnections() {
	t.killAll(func(*queue) bool { return true }, ErrClosed)
}

// killAll ends the queues that are wanted, at the same time, and does not wait:
// an orderly end can take its time.
func (t *Target) killAll(want func(*queue) bool, why error) {
	for _, q := range t.queueList(want) {
		go q.kill(why) // q's own goroutine, which Close waits for, ends after it
	}
}

func (t *Target) queueList(want func(*queue) bool) []*queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []*queue
	for q := range t.queues {
		if want(q) {
			list = append(list, q)
		}
	}
	return list
}

// Referral is another discovery service that the discovery log names.
type Referral struct {
	Addr netip.AddrPort
}

// AddReferral adds an entry to the discovery log.
func (t *Target) AddReferral(r Referral) {
	t.mu.Lock()
	t.referrals = append(t.referrals, r)
	t.mu.Unlock()
	t.discoveryChanged()
}

// Subsystem returns the subsystem of that name, or nil.
func (t *Target) Subsystem(nqn string) *Subsystem {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.subsystems[nqn]
}

// AddSubsystem makes a subsystem, which hosts can use at once.
func (t *Target) AddSubsystem(c SubsystemConfig) (*Subsystem, error) {
	if err := nvme.ValidateNQN(c.NQN); err != nil {
		return nil, fmt.Errorf("subsystem: %w", err)
	}
	if c.NQN == nvme.DiscoveryNQN {
		return nil, errors.New("the discovery service is always there")
	}
	s := newSubsystem(t, c)
	t.mu.Lock()
	_, taken := t.subsystems[c.NQN]
	if !taken && !t.closed {
		t.subsystems[c.NQN] = s
	}
	closed := t.closed
	t.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case taken:
		return nil, fmt.Errorf("subsystem %s is there already", c.NQN)
	}
	t.discoveryChanged()
	return s, nil
}

// RemoveSubsystem ends the subsystem's connections and forgets it. Its namespaces
// are freed when no queue uses them any more.
func (t *Target) RemoveSubsystem(nqn string) error {
	t.mu.Lock()
	s := t.subsystems[nqn]
	delete(t.subsystems, nqn)
	t.mu.Unlock()
	if s == nil {
		return fmt.Errorf("no subsystem %s", nqn)
	}
	s.removed.Store(true)
	t.killAll(func(q *queue) bool { return q.subsystem.Load() == s }, errRemoved)
	t.discoveryChanged()
	s.dispose()
	return nil
}
