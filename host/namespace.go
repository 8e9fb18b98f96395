package host

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
)

// Namespace is a namespace of a connected controller: a blockdev.Device. It stays the same object across
// reconnects and changes of size. All namespaces of a controller share its I/O queues and buffer pool.
type Namespace struct {
	ctrl     *Controller
	nsid     uint32
	queues   []nsQueue
	geometry atomic.Pointer[geometry]
	closed   atomic.Bool

	mu       sync.Mutex // a leaf
	id       *nvme.IdentifyNamespace
	ids      nvme.NamespaceIDs
	gone     bool // not attached to the controller any more
	ana      nvme.ANAState
	watchers map[int]func(blockdev.Info)
	watchID  int
}

var _ blockdev.Device = (*Namespace)(nil)

func newNamespace(c *Controller, nsid uint32, queues []*ioQueue) *Namespace {
	n := &Namespace{ctrl: c, nsid: nsid, queues: make([]nsQueue, len(queues)), watchers: make(map[int]func(blockdev.Info))}
	for i, io := range queues {
		q := &n.queues[i]
		q.ns, q.io = n, io
		io.mu.Lock()
		io.queues = append(io.queues, q)
		io.mu.Unlock()
	}
	return n
}

// NSID is the namespace's ID on its controller.
func (n *Namespace) NSID() uint32 { return n.nsid }

// Controller is what it is attached to.
func (n *Namespace) Controller() *Controller { return n.ctrl }

// Identify is what the namespace said last about itself; not to be changed.
func (n *Namespace) Identify() *nvme.IdentifyNamespace {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.id
}

// IDs are the identifiers that name the namespace for ever; zero where it has none.
func (n *Namespace) IDs() nvme.NamespaceIDs {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ids
}

// Usage is how many bytes are allocated (NUSE), as of the last Identify.
func (n *Namespace) Usage() int64 {
	id := n.Identify()
	return int64(min(id.NUSE, id.NSZE) * uint64(id.BlockSize()))
}

// ANAState is the asymmetric access state of this path, 0 where the controller does not report one.
func (n *Namespace) ANAState() nvme.ANAState {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ana
}

// Err is why I/O fails, or waits, although the controller is live: nil, or blockdev.ErrChanged, ErrLost (detached, or it
// cannot be identified at the moment, in which case I/O waits at first) or ErrClosed.
func (n *Namespace) Err() error {
	g := n.geometry.Load()
	return cmp.Or(g.err, g.paused)
}

// Info implements blockdev.Device.
func (n *Namespace) Info() blockdev.Info { return n.geometry.Load().info }

// Watch implements blockdev.Device.
func (n *Namespace) Watch(f func(blockdev.Info)) (cancel func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watchID++
	id := n.watchID
	n.watchers[id] = f
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.watchers, id)
	}
}

// Queues implements blockdev.Device.
func (n *Namespace) Queues() int { return len(n.queues) }

// Queue implements blockdev.Device.
func (n *Namespace) Queue(i int) blockdev.Queue { return &n.queues[i%len(n.queues)] }

// Pool implements blockdev.Device. It is the controller's, and closed with it.
func (n *Namespace) Pool() *blockdev.Pool { return n.ctrl.pool }

// Close implements blockdev.Device: what waits fails with blockdev.ErrClosed, what is with the controller
// ends. The connection stays; it does not give the namespace again.
func (n *Namespace) Close() error {
	if n.closed.Swap(true) {
		return nil
	}
	n.refuse(blockdev.ErrClosed)
	for i, drained := range n.leaveQueues(blockdev.ErrClosed) {
		n.queues[i].io.kick() // what was submitted but not started ends too
		<-drained
	}
	return nil
}

// leaveQueues takes n out of the I/O queues: all that waits and all that comes fails with err. Each channel is closed
// when the transport has nothing of n on that queue any more.
func (n *Namespace) leaveQueues(err error) (drained []<-chan struct{}) {
	for i := range n.queues {
		q := &n.queues[i]
		drained = append(drained, q.io.remove(q, err))
	}
	return drained
}

// attached says whether the controller listed n when it was last asked.
func (n *Namespace) attached() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.gone
}

