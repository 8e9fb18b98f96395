package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"farblk/transport"
	"farblk/transport/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func submit(t *testing.T, q transport.Queue, r *transport.Request) {
	t.Helper()
	if err := q.Submit(r); err != nil {
		t.Fatal(err)
	}
}

func TestCommandCapsule(t *testing.T) {
	f := newFake()
	_, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 8, InCapsule: 4096}, Options{})
	var rec recorder
	read := rec.request(mem[4096:4096+8192], transport.ToHost)
	for i := range read.Command {
		read.Command[i] = byte(i)
	}
	write := rec.request(mem[65536:65536+8192], transport.ToController)
	none := rec.request(nil, transport.None)
	for _, r := range []*transport.Request{read, write, none} {
		submit(t, q, r)
	}
	q.Kick()
	far := f.far()
	if n := q.Counters().Doorbells; n != 1 {
		t.Errorf("%d doorbells for one chain", n)
	}
	for i, c := range []struct {
		key    uint32
		length uint32
	}{{0x1000 + uint32(verbs.LocalWrite|verbs.RemoteWrite), 8192}, {0x1000 + uint32(verbs.RemoteRead), 8192}, {0, 0}} {
		wr := far.take(t, 0)
		b := wr.SGEs[0].Data
		if len(b) != 64 || wr.NumSGE != 1 || wr.Flags&verbs.Signaled == 0 {
			t.Errorf("command %d: %d bytes, %d elements", i, len(b), wr.NumSGE)
		}
		if b[1]&0xC0 != 0x40 {
			t.Errorf("command %d: flags %#x", i, b[1])
		}
		if b[39] != 0x40 {
			t.Errorf("command %d: descriptor type %#x, want 40h", i, b[39])
		}
		if key := binary.LittleEndian.Uint32(b[35:]); key != c.key {
			t.Errorf("command %d: key %#x, want %#x", i, key, c.key)
		}
		if n := binary.LittleEndian.Uint32(b[32:]) & 0xFFFFFF; n != c.length {
			t.Errorf("command %d: length %d, want %d", i, n, c.length)
		}
		if i == 0 && (b[0] != 0 || b[4] != 4 || b[63] != 63 || b[40] != 40) {
			t.Errorf("the caller's fields changed: % x", b)
		}
	}
}

func TestCaseH26InCapsuleWrite(t *testing.T) {
	f := newFake()
	_, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 32, InCapsule: 4096}, Options{})
	var rec recorder
	for _, n := range []int{1, 511, 512, 513, 4095, 4096} {
		submit(t, q, rec.request(mem[512:512+n], transport.ToController))
		q.Kick()
		wr := f.far().take(t, 0)
		b := wr.SGEs[0].Data
		if wr.NumSGE != 2 || len(wr.SGEs[1].Data) != n || &wr.SGEs[1].Data[0] != &mem[512] {
			t.Errorf("%d bytes: not gathered from the caller's buffer", n)
		}
		if b[39] != 0x01 || binary.LittleEndian.Uint32(b[32:]) != uint32(n) {
			t.Errorf("%d bytes: descriptor % x", n, b[24:40])
		}
		if off := binary.LittleEndian.Uint64(b[24:]); off != 0 {
			t.Errorf("in-capsule offset %d, want 0", off)
		}
	}
	submit(t, q, rec.request(mem[:4097], transport.ToController))
	submit(t, q, rec.request(mem[:512], transport.ToHost))
	q.Kick()
	for range 2 {
		if wr := f.far().take(t, 0); wr.NumSGE != 1 || wr.SGEs[0].Data[39] != 0x40 {
			t.Errorf("not by key: % x", wr.SGEs[0].Data[24:40])
		}
	}
	if n := q.Counters().InCapsule; n != 6 {
		t.Errorf("%d commands counted as in-capsule, want 6", n)
	}
}

