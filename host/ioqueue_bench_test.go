package host

import (
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// instantQueue completes what was submitted at the next Poll, at no cost of its own.
type instantQueue struct {
	pending []*transport.Request
}

func (q *instantQueue) Submit(r *transport.Request) error {
	q.pending = append(q.pending, r)
	return nil
}

func (q *instantQueue) Poll(time.Duration) int {
	n := len(q.pending)
	for _, r := range q.pending {
		r.Done(r)
	}
	q.pending = q.pending[:copy(q.pending, q.pending[n:])]
	return n
}
func (q *instantQueue) Kick()                        {}
func (q *instantQueue) Outstanding() int             { return len(q.pending) }
func (q *instantQueue) Done() <-chan struct{}        { return nil }
func (q *instantQueue) Err() error                   { return nil }
func (q *instantQueue) Fail(error)                   {}
func (q *instantQueue) Close() error                 { return nil }
func (q *instantQueue) Counters() transport.Counters { return transport.Counters{} }

// instantNamespace is a namespace of 1 GiB on one instant queue for depth-1 commands.
func instantNamespace(tb testing.TB, depth int) *Namespace {
	io := newIOQueue(depth-1, [][]byte{make([]byte, nvme.MaxRanges*nvme.RangeSize)})
	n := newNamespace(&Controller{}, 1, []*ioQueue{io})
	id := &nvme.IdentifyNamespace{NSZE: 1 << 21}
	id.LBAF[0].LBADS = 9
	g, err := newGeometry(&limits{maxTransfer: 128 << 10, writeCache: true, discard: true, writeZeroes: true}, 1, id)
	if err != nil {
		tb.Fatal(err)
	}
	n.update(g, &found{nsid: 1, id: id})
	io.resume(&instantQueue{}, depth-1, true)
	return n
}

func benchmark(b *testing.B, batch int, r blockdev.Request) {
	n := instantNamespace(b, 128)
	q := n.Queue(0)
	requests := make([]blockdev.Request, batch)
	done := 0
	for i := range requests {
		requests[i] = r
		requests[i].Done = func(*blockdev.Request) { done++ }
	}
	b.ReportAllocs()
	for i := 0; i < b.N; i += batch {
		for j := range requests {
			q.Submit(&requests[j])
		}
		for q.Poll(0) > 0 {
		}
	}
	if done < b.N {
		b.Fatal(done, "of", b.N)
	}
}

// The cost of one request, submit to completion, without the transport.
func BenchmarkRead4K(b *testing.B) {
	benchmark(b, 32, blockdev.Request{Op: blockdev.Read, Off: 4096, Data: make([]byte, 4096)})
}

func BenchmarkReadQueued(b *testing.B) { // more than there are records
	benchmark(b, 512, blockdev.Request{Op: blockdev.Read, Off: 4096, Data: make([]byte, 4096)})
}

func BenchmarkRead1MSplit(b *testing.B) {
	benchmark(b, 32, blockdev.Request{Op: blockdev.Read, Data: make([]byte, 1<<20)})
}

func BenchmarkDiscard(b *testing.B) {
	benchmark(b, 32, blockdev.Request{Op: blockdev.Discard, Len: 1 << 30})
}

func TestNoAllocations(t *testing.T) {
	n := instantNamespace(t, 8)
	q := n.Queue(0)
	requests := make([]blockdev.Request, 64)
	data := make([]byte, 1<<20)
	done := 0
	for i := range requests {
		requests[i] = blockdev.Request{Op: blockdev.Op(i % 5), Data: data[:4096<<(i%8)], Done: func(*blockdev.Request) { done++ }}
		if requests[i].Op >= blockdev.Discard {
			requests[i].Len = 1 << 30
		}
	}
	run := func() {
		for i := range requests {
			q.Submit(&requests[i])
		}
		for q.Poll(0) > 0 {
		}
	}
	if n := testing.AllocsPerRun(20, run); n > 0 {
		t.Error(n, "allocations")
	}
	if done != 21*len(requests) {
		t.Error(done, "requests done")
	}
	for i := range requests {
		if err := requests[i].Err; err != nil {
			t.Error(requests[i].Op, err)
		}
	}
}
