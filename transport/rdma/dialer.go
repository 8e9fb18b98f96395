// Package rdma is the binding of NVMe queues to RDMA queue pairs, once for all providers: the connection
// manager's private data, command capsules in registered slots, keyed SGLs, in-capsule data, and the
// registered I/O memory (NVMe over Fabrics RDMA transport specification 1.0).
//
// One NVMe queue is one queue pair. A command is a SEND of 64 bytes from its slot, followed for small writes
// by the data itself, straight from the caller's buffer; the target moves all other data by RDMA READ and
// WRITE; a response is a SEND of 16 bytes into one of the posted receives. A slot is free again when its send
// completion and its response have both been seen, in whichever order they come.
//
// Memory: the I/O region is registered once for each association, twice over: with a key for reading and a
// key for writing, so that a target gets the least access a command needs. Capsules and responses lie in
// memory of their own that no peer has a key to. With Options.KeyPerCommand the region's own keys let no peer in:
// every command, the admin queue's too, has a key to its own data that ends with it.
package rdma

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"farblk/transport"
	"farblk/transport/verbs"
)

// Options are what a user may change. The zero value is the default.
type Options struct {
	// KeyPerCommand gives the target a fresh key for every command, invalidated at its end, instead of one
	// key for the whole region. Needs a device with memory windows.
	KeyPerCommand bool
	// ResolveTimeout bounds address and route resolution; 0 is 3 s.
	ResolveTimeout time.Duration
	// Logger hears of what is worth knowing about connections; nil is silence.
	Logger *slog.Logger
}

const (
	defaultResolveTimeout = 3 * time.Second
	// responderResources is how many RDMA READs the target may have under way on one queue (IRD): what
	// Linux's host asks for at most.
	responderResources = 16
	retryCount         = 7
	rnrRetryCount      = 7 // without end; the target has a receive posted for every command we may send
)

// NewDialer gives associations over p's devices.
func NewDialer(p verbs.Provider, o Options) transport.Dialer {
	if o.ResolveTimeout == 0 {
		o.ResolveTimeout = defaultResolveTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &dialer{p: p, o: o}
}

type dialer struct {
	p verbs.Provider
	o Options
}

// association is the memory and the queues on one device.
//
// Lock: mu guards queues, first, closed and the start of opens; it is not held over anything that blocks.
type association struct {
	d      *dialer
	addr   transport.Address
	route  verbs.Route
	device verbs.Device
	pd     verbs.PD
	mem    []byte
	// toHost lets the target write mem, toController read it.
	toHost, toController verbs.MR

	mu     sync.Mutex
	first  verbs.Conn // made by Dial to learn the device, used up by the first queue
	queues []*queue
	closed bool

	life     context.Context // ends with closed
	end      context.CancelFunc
	opens    sync.WaitGroup // calls of OpenQueue
	finished chan struct{}  // closed when everything is freed
	closeErr error
}

// Dial implements transport.Dialer.
func (d *dialer) Dial(ctx context.Context, addr transport.Address, mem []byte) (transport.Association, error) {
	a := &association{d: d, addr: addr, mem: mem, finished: make(chan struct{}), route: verbs.Route{
		Remote: verbs.Addr{IP: addr.Remote, Port: addr.Port},
		Local:  verbs.Addr{IP: addr.Local},
		TOS:    addr.TOS, TOSSet: addr.TOSSet,
		Device: addr.LocalDevice,
	}}
	a.life, a.end = context.WithCancel(context.Background())
	if addr.GID {
		a.route.Remote.Family, a.route.Local.Family = verbs.FamilyIB, verbs.FamilyIB
	}
	conn, err := a.resolve(ctx)
	if err != nil {
		a.end()
		return nil, d.connectError(addr, 0, err)
	}
	a.first, a.device = conn, conn.Device()
	if err := a.register(conn); err != nil {
		_ = a.Close()
		return nil, d.connectError(addr, 0, err)
	}
	return a, nil
}

func (a *association) resolve(ctx context.Context) (verbs.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, a.d.o.ResolveTimeout)
	defer cancel()
	return a.d.p.Resolve(ctx, a.route)
}