// TestKeyPerCommand: the target never has a key to more than the data of a command under way, from the admin queue's
// first command on.
func TestKeyPerCommand(t *testing.T) {
	for id := range uint16(2) {
		f := newFake()
		a, q, mem := open(t, f, transport.QueueParams{ID: id, Depth: 2}, Options{KeyPerCommand: true})
		for _, mr := range []verbs.MR{a.(*association).toHost, a.(*association).toController} {
			if access := mr.(*fakeMR).access; access&^verbs.LocalWrite != 0 {
				t.Errorf("the whole region is open to the target, access %#x", access)
			}
		}
		var rec recorder
		var last uint32
		for i := range 4 {
			r := rec.request(mem[:8192], transport.ToHost+transport.Direction(i%2))
			submit(t, q, r)
			q.Kick()
			wr := f.far().take(t, 0)
			b := wr.SGEs[0].Data
			key := binary.LittleEndian.Uint32(b[35:])
			w := q.(*queue).slots[0].window
			if w == nil || key == last || key != w.(*fakeWindow).key || b[39] != 0x4F {
				t.Fatalf("queue %d: key %#x, type %#x", id, key, b[39])
			}
			last = key
			f.far().completeSend(wr)
			f.far().answer(cidOf(wr), 0)
			for rec.count(r) == 0 {
				q.Poll(time.Millisecond)
			}
			if w.(*fakeWindow).bound {
				t.Error("the key outlived its command")
			}
		}
	}
}

// TestInvalidatedKey: a response may end its own command's key, and no other: whose data would then go where no key
// is, unnoticed.
func TestInvalidatedKey(t *testing.T) {
	for name, c := range map[string]struct {
		data bool   // the command has a key
		key  uint32 // is added to it
		ok   bool
	}{"its own": {true, 0, true}, "another's": {true, 1, false}, "without one": {false, 0, false}} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			_, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 2}, Options{KeyPerCommand: true})
			var rec recorder
			r := rec.request(nil, transport.None)
			if c.data {
				r = rec.request(mem[:4096], transport.ToHost)
			}
			submit(t, q, r)
			q.Kick()
			wr := f.far().take(t, 0)
			far := f.far()
			far.mu.Lock()
			far.sent(wr.ID)
			far.respond(cidOf(wr), 0)
			last := &far.cq[len(far.cq)-1]
			last.Invalidated, last.InvalidatedKey = true, binary.LittleEndian.Uint32(wr.SGEs[0].Data[35:])+c.key
			far.mu.Unlock()
			for rec.count(r) == 0 {
				q.Poll(time.Millisecond)
			}
			if (r.Err == nil) != c.ok || !c.ok && !lostWith[*transport.ProtocolError](q.Err()) {
				t.Errorf("the request ended with %v, the queue with %v", r.Err, q.Err())
			}
		})
	}
}

func TestCaseH36SlotNeedsBothEnds(t *testing.T) {
	f := newFake()
	_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 2}, Options{})
	var rec recorder
	for _, sendFirst := range []bool{true, false} {
		r := rec.request(nil, transport.None)
		submit(t, q, r)
		q.Kick()
		wr := f.far().take(t, 0)
		steps := []func(){func() { f.far().completeSend(wr) }, func() { f.far().answer(cidOf(wr), 7) }}
		if !sendFirst {
			steps[0], steps[1] = steps[1], steps[0]
		}
		steps[0]()
		q.Poll(0)
		if rec.count(r) != 0 || !errors.Is(q.Submit(rec.request(nil, transport.None)), transport.ErrQueueFull) {
			t.Fatalf("sendFirst %v: slot free after one of two", sendFirst)
		}
		steps[1]()
		for rec.count(r) == 0 { // the queue's own goroutine may be at it
			q.Poll(time.Millisecond)
		}
		if r.Err != nil || binary.LittleEndian.Uint64(r.Completion[:]) != 7 {
			t.Errorf("sendFirst %v: err %v completion % x", sendFirst, r.Err, r.Completion)
		}
	}
}

