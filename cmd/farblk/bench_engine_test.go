package main

import (
	"runtime"
	"testing"
	"time"

	"farblk/blockdev"
)

func memoryDevice(t testing.TB) *blockdev.Memory {
	t.Helper()
	d, err := blockdev.NewMemory(blockdev.MemoryConfig{Size: 64 << 20, Queues: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if leased := d.Pool().Leased(); leased != 0 {
			t.Errorf("%d bytes are still leased", leased)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func TestBenchDevice(t *testing.T) {
	for _, c := range []struct {
		mode          string
		reads, writes bool
	}{{"read", true, false}, {"write", false, true}, {"randread", true, false}, {"randwrite", false, true}, {"randrw", true, true}} {
		d := memoryDevice(t)
		j := &benchJob{Mode: c.mode, Block: 8192, Depth: 4, Queues: 2, Time: 300 * time.Millisecond, Reads: 50, Size: d.Info().Size}
		r, err := benchDevice(d, j, nil)
		if err != nil {
			t.Fatal(err)
		}
		if (r.Reads > 0) != c.reads || (r.Writes > 0) != c.writes {
			t.Errorf("%s: %d reads, %d writes", c.mode, r.Reads, r.Writes)
		}
		if int64(r.Reads) != d.Count(blockdev.Read) || int64(r.Writes) != d.Count(blockdev.Write) {
			t.Errorf("%s: counted %d and %d, the device %d and %d", c.mode, r.Reads, r.Writes, d.Count(blockdev.Read), d.Count(blockdev.Write))
		}
		l := r.Latency
		if l.P50 <= 0 || l.P50 > l.P99 || l.P99 > l.P999 || l.P999 > l.Max*1.01 {
			t.Errorf("%s: latencies %+v", c.mode, l)
		}
	}
}

// An error ends the measurement and is shown.
func TestBenchDeviceError(t *testing.T) {
	d := memoryDevice(t)
	j := &benchJob{Mode: "read", Block: 4096, Depth: 4, Queues: 1, Time: time.Minute, Size: 2 * d.Info().Size}
	if r, err := benchDevice(d, j, nil); err == nil {
		t.Errorf("reading past the end: %+v", r)
	}
}

// No request allocates memory.
func TestBenchAllocates(t *testing.T) {
	d := memoryDevice(t)
	j := &benchJob{Mode: "randread", Block: 4096, Depth: 8, Queues: 1, Time: 500 * time.Millisecond, Size: d.Info().Size}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r, err := benchDevice(d, j, nil)
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	if n := after.Mallocs - before.Mallocs; r.Reads < 1000 || n > 500 {
		t.Errorf("%d allocations for %d requests", n, r.Reads)
	}
}
