package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// maxNamespaces bounds what a controller can make us ask for and keep.
const maxNamespaces = 4096

// found is a namespace as a scan sees it.
type found struct {
	nsid uint32
	id   *nvme.IdentifyNamespace
	ids  nvme.NamespaceIDs
	err  error // set: it cannot be identified now, and no more is known than its ID
}

// activeNamespaces lists the IDs of the attached namespaces, rising.
func (a *association) activeNamespaces(ctx context.Context) (ids []uint32, err error) {
	for after := uint32(0); ; after = ids[len(ids)-1] {
		data, err := a.identifyData(ctx, nvme.CNSActiveNamespaces, after)
		if err != nil {
			return nil, fmt.Errorf("listing namespaces: %w", err)
		}
		more, err := nvme.ParseNamespaceList(data, after)
		if err != nil {
			return nil, err
		}
		ids = append(ids, more...)
		if len(ids) > maxNamespaces {
			return nil, refusedf("the controller has more than %d namespaces", maxNamespaces)
		}
		if len(more) < nvme.MaxNamespaceList || ids[len(ids)-1] >= nvme.AllNamespaces-1 {
			return ids, nil
		}
	}
}

// look identifies one namespace. It returns nil if that is not attached, or not of the NVM command set. The error is
// the association's; what is wrong with the namespace alone is in the result.
func (a *association) look(ctx context.Context, nsid uint32) (*found, error) {
	f := &found{nsid: nsid}
	sick := func(err error) (*found, error) {
		f.err = fmt.Errorf("identifying namespace %d: %w", nsid, err)
		return f, nil
	}
	data, err := a.identifyData(ctx, nvme.CNSNamespace, nsid)
	switch s := statusOf(err); {
	case s.Code() == nvme.StatusInvalidNamespace:
		return nil, nil // detached since it was listed
	case s != 0:
		return sick(err)
	case err != nil:
		return nil, fmt.Errorf("identifying namespace %d: %w", nsid, err)
	}
	if f.id, err = nvme.ParseIdentifyNamespace(data); err != nil {
		return sick(err)
	}
	if f.id.NCAP == 0 { // zeros are what an inactive namespace answers
		return nil, nil
	}
	data, err = a.identifyData(ctx, nvme.CNSNamespaceDescriptors, nsid)
	switch s := statusOf(err); {
	case err == nil:
		if f.ids, err = nvme.ParseNamespaceIDs(data); err != nil {
			return sick(err)
		}
	case s == 0:
		return nil, fmt.Errorf("identifying namespace %d: %w", nsid, err)
	case !s.DNR() && s.Code() != nvme.StatusInvalidField && s.Code() != nvme.StatusInvalidOpcode:
		return sick(err)
	} // else the controller is older than the list
	if f.ids.HasCSI && f.ids.CSI != 0 {
		a.cfg.Logger.Warn("namespace left out: not of the NVM command set", "nsid", nsid, "csi", f.ids.CSI)
		return nil, nil
	}
	if f.ids.NGUID.IsZero() {
		f.ids.NGUID = f.id.NGUID
	}
	if f.ids.EUI64.IsZero() {
		f.ids.EUI64 = f.id.EUI64
	}
	return f, nil
}

