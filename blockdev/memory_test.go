package blockdev_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemory(t *testing.T) {
	for name, c := range map[string]blockdev.MemoryConfig{
		"inline":  {Size: 8 << 20, BlockSize: 512, Queues: 2, PoolSize: 8 << 20, Latency: -1},
		"polled":  {Size: 8 << 20, BlockSize: 4096, Queues: 3, PoolSize: 8 << 20},
		"latency": {Size: 4<<20 + 512, BlockSize: 512, Queues: 1, PoolSize: 8 << 20, Latency: 20 * time.Microsecond},
	} {
		t.Run(name, func(t *testing.T) {
			blockdevtest.Run(t, func(t *testing.T) blockdev.Device { return open(t, c) })
		})
	}
}

func TestSpread(t *testing.T) {
	blockdevtest.Run(t, func(t *testing.T) blockdev.Device {
		return blockdev.Spread(open(t, blockdev.MemoryConfig{Size: 8 << 20, BlockSize: 512, Queues: 3, PoolSize: 8 << 20}))
	})
	d := &countingDevice{Device: open(t, blockdev.MemoryConfig{Size: 1 << 20, BlockSize: 512, Queues: 4}), submitted: make([]int, 4)}
	defer d.Close()
	q := blockdev.Spread(d).Queue(7)
	for range 8 { // bursts of three
		for range 3 {
			q.Submit(&blockdev.Request{Op: blockdev.Flush, Done: func(*blockdev.Request) {}})
		}
		for q.Poll(0) > 0 {
		}
	}
	for i, n := range d.submitted {
		if n != 6 {
			t.Errorf("queue %d got %d requests of 24, want two bursts of three", i, n)
		}
	}
}

// countingDevice counts what its queues are given.
type countingDevice struct {
	blockdev.Device
	submitted []int
}

type countingQueue struct {
	blockdev.Queue
	n *int
}

func (d *countingDevice) Queue(i int) blockdev.Queue {
	return countingQueue{d.Device.Queue(i), &d.submitted[i]}
}

func (q countingQueue) Submit(r *blockdev.Request) {
	*q.n++
	q.Queue.Submit(r)
}

func open(t testing.TB, c blockdev.MemoryConfig) *blockdev.Memory {
	t.Helper()
	d, err := blockdev.NewMemory(c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestMemoryConfigRefused(t *testing.T) {
	for _, c := range []blockdev.MemoryConfig{
		{},
		{Size: -512},
		{Size: 513},
		{Size: 1 << 20, BlockSize: 1000},
		{Size: 1 << 20, BlockSize: 1 << 17},
		{Size: 1 << 20, BlockSize: 256},
		{Size: 1 << 20, PoolSize: -1},
	} {
		if d, err := blockdev.NewMemory(c); err == nil {
			d.Close()
			t.Errorf("%+v was accepted", c)
		}
	}
}
