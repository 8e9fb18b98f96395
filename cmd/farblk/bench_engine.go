package main

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// benchJob is what to measure.
type benchJob struct {
	Mode   string        // read, write, randread, randwrite, randrw
	Block  int           // bytes
	Depth  int           // requests under way on each queue
	Queues int           //
	Time   time.Duration // how long
	Reads  int           // per cent of randrw that reads
	Size   int64         // bytes of the device to use, from its start; a multiple of Block
}

func (j *benchJob) writes() bool { return j.Mode != "read" && j.Mode != "randread" }
func (j *benchJob) random() bool { return j.Mode != "read" && j.Mode != "write" }

// benchWorker keeps Depth requests under way on one queue. Requests come back on whichever goroutine polls the
// queue, as a rule the worker's own; it puts them on again, so that nothing waits for a hand-over, and reads the
// clock once for all that one poll brings.
//
// Lock: mu guards the rest; the worker's goroutine holds it only between polls.
type benchWorker struct {
	job   *benchJob
	queue blockdev.Queue

	mu       sync.Mutex
	ready    []*benchRequest // completed, to be counted and sent again
	spare    []*benchRequest
	random   uint64
	next     int64 // block of a sequential job
	first    int64 // blocks of this worker: first to first+blocks-1
	blocks   int64
	reads    uint64
	writes   uint64
	latency  *hdrhistogram.Histogram // ns
	err      error
	inFlight int
}

type benchRequest struct {
	blockdev.Request
	start time.Duration // since the job's epoch
}

// The histogram's range in nanoseconds, and its precision: three digits.
const (
	benchLowest  = 100
	benchHighest = int64(2 * time.Minute)
	benchDigits  = 3
)

// newBenchWorker leases the buffers of worker i.
func newBenchWorker(d blockdev.Device, j *benchJob, i int) (*benchWorker, error) {
	total := j.Size / int64(j.Block)
	w := &benchWorker{
		job: j, queue: d.Queue(i), random: 0x9E3779B97F4A7C15 * uint64(i+1),
		first: total * int64(i) / int64(j.Queues), latency: hdrhistogram.New(benchLowest, benchHighest, benchDigits),
	}
	w.blocks = total*int64(i+1)/int64(j.Queues) - w.first
	if j.random() {
		w.first, w.blocks = 0, total
	}
	if w.blocks < 1 {
		return nil, fmt.Errorf("%d bytes are too few for %d queues with blocks of %d", j.Size, j.Queues, j.Block)
	}
	for range j.Depth {
		r := &benchRequest{}
		r.Data = d.Pool().TryLease(j.Block)
		if r.Data == nil {
			w.release(d.Pool())
			return nil, errors.New("the pool is too small for that many requests of that size: use a larger --pool-size")
		}
		for k := 0; k+8 <= len(r.Data); k += 8 { // nothing that compresses
			x := w.rand()
			for b := range 8 {
				r.Data[k+b] = byte(x >> (8 * b))
			}
		}
		r.Done = w.done
		r.Owner = r
		w.spare = append(w.spare, r)
	}
	w.ready = make([]*benchRequest, 0, j.Depth)
	return w, nil
}

func (w *benchWorker) release(p *blockdev.Pool) {
	for _, r := range w.spare {
		p.Release(r.Data)
	}
	w.spare = nil
}

// rand is xorshift64* (Marsaglia; Vigna): cheap, and good enough to choose blocks.
func (w *benchWorker) rand() uint64 {
	w.random ^= w.random >> 12
	w.random ^= w.random << 25
	w.random ^= w.random >> 27
	return w.random * 0x2545F4914F6CDD1D
}

func (w *benchWorker) done(r *blockdev.Request) {
	w.mu.Lock()
	w.ready = append(w.ready, r.Owner.(*benchRequest))
	w.mu.Unlock()
}

// fill chooses what r does next. mu is held.
func (w *benchWorker) fill(r *benchRequest) {
	var block int64
	if w.job.random() {
		hi, _ := bits.Mul64(w.rand(), uint64(w.blocks))
		block = int64(hi)
	} else {
		block = w.next
		w.next++
		if w.next == w.blocks {
			w.next = 0
		}
	}
	r.Off = (w.first + block) * int64(w.job.Block)
	r.Op = blockdev.Read
	switch w.job.Mode {
	case "write", "randwrite":
		r.Op = blockdev.Write
	case "randrw":
		if int(w.rand()>>33%100) >= w.job.Reads {
			r.Op = blockdev.Write
		}
	}
}