// refuse makes all I/O fail with err. What waits fails as soon as the queues run.
func (n *Namespace) refuse(err error) {
	g := *n.geometry.Load()
	g.err, g.paused = err, nil
	n.geometry.Store(&g)
}

// pause makes all I/O wait because of err, until then, if that is not zero. update and refuse end it.
func (n *Namespace) pause(err error, until time.Time) {
	old := n.geometry.Load()
	g := *old
	g.paused, g.until = err, until
	if g.err == nil {
		n.geometry.CompareAndSwap(old, &g) // else it has been closed
	}
}

// endPause refuses I/O if a pause has lasted too long by now, and says whether it did.
func (n *Namespace) endPause(now time.Time) bool {
	old := n.geometry.Load()
	if old.paused == nil || old.until.IsZero() || now.Before(old.until) {
		return false
	}
	g := *old
	g.err, g.paused = old.paused, nil
	if !n.geometry.CompareAndSwap(old, &g) {
		return false // it has ended just now
	}
	n.wake()
	return true
}

// wake makes the queues look at what waits, also at what waited for the end of a pause.
func (n *Namespace) wake() {
	for i := range n.queues {
		q := &n.queues[i]
		q.io.mu.Lock()
		if q.waiting.head != nil {
			q.enlist()
		}
		q.io.mu.Unlock()
		q.io.wake()
	}
}

// update takes over what the namespace says of itself now, and tells the watchers if that is news.
func (n *Namespace) update(g *geometry, f *found) (changed bool) {
	old := n.geometry.Swap(g)
	n.mu.Lock()
	n.id, n.ids, n.gone = f.id, f.ids, false
	watchers := n.watchersLocked()
	n.mu.Unlock()
	if old == nil || old.info == g.info && old.err == nil && old.paused == nil {
		return false
	}
	for _, w := range watchers {
		w(g.info)
	}
	return true
}

func (n *Namespace) watchersLocked() []func(blockdev.Info) {
	ids := make([]int, 0, len(n.watchers))
	for id := range n.watchers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	fs := make([]func(blockdev.Info), 0, len(ids))
	for _, id := range ids {
		fs = append(fs, n.watchers[id])
	}
	return fs
}

// Namespaces are the attached namespaces that can be used, by rising ID.
func (c *Controller) Namespaces() []*Namespace {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]*Namespace, 0, len(c.spaces))
	for _, n := range c.spaces {
		if n.attached() && !n.closed.Load() {
			list = append(list, n)
		}
	}
	slices.SortFunc(list, func(a, b *Namespace) int { return cmp.Compare(a.nsid, b.nsid) })
	return list
}

// contentID names what a namespace holds, for ever.
func contentID(ids nvme.NamespaceIDs, ctrl *nvme.IdentifyController, nqn string, nsid uint32) string {
	switch {
	case !ids.UUID.IsZero():
		return "uuid." + ids.UUID.String()
	case !ids.NGUID.IsZero():
		return "eui." + ids.NGUID.String() // as udev names both
	case !ids.EUI64.IsZero():
		return "eui." + ids.EUI64.String()
	}
	return fmt.Sprintf("nvme.%s.%s.%d", nqn, ctrl.SN, nsid)
}

// sameNamespace says whether two sets of identifiers can be of one namespace. Identifiers may appear, for
// example with a new firmware, but at least one must be the same and none another. Without any, the
// namespace must look the same in all that is known of it.
func sameNamespace(before, now nvme.NamespaceIDs, sameLooks bool) bool {
	if before.UUID.IsZero() && before.NGUID.IsZero() && before.EUI64.IsZero() {
		return sameLooks
	}
	common := 0
	for _, same := range []struct{ set, equal bool }{
		{!before.UUID.IsZero() && !now.UUID.IsZero(), before.UUID == now.UUID},
		{!before.NGUID.IsZero() && !now.NGUID.IsZero(), before.NGUID == now.NGUID},
		{!before.EUI64.IsZero() && !now.EUI64.IsZero(), before.EUI64 == now.EUI64},
	} {
		if same.set && !same.equal {
			return false
		}
		if same.set {
			common++
		}
	}
	return common > 0
}
