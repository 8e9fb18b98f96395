package target

import (
	"slices"

	"farblk/host/nvme"
)

// aerLimit is how many Asynchronous Event Requests a controller keeps.
const aerLimit = 4

// events are a controller's asynchronous events (Base 5.2).
type events struct {
	waiting []uint16          // slots of Asynchronous Event Requests
	enabled uint32            // the Asynchronous Event Configuration feature
	pending []nvme.AsyncEvent // to be told, oldest first
	masked  []nvme.LogID      // told, and the log page not yet read
	changed nvme.ChangedNamespaces
}

// configBit returns the feature's bit that a host sets to be told of an event.
func configBit(e nvme.AsyncEvent) uint32 {
	switch e {
	case nvme.EventNamespaceChanged:
		return nvme.EventsNamespace
	case nvme.EventANAChanged:
		return nvme.EventsANA
	case nvme.EventDiscoveryChanged:
		return nvme.EventsDiscovery
	}
	return 0
}

// startAER keeps an Asynchronous Event Request until there is an event.
func (q *queue) startAER(cmd *command, ctrl *controller) bool {
	e := &ctrl.events
	if len(e.waiting) == aerLimit {
		return q.fail(cmd, nvme.StatusAERLimit.WithDNR())
	}
	q.reserved++
	e.waiting = append(e.waiting, cmd.slot)
	q.deliver(ctrl)
	return true
}

// deliver completes Asynchronous Event Requests with what is pending.
func (q *queue) deliver(ctrl *controller) {
	e := &ctrl.events
	rest := e.pending[:0]
	for _, ev := range e.pending {
		if len(e.waiting) == 0 || slices.Contains(e.masked, ev.LogID()) {
			rest = append(rest, ev)
			continue
		}
		slot := e.waiting[0]
		e.waiting = slices.Delete(e.waiting, 0, 1)
		e.masked = append(e.masked, ev.LogID())
		q.respond(&q.cmds[slot], uint64(ev), nvme.StatusSuccess)
	}
	e.pending = rest
}

// unmask lets the events of a log page through again, once it was read.
func (q *queue) unmask(ctrl *controller, id nvme.LogID) {
	e := &ctrl.events
	e.masked = slices.DeleteFunc(e.masked, func(m nvme.LogID) bool { return m == id })
	q.deliver(ctrl)
}

// abortAER completes a waiting request, if cid names one.
func (q *queue) abortAER(ctrl *controller, cid uint16) bool {
	e := &ctrl.events
	for i, slot := range e.waiting {
		if q.capsule(&q.cmds[slot]).CID() == cid {
			e.waiting = slices.Delete(e.waiting, i, i+1)
			q.respond(&q.cmds[slot], 0, nvme.StatusAbortRequested)
			return true
		}
	}
	return false
}

// raise tells a controller's host of an event. nsid is for a changed namespace.
func (c *controller) raise(ev nvme.AsyncEvent, nsid uint32) {
	q := c.admin
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dead != nil {
		return
	}
	e := &c.events
	if ev == nvme.EventNamespaceChanged && !slices.Contains(e.changed.IDs, nsid) && !e.changed.Overflow {
		if len(e.changed.IDs) == nvme.MaxNamespaceList {
			e.changed = nvme.ChangedNamespaces{Overflow: true}
		} else {
			e.changed.IDs = append(e.changed.IDs, nsid)
		}
	}
	if e.enabled&configBit(ev) == 0 || slices.Contains(e.pending, ev) {
		return
	}
	e.pending = append(e.pending, ev)
	q.deliver(c)
	if err := q.flush(); err != nil {
		q.log.Debug("sending an event failed", "err", err) // the queue's goroutine meets the same error
	}
}

// notify raises an event at every controller of the subsystem.
func (s *Subsystem) notify(ev nvme.AsyncEvent, nsid uint32) {
	t := s.t
	t.mu.Lock()
	var list []*controller
	for _, c := range t.controllers {
		if c.s == s {
			list = append(list, c)
		}
	}
	t.mu.Unlock()
	for _, c := range list {
		c.raise(ev, nsid)
	}
}

func (s *Subsystem) namespacesChanged(id uint32) { s.notify(nvme.EventNamespaceChanged, id) }

// discoveryChanged moves the discovery log's generation and tells hosts that
// keep a discovery controller.
func (t *Target) discoveryChanged() {
	t.generation.Add(1)
	t.discovery.notify(nvme.EventDiscoveryChanged, 0)
}
