package target

import (
	"slices"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// nsView is what a queue needs to know about a namespace for I/O: a snapshot
// that never changes, so that commands under way can keep theirs.
type nsView struct {
	ns         *namespace
	store      backend
	blocks     uint64
	blockShift uint8
	readOnly   bool
	syncs      bool            // the store has something to make durable
	status     nvme.StatusCode // not 0: the ANA state forbids I/O
	pieces     []piece         // of a namespace in memory
}

// piece is registered memory of a namespace.
type piece struct {
	start uint64 // byte of the namespace
	mem   []byte
	lkey  uint32
}

// refresh makes the queue's views anew if something changed since the last time.
func (q *queue) refresh() {
	s := q.subsystem.Load()
	if s == nil || q.qid == 0 || s.changes.Load() == q.viewed {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q.viewed = s.changes.Load()
	q.holdsGone = true // perhaps
	clear(q.views)
	for id, n := range s.namespaces {
		v := &nsView{
			ns: n, store: n.store, blocks: n.blocks(), blockShift: n.blockShift, readOnly: n.readOnly,
			status: anaStatus(s.anaState(q.port.id, n.group)),
		}
		m, inMemory := n.store.(*memory)
		v.syncs = !inMemory
		if inMemory {
			for _, e := range m.extents() {
				mr, err := q.dom.region(e)
				if err != nil {
					q.log.Error("namespace is not usable", "nsid", id, "err", err)
					v.status = nvme.StatusInternalError
					break
				}
				v.pieces = append(v.pieces, piece{e.start, e.mem, mr.LKey()})
			}
		}
		if _, held := q.held[n]; !held {
			n.refs++
			q.held[n] = hold{}
		}
		for uint32(len(q.views)) <= id {
			q.views = append(q.views, nil)
		}
		q.views[id] = v
	}
}

// hold is a queue's reference to a namespace.
type hold struct {
	unused bool   // it was removed, and no command uses it
	last   uint32 // number of the last work request that may use its memory, when unused
}

// letGo lets go of removed namespaces that no command of the queue uses, and whose memory no work request reads any more.
// No command begins to use one: refresh took its view away.
func (q *queue) letGo() {
	s := q.subsystem.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.holdsGone = s.changes.Load() != q.viewed; q.holdsGone {
		return // a view of what was removed only now may still be there
	}
	for n, h := range q.held {
		if !n.removed {
			continue
		}
		if !h.unused {
			h = hold{!slices.ContainsFunc(q.cmds, func(c command) bool { return c.uses(n) }), q.posted}
			q.held[n] = h
		}
		if !h.unused || int32(q.done-h.last) < 0 {
			q.holdsGone = true
			continue
		}
		delete(q.held, n)
		s.unref(n)
	}
}

// forgetGone lets go of what was removed, for somebody else than the queue.
func (q *queue) forgetGone() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dead == nil {
		q.refresh()
		q.letGo()
	}
}

// dropViews lets go of the namespaces when the queue has ended.
func (q *queue) dropViews() {
	s := q.subsystem.Load()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range q.held {
		s.unref(n)
	}
	clear(q.held)
	q.views = nil
	q.stats.addTo(&s.old)
}

// view returns the namespace for I/O, or the status that the command fails with.
func (q *queue) view(nsid uint32) (*nsView, nvme.StatusCode) {
	if nsid >= uint32(len(q.views)) || q.views[nsid] == nil {
		return nil, nvme.StatusInvalidNamespace.WithDNR()
	}
	v := q.views[nsid]
	return v, v.status
}

// appendPieces appends a work request for every piece of [off, off+n) of a
// namespace in memory, all to or from consecutive remote addresses.
func (v *nsView) appendPieces(wrs []verbs.SendWR, off, n uint64, wr verbs.SendWR) []verbs.SendWR {
	for i := range v.pieces {
		p := &v.pieces[i]
		if off >= p.start+uint64(len(p.mem)) {
			continue
		}
		b := p.mem[off-p.start:]
		if uint64(len(b)) > n {
			b = b[:n]
		}
		wr.NumSGE = 1
		wr.SGEs[0] = verbs.SGE{Data: b, LKey: p.lkey}
		wrs = append(wrs, wr)
		l := uint64(len(b))
		off, n, wr.RemoteAddr = off+l, n-l, wr.RemoteAddr+l
		if n == 0 {
			break
		}
	}
	return wrs
}

// countPieces returns how many work requests appendPieces makes.
func (v *nsView) countPieces(off, n uint64) int {
	if len(v.pieces) == 1 {
		return 1
	}
	count := 0
	for i := range v.pieces {
		p := &v.pieces[i]
		if end := p.start + uint64(len(p.mem)); off < end && off+n > p.start {
			count++
		}
	}
	return count
}
