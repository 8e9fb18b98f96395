package host

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// manualQueue is a transport queue whose completions the test chooses.
type manualQueue struct {
	instantQueue
	t        *testing.T
	depth    int
	ended    bool
	noWrites func() bool
	paused   func(nsid uint32) bool
	refuses  func() bool
	under    []*transport.Request
}

var errRefused = errors.New("the device refuses it")

func (q *manualQueue) Submit(r *transport.Request) error {
	switch {
	case q.ended:
		return &transport.LostError{Cause: errCut}
	case len(q.under) == q.depth-1:
		return transport.ErrQueueFull
	case q.refuses():
		return errRefused
	}
	if q.noWrites() && r.Owner.(*command).writes {
		q.t.Error("a command that writes was sent while they are held")
	}
	if q.paused((*nvme.Command)(&r.Command).NSID()) {
		q.t.Error("a command was sent to a paused namespace")
	}
	q.under = append(q.under, r)
	return nil
}

// take removes a random request.
func (q *manualQueue) take(rnd *rand.Rand) *transport.Request {
	i := rnd.IntN(len(q.under))
	r := q.under[i]
	q.under[i] = q.under[len(q.under)-1]
	q.under = q.under[:len(q.under)-1]
	return r
}

// TestQueueModel does anything that may happen to an I/O queue, in random order: every request ends once and
// not before all its parts have, in success only if each byte was dealt with; and no record is lost.
func TestQueueModel(t *testing.T) {
	for seed := range uint64(1000) {
		modelRun(t, seed)
		if t.Failed() {
			t.Fatal("seed", seed)
		}
	}
}

type modelRequest struct {
	blockdev.Request
	ended int
	bytes int64 // that successful commands dealt with
}