// run works until stop is set, then until nothing is under way.
func (w *benchWorker) run(epoch time.Time, stop *atomic.Bool) {
	w.mu.Lock()
	w.ready = append(w.ready, w.spare...)
	w.spare = w.spare[:0]
	fresh := len(w.ready)
	batch := make([]*benchRequest, 0, w.job.Depth)
	w.mu.Unlock()
	idle := 0
	for {
		w.mu.Lock()
		batch = append(batch[:0], w.ready...)
		w.ready = w.ready[:0]
		w.mu.Unlock()
		now := time.Since(epoch)
		ending := stop.Load()
		w.inFlight -= len(batch) - fresh
		for _, r := range batch {
			if fresh > 0 {
				fresh--
			} else if !w.count(r, now, stop) {
				ending = true
			}
			if ending {
				w.spare = append(w.spare, r)
				continue
			}
			w.fill(r)
			r.start = now
			w.inFlight++
			w.queue.Submit(&r.Request)
		}
		if w.inFlight == 0 {
			return
		}
		if w.queue.Poll(time.Millisecond) > 0 {
			idle = 0
		} else if idle++; idle > 100 {
			// Somebody else polls, or the connection is lost: leave the processor to whoever mends that.
			time.Sleep(100 * time.Microsecond)
		}
	}
}

// count records a completed request.
func (w *benchWorker) count(r *benchRequest, now time.Duration, stop *atomic.Bool) bool {
	if r.Err != nil {
		if w.err == nil {
			w.err = fmt.Errorf("%s of %d bytes at %d: %w", r.Op, len(r.Data), r.Off, r.Err)
		}
		stop.Store(true)
		return false
	}
	if r.Op == blockdev.Write {
		w.writes++
	} else {
		w.reads++
	}
	_ = w.latency.RecordValue(min(int64(now-r.start), benchHighest)) // only fails outside its range
	return true
}

// latencies are in microseconds.
type latencies struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99_9"`
	Max  float64 `json:"max"`
}

// benchResult is what was measured.
type benchResult struct {
	Mode      string    `json:"rw"`
	Block     int       `json:"bs"`
	Depth     int       `json:"qd"`
	Queues    int       `json:"queues"`
	Seconds   float64   `json:"seconds"`
	Reads     uint64    `json:"reads"`
	Writes    uint64    `json:"writes"`
	IOPS      float64   `json:"iops"`
	Bandwidth float64   `json:"bandwidth"` // bytes a second
	Latency   latencies `json:"latency_us"`
	CPU       float64   `json:"cpu_percent"` // of one processor, by this process
}

// benchDevice runs j on d. The device must be a multiple of j.Block long, or longer than j.Size.
func benchDevice(d blockdev.Device, j *benchJob, interrupted <-chan struct{}) (*benchResult, error) {
	workers := make([]*benchWorker, j.Queues)
	defer func() {
		for _, w := range workers {
			if w != nil {
				w.release(d.Pool())
			}
		}
	}()
	for i := range workers {
		var err error
		if workers[i], err = newBenchWorker(d, j, i); err != nil {
			return nil, err
		}
	}
	return measure(j, interrupted, len(workers), func(i int, epoch time.Time, stop *atomic.Bool) {
		workers[i].run(epoch, stop)
	}, func(i int) (reads, writes uint64, h *hdrhistogram.Histogram, err error) {
		return workers[i].reads, workers[i].writes, workers[i].latency, workers[i].err
	})
}

// measure runs n workers for j.Time and adds up what they have counted.
func measure(j *benchJob, interrupted <-chan struct{}, n int, run func(i int, epoch time.Time, stop *atomic.Bool),
	counted func(i int) (reads, writes uint64, h *hdrhistogram.Histogram, err error),
) (*benchResult, error) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	finished := make(chan struct{})
	cpu := cpuTime()
	epoch := time.Now()
	for i := range n {
		wg.Go(func() { run(i, epoch, &stop) })
	}
	go func() {
		wg.Wait()
		close(finished)
	}()
	timer := time.NewTimer(j.Time)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-interrupted:
	case <-finished: // an error
	}
	stop.Store(true)
	<-finished
	seconds := time.Since(epoch).Seconds()
	r := &benchResult{Mode: j.Mode, Block: j.Block, Depth: j.Depth, Queues: j.Queues, Seconds: seconds}
	r.CPU = (cpuTime() - cpu).Seconds() / seconds * 100
	all := hdrhistogram.New(benchLowest, benchHighest, benchDigits)
	for i := range n {
		reads, writes, h, err := counted(i)
		if err != nil {
			return nil, err
		}
		r.Reads += reads
		r.Writes += writes
		all.Merge(h)
	}
	r.IOPS = float64(r.Reads+r.Writes) / seconds
	r.Bandwidth = r.IOPS * float64(j.Block)
	us := func(ns float64) float64 { return ns / 1000 }
	r.Latency = latencies{
		Mean: us(all.Mean()), P50: us(float64(all.ValueAtQuantile(50))), P99: us(float64(all.ValueAtQuantile(99))),
		P999: us(float64(all.ValueAtQuantile(99.9))), Max: us(float64(all.Max())),
	}
	return r, nil
}

// cpuTime is the processor time that this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
