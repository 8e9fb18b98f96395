package blockdevtest

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"farblk/blockdev"
)

// load is one of several goroutines' requests, on an area of their own, all under way at once.
type load struct {
	t     *testing.T
	q     blockdev.Queue
	polls bool // else it waits for what the device's own goroutine does
	reqs  []*blockdev.Request
	calls []atomic.Int32 // of Done, by request
	batch sync.WaitGroup
}

func newLoad(t *testing.T, d blockdev.Device, number, depth int) (*load, error) {
	n := max(4096, d.Info().BlockSize)
	l := &load{t: t, q: d.Queue(number), polls: number%2 == 1, calls: make([]atomic.Int32, depth)}
	for i := range depth {
		b, err := d.Pool().Lease(context.Background(), n)
		if err != nil {
			l.release(d)
			return nil, err
		}
		l.reqs = append(l.reqs, &blockdev.Request{Off: int64(number*depth+i) * int64(n), Data: b, Done: func(*blockdev.Request) {
			l.calls[i].Add(1)
			l.batch.Done()
		}})
	}
	return l, nil
}

func (l *load) release(d blockdev.Device) {
	for _, r := range l.reqs {
		d.Pool().Release(r.Data)
	}
}

// run does all requests at once, and says whether they went well.
func (l *load) run(op blockdev.Op) bool {
	l.batch.Add(len(l.reqs))
	for i, r := range l.reqs {
		r.Op = op
		l.calls[i].Store(0)
		l.q.Submit(r)
	}
	if l.polls {
		for l.q.Poll(100*time.Microsecond) > 0 {
		}
	}
	l.q.Kick() // also after polling: another poller may have been at it
	done := make(chan struct{})
	go func() { l.batch.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(limit):
		l.t.Error("requests were lost")
		return false
	}
	for i, r := range l.reqs {
		if c := l.calls[i].Load(); c != 1 || r.Err != nil {
			l.t.Errorf("%v: Done called %d times, %v", op, c, r.Err)
			return false
		}
	}
	return true
}

// round writes content of its own, reads it back, and compares.
func (l *load) round(number byte) bool {
	for _, r := range l.reqs {
		fill(r.Data, r.Off, number)
	}
	if !l.run(blockdev.Write) {
		return false
	}
	for _, r := range l.reqs {
		clear(r.Data)
	}
	if !l.run(blockdev.Read) {
		return false
	}
	want := make([]byte, len(l.reqs[0].Data))
	for _, r := range l.reqs {
		if fill(want, r.Off, number); !bytes.Equal(r.Data, want) {
			l.t.Errorf("round %d: data at %d differ", number, r.Off)
			return false
		}
	}
	return true
}

// testConcurrent keeps many requests under way on all queues, from several goroutines, half of which poll.
func testConcurrent(t *testing.T, d blockdev.Device) {
	if d.Info().ReadOnly {
		t.Skip("read-only")
	}
	const workers, depth, rounds = 4, 16, 40
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			l, err := newLoad(t, d, w, depth)
			if err != nil {
				t.Error(err)
				return
			}
			defer l.release(d)
			for round := range rounds {
				if !l.round(byte(round)) {
					return
				}
			}
		})
	}
	all.Wait()
}

// testSubmitFromDone has a chain of requests of which each is started by the completion of the one before.
func testSubmitFromDone(t *testing.T, d blockdev.Device) {
	q := d.Queue(0)
	done, left := make(chan struct{}), 100
	r := &blockdev.Request{Op: blockdev.Read, Data: lease(t, d, d.Info().BlockSize)}
	defer d.Pool().Release(r.Data)
	r.Done = func(r *blockdev.Request) {
		if left--; left == 0 || r.Err != nil {
			close(done)
			return
		}
		q.Submit(r)
		q.Kick()
	}
	q.Submit(r)
	q.Kick()
	wait(t, done)
	if r.Err != nil {
		t.Error(r.Err)
	}
}

func testPoll(t *testing.T, d blockdev.Device) {
	for i := range d.Queues() {
		start := time.Now()
		if n := d.Queue(i).Poll(limit); n != 0 {
			t.Errorf("Poll of an idle queue completed %d", n)
		}
		if e := time.Since(start); e > limit/2 {
			t.Errorf("Poll of an idle queue took %v", e)
		}
		d.Queue(i).Kick()
	}
}

// testPoolExhausted checks that a lessee waits while all is leased, and that every byte comes back.
func testPoolExhausted(t *testing.T, d blockdev.Device) {
	p := d.Pool()
	var out [][]byte
	for n := blockdev.MaxLease; n >= blockdev.PageSize; n /= 2 {
		for b := p.TryLease(n); b != nil; b = p.TryLease(n) {
			out = append(out, b)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := p.Lease(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("lease of an exhausted pool: %v", err)
	}
	got := make(chan []byte)
	go func() {
		b, _ := p.Lease(context.Background(), 1)
		got <- b
	}()
	for _, b := range out {
		p.Release(b)
	}
	b := <-got
	if b == nil {
		t.Fatal("no lease after all was released")
	}
	p.Release(b)
}

// testClose closes a device with requests under way.
func testClose(t *testing.T, d blockdev.Device) {
	info, p := d.Info(), d.Pool()
	const depth = 64
	var calls [depth]atomic.Int32
	var under sync.WaitGroup
	under.Add(depth)
	for i := range depth {
		b := lease(t, d, info.BlockSize)
		r := &blockdev.Request{Op: blockdev.Read, Data: b, Done: func(*blockdev.Request) {
			if calls[i].Add(1) == 1 {
				p.Release(b)
				under.Done()
			}
		}}
		d.Queue(i).Submit(r)
		if i%2 == 0 {
			d.Queue(i).Kick()
		}
	}
	if err := d.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	done := make(chan struct{})
	go func() { under.Wait(); close(done) }()
	wait(t, done)
	for i := range calls {
		if n := calls[i].Load(); n != 1 {
			t.Errorf("Done of request %d was called %d times", i, n)
		}
	}
	if err := do(t, d, 0, &blockdev.Request{Op: blockdev.Flush}); err == nil {
		t.Error("a closed device carried out a flush")
	}
	if _, err := p.Lease(context.Background(), 1); !errors.Is(err, blockdev.ErrPoolClosed) {
		t.Errorf("lease from a closed pool: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}