func TestCaseH35WrongCommandID(t *testing.T) {
	for name, wrong := range map[string]func(live, stale uint16) uint16{
		"unknown":        func(uint16, uint16) uint16 { return 0x0FFF },
		"stale":          func(_, stale uint16) uint16 { return stale },
		"not under way":  func(live, _ uint16) uint16 { return live ^ 2 },
		"doubled":        func(live, _ uint16) uint16 { return live },
		"out of the set": func(uint16, uint16) uint16 { return 0xFFFF },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 4}, Options{})
			var rec recorder
			old := rec.request(nil, transport.None)
			submit(t, q, old)
			q.Kick()
			wr := f.far().take(t, 0)
			stale := cidOf(wr)
			f.far().completeSend(wr)
			f.far().answer(stale, 0)
			for rec.count(old) == 0 {
				q.Poll(time.Millisecond)
			}
			a, b := rec.request(nil, transport.None), rec.request(nil, transport.None)
			submit(t, q, a)
			submit(t, q, b)
			q.Kick()
			live := f.far().take(t, 0)
			if name == "doubled" {
				f.far().answer(cidOf(live), 0)
			}
			f.far().answer(wrong(cidOf(live), stale), 0)
			q.Poll(time.Millisecond)
			<-q.Done()
			_ = q.Close()
			if !lostWith[*transport.ProtocolError](q.Err()) {
				t.Errorf("the queue ended with %v", q.Err())
			}
			for _, r := range []*transport.Request{a, b} {
				if rec.count(r) != 1 || r.Err == nil {
					t.Errorf("a live request was completed %d times, err %v", rec.count(r), r.Err)
				}
			}
			if rec.count(old) != 1 {
				t.Error("an ended request was touched")
			}
		})
	}
}

func TestCaseH37AnyOrder(t *testing.T) {
	f := newFake()
	_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 9}, Options{})
	var rec recorder
	var reqs [8]*transport.Request
	for i := range reqs {
		reqs[i] = rec.request(nil, transport.None)
		reqs[i].Command[40] = byte(i)
		submit(t, q, reqs[i])
	}
	q.Kick()
	far := f.far()
	for n := len(reqs); n > 0; n-- {
		wr := far.take(t, rand.IntN(n))
		far.completeSend(wr)
		far.answer(cidOf(wr), uint64(wr.SGEs[0].Data[40])+100)
	}
	for q.Outstanding() > 0 {
		q.Poll(time.Millisecond)
	}
	for i, r := range reqs {
		if got := binary.LittleEndian.Uint64(r.Completion[:]); rec.count(r) != 1 || got != uint64(i)+100 {
			t.Errorf("request %d: completed %d times with %d", i, rec.count(r), got)
		}
	}
}

func TestCaseH20EveryExitReturnsItsSlot(t *testing.T) {
	f := newFake()
	mem := region(t, 1<<16)
	a, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, mem)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 1000 {
		q, err := a.OpenQueue(context.Background(), transport.QueueParams{ID: 1, Depth: 16})
		if err != nil {
			t.Fatal(err)
		}
		var ended atomic.Int32
		count := func(r *transport.Request) { ended.Add(1) }
		submitted := int32(0)
		far := f.far()
		for range 15 {
			if q.Submit(&transport.Request{Data: mem[:512], Direction: transport.ToHost, Done: count}) == nil {
				submitted++
			}
			if rand.IntN(3) == 0 {
				q.Kick()
			}
			if rand.IntN(3) == 0 {
				far.mu.Lock()
				if len(far.sends) > 0 {
					far.sent(far.sends[0].ID)
					if rand.IntN(2) == 0 {
						far.respond(cidOf(far.sends[0]), 0)
					}
					far.sends = far.sends[1:]
				}
				far.mu.Unlock()
			}
		}
		switch round % 4 {
		case 0:
			f.conns[len(f.conns)-1].cut(verbs.ErrDisconnected)
		case 1:
			q.Fail(errors.New("timed out"))
		case 2:
			far.mu.Lock()
			far.cq = append(far.cq, verbs.Completion{ID: 0, Op: verbs.OpSend, Status: verbs.StatusRetryExceeded})
			far.notify()
			far.mu.Unlock()
			q.Poll(0)
		}
		_ = q.Close()
		if ended.Load() != submitted || q.Outstanding() != 0 {
			t.Fatalf("round %d: %d of %d requests ended", round, ended.Load(), submitted)
		}
		if err := q.Submit(&transport.Request{}); err == nil {
			t.Fatal("a closed queue took a command")
		}
	}
	_ = a.Close()
	if f.live != 0 {
		t.Errorf("%d verbs objects left", f.live)
	}
}