func modelRun(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 0))
	const records, ranges = 7, 2
	io := newIOQueue(records, [][]byte{make([]byte, 4096), make([]byte, 4096)})
	ctrl := &Controller{tick: time.Second / 2, cfg: Config{FastIOFail: 3 * time.Second}}
	id := &nvme.IdentifyNamespace{NSZE: 1 << 21}
	id.LBAF[0].LBADS = 9
	g, err := newGeometry(&limits{maxTransfer: 16 << 10, writeCache: true, discard: true, writeZeroes: true, ranges: 2, rangeBlocks: 50, maxZeroes: 8192}, 1, id)
	if err != nil {
		t.Fatal(err)
	}
	var spaces [2]*Namespace
	resume := func(n *Namespace) {
		g := *g
		g.nsid = n.nsid
		n.update(&g, &found{nsid: n.nsid, id: id})
		n.wake()
	}
	open := func(i int) {
		spaces[i] = newNamespace(ctrl, uint32(i+1), []*ioQueue{io})
		resume(spaces[i])
	}
	open(0)
	open(1)
	data := make([]byte, 64<<10)
	var all []*modelRequest
	held := true
	var tq *manualQueue
	connected := func() bool { return tq != nil }
	connect := func() {
		tq = &manualQueue{
			t: t, depth: 2 + rnd.IntN(records), noWrites: func() bool { return held }, refuses: func() bool { return rnd.IntN(100) == 0 },
			paused: func(nsid uint32) bool { return spaces[nsid-1].geometry.Load().paused != nil },
		}
		held = rnd.IntN(2) == 0
		io.resume(tq, tq.depth-1, !held)
	}
	lose := func() {
		tq.ended = true
		if rnd.IntN(2) == 0 { // requests may come before anybody has noticed
			io.wake()
		}
		io.hold()
		for len(tq.under) > 0 {
			r := tq.take(rnd)
			r.Err = &transport.LostError{Cause: errCut}
			r.Owner.(*command).tr.Done(r)
		}
		io.tookWrites()
		tq = nil
	}
	complete := func(s nvme.StatusCode) {
		if !connected() || len(tq.under) == 0 {
			return
		}
		r := tq.take(rnd)
		c := r.Owner.(*command)
		cmd := (*nvme.Command)(&r.Command)
		if s.OK() {
			m := c.req.Owner.(*modelRequest)
			switch m.Op {
			case blockdev.WriteZeroes:
				m.bytes += int64(cmd.Blocks()) << 9
			case blockdev.Discard:
				for i := range cmd.Ranges() {
					rg, _ := nvme.ParseRange(r.Data[i*nvme.RangeSize:])
					m.bytes += int64(rg.Blocks) << 9
				}
			default:
				m.bytes += int64(len(r.Data))
			}
		}
		r.Err = nil
		(*nvme.Completion)(&r.Completion).Fill(0, 0, 0, 0, s)
		r.Done(r)
	}
	for range 400 {
		switch x := rnd.IntN(103); {
		case x < 40:
			m := &modelRequest{}
			m.Op, m.Off, m.Owner = blockdev.Op(rnd.IntN(5)), int64(rnd.IntN(1000))<<9, m
			m.Len = int64(1+rnd.IntN(400)) << 9
			m.Data = data[:512*(1+rnd.IntN(len(data)/512))]
			m.Done = func(r *blockdev.Request) {
				m.ended++
				for _, c := range io.commands {
					if c.req == r {
						t.Error("ended with parts under way")
					}
				}
			}
			all = append(all, m)
			spaces[rnd.IntN(len(spaces))].Queue(0).Submit(&m.Request)
		case x < 80:
			complete(0)
		case x < 84:
			complete(nvme.StatusNamespaceNotReady)
		case x < 86:
			complete(nvme.StatusUnrecoveredRead)
		case x < 89:
			if connected() {
				lose()
			}
		case x < 93:
			if !connected() {
				connect()
			}
		case x < 95:
			if held && connected() {
				held = false
				io.releaseWrites()
			}
		case x < 97:
			limit := uint32(1000)
			if rnd.IntN(4) == 0 {
				limit = 2
			}
			if io.advanceClock(limit) {
				lose()
			}
		case x < 98:
			if !connected() {
				io.abandon(blockdev.ErrLost)
			}
		case x < 99:
			i := rnd.IntN(len(spaces))
			n := spaces[i]
			n.closed.Store(true)
			n.refuse(blockdev.ErrClosed)
			drained := io.remove(&n.queues[0], blockdev.ErrClosed)
			open(i)
			defer func() {
				select {
				case <-drained:
				default:
					t.Error("a closed namespace has requests")
				}
			}()
		case x < 100:
			io.retryNow()
		case x < 102:
			if n := spaces[rnd.IntN(len(spaces))]; n.Err() == nil {
				n.pause(blockdev.ErrLost, time.Time{})
			}
		default:
			if n := spaces[rnd.IntN(len(spaces))]; rnd.IntN(4) > 0 {
				resume(n)
			} else if n.geometry.Load().paused != nil { // for too long
				n.refuse(blockdev.ErrLost)
				n.wake()
			}
		}
	}
	for _, n := range spaces {
		resume(n)
	}
	if !connected() {
		connect()
	}
	held = false
	io.releaseWrites()
	for range 100000 {
		if len(tq.under) == 0 && io.again == nil {
			break
		}
		complete(0)
		io.advanceClock(1000)
	}
	for _, m := range all {
		want := m.Bytes()
		switch {
		case m.ended != 1:
			t.Error(m.Op, "ended", m.ended, "times")
		case m.Err == nil && m.bytes != want:
			t.Error(m.Op, "of", want, "bytes ended after", m.bytes)
		case m.Err != nil && !errors.Is(m.Err, blockdev.ErrLost) && !errors.Is(m.Err, blockdev.ErrMedia) &&
			!errors.Is(m.Err, blockdev.ErrClosed) &&
			!errors.Is(m.Err, nvme.StatusNamespaceNotReady) && !errors.Is(m.Err, errRefused):
			t.Error(m.Err)
		}
	}
	free := 0
	for c := io.free; c != nil; c = c.next {
		free++
	}
	if free != records || len(io.commands) != records || io.parked != 0 || len(io.ranges) != ranges || io.backlog != nil || io.inFlight != 0 {
		t.Errorf("%d records, %d range buffers free, %d in flight", free, len(io.ranges), io.inFlight)
	}
}