// scan compares the controller's namespaces with those that are known: adds, removes, resizes, and refuses
// I/O where another namespace has come in the place of a known one, or nobody can tell. c.scanning is held.
func (c *Controller) scan(ctx context.Context, a *association) error {
	active, err := a.activeNamespaces(ctx)
	if err != nil {
		return err
	}
	var all []*found
	var sick error
	patience := maxLookPatience
	for _, nsid := range active {
		f, err := c.lookPatiently(ctx, a, nsid, &patience)
		if err != nil {
			return err
		}
		if f != nil {
			all = append(all, f)
			if f.err != nil {
				sick = cmp.Or(sick, f.err)
				a.lookAgain()
			}
		}
	}
	var states map[uint32]nvme.ANAState
	if a.id.SupportsANA() {
		if states, err = a.anaStates(ctx); err != nil {
			if statusOf(err) == 0 {
				return err
			}
			if c.anaFailed != err.Error() { // and not each time
				a.cfg.Logger.Warn("how the controller reaches its namespaces is not known", "err", err)
			}
			a.lookAgain()
		}
		c.anaFailed = ""
		if err != nil {
			c.anaFailed = err.Error()
		}
	}
	first := c.State() == StateConnecting
	seen := make(map[uint32]bool)
	for _, f := range all {
		n, kind, err := c.take(a, f)
		if n == nil {
			if c.leftOut[f.nsid] != err.Error() { // and not each time
				c.leftOut[f.nsid] = err.Error()
				a.cfg.Logger.Warn("namespace left out", "nsid", f.nsid, "err", err)
			}
			continue
		}
		delete(c.leftOut, f.nsid)
		seen[f.nsid] = true
		if f.err == nil && states != nil {
			n.mu.Lock()
			n.ana = states[f.id.ANAGRPID]
			n.mu.Unlock()
		}
		if kind != EventState && !first {
			level := slog.LevelInfo
			if err != nil {
				level = slog.LevelWarn
			}
			a.cfg.Logger.Log(ctx, level, kind.String(), "nsid", f.nsid, "size", n.Info().Size, "err", err)
			c.tell(Event{Kind: kind, State: c.State(), Namespace: n, Err: err})
		}
	}
	for _, n := range c.Namespaces() {
		if !seen[n.nsid] {
			c.detach(n)
		}
	}
	if first && len(seen) == 0 {
		return sick // rather than a connection to nothing
	}
	return nil
}

// take brings the namespace object for f up to date, or makes it. kind is EventState when nothing changed.
func (c *Controller) take(a *association, f *found) (n *Namespace, kind EventKind, err error) {
	c.mu.Lock()
	n, last := c.spaces[f.nsid], c.last
	queues := c.queues
	c.mu.Unlock()
	if n != nil && n.closed.Load() {
		return n, EventState, nil
	}
	if f.err != nil {
		return c.takeSick(n, f)
	}
	g, err := newGeometry(a.limits, f.nsid, f.id)
	if g != nil {
		g.info.ID = contentID(f.ids, a.id, a.cfg.SubsysNQN, f.nsid)
		g.info.Name = fmt.Sprintf("%s namespace %d", a.cfg.SubsysNQN, f.nsid)
	}
	if n != nil {
		n.mu.Lock()
		before, gone := n.ids, n.gone
		n.mu.Unlock()
		old := n.Info()
		looks := g != nil && old.Size == g.info.Size && last != nil && last.id.SN == a.id.SN && last.id.MN == a.id.MN
		same := sameNamespace(before, f.ids, looks)
		if g != nil && same && old.BlockSize == g.info.BlockSize {
			changed := n.update(g, f)
			switch {
			case gone:
				return n, EventNamespaceAdded, nil
			case changed:
				n.wake() // it may have been paused
				return n, EventNamespaceChanged, nil
			}
			return n, EventState, nil
		}
		if !gone { // else its removal has been told, and this one is new
			switch {
			case g == nil:
				err = fmt.Errorf("%w: %w", blockdev.ErrChanged, err)
			case same:
				err = fmt.Errorf("%w: namespace %d had blocks of %d bytes, now %d", blockdev.ErrChanged, f.nsid, old.BlockSize, g.info.BlockSize)
			default:
				err = fmt.Errorf("%w: namespace %d was %s, now it is %s", blockdev.ErrChanged, f.nsid, old.ID, g.info.ID)
			}
			known := errors.Is(n.Err(), blockdev.ErrChanged)
			n.refuse(err)
			n.wake()
			if known {
				return n, EventState, nil
			}
			return n, EventNamespaceChanged, err
		}
	}
	if g == nil {
		return nil, EventState, err
	}
	if n != nil { // gone, and this is another one
		n.leaveQueues(n.Err())
	}
	n = newNamespace(c, f.nsid, queues)
	n.update(g, f)
	c.mu.Lock()
	c.spaces[f.nsid] = n
	c.mu.Unlock()
	return n, EventNamespaceAdded, nil
}