// register makes the I/O memory reachable. What it has made when it fails, Close frees.
func (a *association) register(conn verbs.Conn) (err error) {
	if a.d.o.KeyPerCommand && !a.device.MemoryWindows {
		return fmt.Errorf("%w: the RDMA device %s has no memory windows for a key per command", verbs.ErrUnsupported, a.device.Name)
	}
	if m := a.device.MaxMR; m > 0 && uint64(len(a.mem)) > m {
		return fmt.Errorf("%d MiB of I/O memory: the RDMA device %s registers at most %d MiB: use a smaller --pool-size", len(a.mem)>>20, a.device.Name, m>>20)
	}
	if a.pd, err = conn.NewPD(); err != nil {
		return err
	}
	write, read := verbs.LocalWrite|verbs.RemoteWrite, verbs.RemoteRead
	if a.d.o.KeyPerCommand { // the target's rights are those of the commands' keys
		write, read = verbs.LocalWrite, 0
	}
	if a.toHost, err = a.pd.Register(a.mem, write); err != nil {
		return err
	}
	a.toController, err = a.pd.Register(a.mem, read)
	return err
}

// Provider implements transport.Association.
func (a *association) Provider() string { return a.d.p.Name() }

// Device implements transport.Association.
func (a *association) Device() string { return a.device.Name }

// staleRetries and staleDelay bound how long a target may take to notice that an earlier connection of this
// machine is dead: it answers "stale connection" to the next request, once or a few times.
const (
	staleRetries = 5
	staleDelay   = 200 * time.Millisecond
)

// OpenQueue implements transport.Association.
func (a *association) OpenQueue(ctx context.Context, p transport.QueueParams) (transport.Queue, error) {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil, transport.ErrClosed
	}
	a.opens.Add(1)
	a.mu.Unlock()
	defer a.opens.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(a.life, cancel)()
	for try := 0; ; try++ {
		q, err := a.openOnce(ctx, p)
		if err == nil {
			return q, nil
		}
		if a.life.Err() != nil {
			return nil, transport.ErrClosed
		}
		err = a.d.connectError(a.addr, p.ID, err)
		if !isStale(err) || try == staleRetries {
			return nil, err
		}
		a.d.o.Logger.Info("the target still holds an earlier connection, trying again", "queue", p.ID, "try", try+1)
		select {
		case <-time.After(staleDelay << try):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (a *association) openOnce(ctx context.Context, p transport.QueueParams) (_ *queue, err error) {
	conn, err := a.takeConn(ctx)
	if err != nil {
		return nil, err
	}
	if conn.Device().Name != a.device.Name {
		_ = conn.Close()
		return nil, fmt.Errorf("the route moved from RDMA device %s to %s", a.device.Name, conn.Device().Name)
	}
	q, err := newQueue(a, conn, p)
	if err == nil {
		if err = q.connect(ctx); err != nil {
			q.abandon()
		}
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	q.start()
	a.mu.Lock()
	closed := a.closed
	if !closed {
		a.queues = append(a.queues, q)
	}
	a.mu.Unlock()
	if closed {
		_ = q.Close()
		return nil, transport.ErrClosed
	}
	return q, nil
}

// takeConn gives the connection that Dial resolved, or a new one.
func (a *association) takeConn(ctx context.Context) (verbs.Conn, error) {
	a.mu.Lock()
	conn := a.first
	a.first = nil
	a.mu.Unlock()
	if conn != nil {
		return conn, nil
	}
	return a.resolve(ctx)
}

// Close implements transport.Association. Calls of OpenQueue under way end with ErrClosed.
func (a *association) Close() error {
	a.mu.Lock()
	again := a.closed
	a.closed = true
	a.mu.Unlock()
	if !again {
		a.closeErr = a.shut()
		close(a.finished)
	}
	<-a.finished
	return a.closeErr
}

func (a *association) shut() error {
	a.mu.Lock()
	queues, first := a.queues, a.first
	a.queues, a.first = nil, nil
	a.mu.Unlock()
	a.end()
	for _, q := range queues { // all at once: the time of a dead target is paid once
		q.end(transport.ErrClosed)
	}
	a.opens.Wait()
	for _, q := range queues {
		_ = q.Close()
	}
	var firstErr error
	keep := func(err error) {
		if firstErr == nil {
			firstErr = err
		}
	}
	for _, mr := range []verbs.MR{a.toController, a.toHost} {
		if mr != nil {
			keep(mr.Close())
		}
	}
	if a.pd != nil {
		keep(a.pd.Close())
	}
	if first != nil {
		keep(first.Close())
	}
	return firstErr
}

// forget takes a queue that ended off the list, so that an association can outlive many.
func (a *association) forget(q *queue) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.queues = slices.DeleteFunc(a.queues, func(x *queue) bool { return x == q })
}
