package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
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

func TestConnectionRequestLayout(t *testing.T) {
	f := newFake()
	open(t, f, transport.QueueParams{ID: 3, Depth: 128, ControllerID: 0x1234}, Options{})
	want := make([]byte, 32)
	copy(want[2:], []byte{3, 0, 128, 0, 127, 0, 0x34, 0x12})
	if got := f.requests[0].PrivateData; string(got) != string(want) {
		t.Errorf("private data % x, want % x", got, want)
	}
}

func TestCaseH01StaleIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		stale := &verbs.RejectError{Reason: 10}
		f.refuse = []error{stale, stale}
		a, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, make([]byte, 4096))
		if err != nil {
			t.Fatal(err)
		}
		q, err := a.OpenQueue(context.Background(), transport.QueueParams{Depth: 4})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(f.conns); n != 3 {
			t.Errorf("%d connections were tried, want a fresh one each of 3 times", n)
		}
		_ = q.Close()
		f.refuse = []error{stale, stale, stale, stale, stale, stale, stale}
		if _, err := a.OpenQueue(context.Background(), transport.QueueParams{ID: 1, Depth: 4}); !errors.Is(err, transport.ErrStale) {
			t.Errorf("for ever stale: %v", err)
		}
		_ = a.Close()
		if f.live != 0 {
			t.Errorf("%d verbs objects left", f.live)
		}
	})
}

// inWords checks what becomes of a provider's error: its class, and one line that says words.
func inWords(t *testing.T, err, class error, words string) {
	t.Helper()
	d := NewDialer(newFake(), Options{}).(*dialer)
	addr := transport.Address{Port: 4420, Remote: netip.MustParseAddr("10.0.0.1")}
	got := d.connectError(addr, 0, err)
	if !errors.Is(got, class) || !strings.Contains(got.Error(), words) || strings.Contains(got.Error(), "\n") {
		t.Errorf("%v: %v; want class %v and %q", err, got, class, words)
	}
}

func TestCaseH03NothingListens(t *testing.T) {
	inWords(t, &verbs.RejectError{Reason: 8}, transport.ErrRefused, "nothing listens at 10.0.0.1:4420")
	inWords(t, verbs.ErrRefused, transport.ErrRefused, "nothing listens at 10.0.0.1:4420")
}

func TestRejectionsInWords(t *testing.T) {
	no := func(sts byte) error {
		return &verbs.RejectError{Reason: 28, Consumer: true, PrivateData: []byte{0, 0, sts, 0}}
	}
	inWords(t, no(6), transport.ErrRejected, "no resources for another queue (NVMe/RDMA status 6)")
	inWords(t, no(4), transport.ErrRejected, "invalid host submission queue size")
	inWords(t, verbs.ErrTimeout, transport.ErrTimeout, "check the address")
	inWords(t, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, transport.ErrTimeout, "no answer in time: check")
	inWords(t, &verbs.HandshakeError{Detail: "it spoke HTTP"}, transport.ErrWrongPeer, "it spoke HTTP")
}

func TestCaseH33MemlockSaysTheFix(t *testing.T) {
	f := newFake()
	f.regErr = &verbs.MemlockError{Need: 64 << 20, Limit: 8 << 20}
	_, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, make([]byte, 4096))
	if !errors.Is(err, transport.ErrMemlock) || !strings.Contains(err.Error(), "ulimit -l") {
		t.Errorf("%v", err)
	}
	if f.live != 0 {
		t.Errorf("%d verbs objects left", f.live)
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

func TestKeyPerCommand(t *testing.T) {
	f := newFake()
	_, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 2}, Options{KeyPerCommand: true})
	var rec recorder
	var last uint32
	for range 3 {
		r := rec.request(mem[:8192], transport.ToHost)
		submit(t, q, r)
		q.Kick()
		wr := f.far().take(t, 0)
		b := wr.SGEs[0].Data
		key := binary.LittleEndian.Uint32(b[35:])
		if key == last || b[39] != 0x4F {
			t.Errorf("key %#x, type %#x", key, b[39])
		}
		last = key
		f.far().completeSend(wr)
		f.far().answer(cidOf(wr), 0)
		for rec.count(r) == 0 { // the queue's own goroutine may be at it
			q.Poll(time.Millisecond)
		}
		if w := q.(*queue).slots[0].window.(*fakeWindow); w.bound {
			t.Error("the key outlived its command")
		}
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

// TestNoLostWakeUp mixes users that poll, users that only kick, and the queue's own goroutine, with a far end
// that answers at once or from a goroutine of its own: a completion that nobody notices ends the test.
func TestNoLostWakeUp(t *testing.T) {
	for _, users := range []int{1, 2, 4} {
		for _, auto := range []bool{true, false} {
			t.Run(fmt.Sprintf("users=%d,auto=%v", users, auto), func(t *testing.T) {
				f := newFake()
				_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 8}, Options{})
				far := f.far()
				far.auto = auto
				stop := make(chan struct{})
				var answering, wg sync.WaitGroup
				if !auto {
					answering.Go(func() { far.answerAll(stop) })
				}
				for user := range users {
					wg.Go(func() { useQueue(t, q, user) })
				}
				wg.Wait()
				close(stop)
				answering.Wait()
			})
		}
	}
}

// useQueue runs commands one at a time in the manner of the exports: some kick, some poll until they get 0, some
// look first and keep the queue.
func useQueue(t *testing.T, q transport.Queue, user int) {
	done := make(chan struct{}, 1)
	r := &transport.Request{Done: func(*transport.Request) { done <- struct{}{} }}
	late := time.NewTimer(0)
	for i := range 5000 {
		for q.Submit(r) != nil {
			q.Poll(0)
		}
		switch {
		case user%3 == 2 && i%2 == 0:
			q.Kick()
		default:
			for k := i % 5; k > 0 && len(done) == 0; k-- {
				q.Poll(-1)
			}
			for q.Poll(time.Duration(i%3)*time.Microsecond) > 0 {
			}
		}
		late.Reset(20 * time.Second)
		select {
		case <-done:
		case <-late.C:
			t.Errorf("user %d: command %d was completed and nobody noticed", user, i)
			q.Fail(errors.New("lost wake-up"))
			return
		}
	}
}

func BenchmarkSubmitAndComplete(b *testing.B) {
	f := newFake()
	_, q, mem := open(b, f, transport.QueueParams{ID: 1, Depth: 64}, Options{})
	f.far().auto = true
	reqs := make([]transport.Request, 32)
	for i := range reqs {
		reqs[i] = transport.Request{Data: mem[:4096], Direction: transport.ToHost, Done: func(*transport.Request) {}}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i += len(reqs) {
		for j := range reqs {
			if err := q.Submit(&reqs[j]); err != nil {
				b.Fatal(err)
			}
		}
		for q.Outstanding() > 0 {
			q.Poll(time.Second)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(reqs)), "ns/command")
}
