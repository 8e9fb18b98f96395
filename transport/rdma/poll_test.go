package rdma

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"farblk/transport"
	"farblk/transport/verbs"
)

// TestOnlySends: a batch of nothing but send completions ends no command, and yet is no empty completion queue.
func TestOnlySends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 256}, Options{})
		far := f.far()
		var rec recorder
		first := rec.request(nil, transport.None)
		submit(t, q, first)
		q.Poll(-1)
		wr := far.take(t, 0)
		far.completeSend(wr)
		synctest.Wait() // the event woke the queue's goroutine, which left the rest to the queue's owner
		far.answer(cidOf(wr), 0)
		for rec.count(first) == 0 {
			q.Poll(-1)
		}
		for range 255 {
			submit(t, q, rec.request(nil, transport.None))
		}
		q.Kick()
		far.completeAll()
		for q.Poll(0) > 0 {
		}
		synctest.Wait()
		if n := q.Outstanding(); n != 0 {
			t.Errorf("%d commands were answered and nobody noticed", n)
		}
	})
}

// TestAnsweredBeforeTheEnd: what the target answered before it hung up is no loss, however much it was, whoever
// noticed the end, and even without the send's own completion.
func TestAnsweredBeforeTheEnd(t *testing.T) {
	for name, end := range map[string]func(*fake, transport.Queue){
		"hung up": func(f *fake, _ transport.Queue) { f.conns[0].cut(verbs.ErrDisconnected) },
		"failed":  func(_ *fake, q transport.Queue) { q.Fail(errors.New("timed out")) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 128}, Options{})
			var rec recorder
			answered, lost := make([]*transport.Request, 100), rec.request(nil, transport.None)
			for i := range answered {
				answered[i] = rec.request(nil, transport.None)
				submit(t, q, answered[i])
			}
			q.Kick()
			busy := &q.(*queue).pollMu // nobody looks before the end
			busy.Lock()
			far := f.far()
			unsent := far.take(t, 0)
			far.completeAll()
			far.answer(cidOf(unsent), 0)
			submit(t, q, lost)
			end(f, q)
			busy.Unlock()
			_ = q.Close()
			for i, r := range answered {
				if rec.count(r) != 1 || r.Err != nil {
					t.Errorf("answered request %d ended %d times, with %v", i, rec.count(r), r.Err)
				}
			}
			if rec.count(lost) != 1 || !lostWith[error](lost.Err) {
				t.Errorf("the request without an answer ended with %v", lost.Err)
			}
		})
	}
}

// TestNoLostWakeUp mixes users that poll, users that only kick, and the queue's own goroutine, with a far end
// that answers at once or from a goroutine of its own: a completion that nobody notices ends the test.
func TestNoLostWakeUp(t *testing.T) {
	for _, c := range []struct{ depth, users, burst int }{{8, 1, 1}, {8, 2, 1}, {8, 4, 1}, {256, 1, 255}, {256, 4, 63}} {
		for _, auto := range []bool{true, false} {
			t.Run(fmt.Sprintf("depth=%d,users=%d,burst=%d,auto=%v", c.depth, c.users, c.burst, auto), func(t *testing.T) {
				f := newFake()
				_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: c.depth}, Options{})
				far := f.far()
				far.auto = auto
				stop := make(chan struct{})
				var answering, wg sync.WaitGroup
				if !auto {
					answering.Go(func() { far.answerAll(stop) })
				}
				for user := range c.users {
					wg.Go(func() { useQueue(t, q, user, c.burst) })
				}
				wg.Wait()
				close(stop)
				answering.Wait()
			})
		}
	}
}

// useQueue runs commands, burst at a time, in the manner of the exports: some kick, some poll until they get 0, some
// look first and keep the queue.
func useQueue(t *testing.T, q transport.Queue, user, burst int) {
	done := make(chan struct{}, burst)
	reqs := make([]transport.Request, burst)
	late := time.NewTimer(0)
	for i := range 6000/burst + 200 {
		for j := range reqs {
			reqs[j].Done = func(*transport.Request) { done <- struct{}{} }
			if err := q.Submit(&reqs[j]); err != nil { // the slots are enough for all
				t.Errorf("user %d: command %d: %v", user, i, err)
				return
			}
		}
		switch {
		case user%3 == 2 && i%2 == 0:
			q.Kick()
		default:
			for k := i % 5; k > 0 && len(done) < burst; k-- {
				q.Poll(-1)
			}
			for q.Poll(time.Duration(i%3)*time.Microsecond) > 0 {
			}
		}
		late.Reset(time.Minute)
		for range burst {
			select {
			case <-done:
			case <-late.C:
				t.Errorf("user %d: command %d was completed and nobody noticed", user, i)
				q.Fail(errors.New("lost wake-up"))
				return
			}
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