// takeSick keeps I/O from n, if it is known, as long as it cannot be identified: it may be another one by now. As when
// the controller is lost, I/O waits at first, because a target that has just started may need some time to have its
// namespaces ready; unless the controller says that asking again is no use.
func (c *Controller) takeSick(n *Namespace, f *found) (*Namespace, EventKind, error) {
	if n == nil || !n.attached() {
		return nil, EventState, f.err
	}
	g := n.geometry.Load()
	hopeless := statusOf(f.err).DNR()
	if g.err != nil || g.paused != nil && !hopeless { // for this reason, or a worse one
		return n, EventState, nil
	}
	err := fmt.Errorf("%w: %w", blockdev.ErrLost, f.err)
	if hopeless {
		n.refuse(err)
		n.wake()
		return n, EventNamespaceChanged, err
	}
	var until time.Time
	if p := c.cfg.patience(); p >= 0 {
		until = time.Now().Add(p)
	}
	n.pause(err, until)
	return n, EventNamespaceChanged, err
}

// endPauses has I/O fail that has waited too long for a namespace to be identified.
func (c *Controller) endPauses(now time.Time) {
	for _, n := range c.Namespaces() {
		if n.endPause(now) {
			err := n.Err()
			c.cfg.Logger.Warn("namespace given up for now", "nsid", n.nsid, "err", err)
			c.tell(Event{Kind: EventNamespaceChanged, State: c.State(), Namespace: n, Err: err})
		}
	}
}

// detach makes a namespace that the controller does not list any more fail its requests.
func (c *Controller) detach(n *Namespace) {
	err := fmt.Errorf("%w: namespace %d is not attached any more", blockdev.ErrLost, n.nsid)
	n.refuse(err)
	n.mu.Lock()
	n.gone = true
	n.mu.Unlock()
	n.wake()
	c.cfg.Logger.Info(EventNamespaceRemoved.String(), "nsid", n.nsid)
	c.tell(Event{Kind: EventNamespaceRemoved, State: c.State(), Namespace: n, Err: err})
}

// controllerEvent deals with an asynchronous event.
func (c *Controller) controllerEvent(ctx context.Context, a *association, e nvme.AsyncEvent) {
	c.cfg.Logger.Info("controller event", "event", e.String())
	var err error
	switch e & 0xFFFF07 {
	case nvme.EventNamespaceChanged:
		err = c.rescan(ctx, a)
	case nvme.EventANAChanged:
		err = c.rescan(ctx, a)
		for _, q := range c.ioQueues() {
			q.retryNow()
		}
	case nvme.EventDiscoveryChanged:
		c.tell(Event{Kind: EventDiscoveryChanged, State: c.State()})
	default:
		if t := e.Type(); t == nvme.EventError || t == nvme.EventSMART { // cannot all be switched off
			c.cfg.Logger.Warn("the controller reports trouble", "event", e.String())
			err = a.readLog(ctx, e.LogID(), nvme.AllNamespaces, 0, make([]byte, 512), false)
		}
	}
	var lost *transport.LostError
	if err != nil && ctx.Err() == nil && !errors.As(err, &lost) {
		c.cfg.Logger.Warn("could not follow a controller event", "event", e.String(), "err", err)
	}
}

// anaStates is the state of each group in the ANA log. It is read without the namespaces, and in no larger pieces than
// the memory that admin commands have of their own holds: a reconnect must not wait for a buffer of the pool.
func (a *association) anaStates(ctx context.Context) (map[uint32]nvme.ANAState, error) {
	log, missing, err := ReadANALog(adminSlotSize, func(off uint64, buf []byte) error {
		var cmd nvme.Command
		cmd.FillGetLogPage(nvme.LogANA, nvme.AllNamespaces, off, uint32(len(buf)), false)
		cmd.SetLogSpecific(nvme.ANAGroupsOnly)
		_, err := a.call(ctx, &cmd, buf, transport.ToHost)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the ANA log: %w", err)
	}
	if missing > 0 {
		a.cfg.Logger.Warn("the controller gives only the first groups of its ANA log", "groups", len(log.Groups), "missing", missing)
	}
	states := make(map[uint32]nvme.ANAState, len(log.Groups))
	for _, g := range log.Groups {
		states[g.ID] = g.State
	}
	return states, nil
}
