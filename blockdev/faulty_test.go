package blockdev_test

import (
	"errors"
	"testing"
	"time"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

// TestFaulty checks that faults which do not change the outcome leave a conforming device.
func TestFaulty(t *testing.T) {
	for name, fault := range map[string]blockdev.Fault{"none": {}, "delay": {Delay: time.Microsecond}} {
		t.Run(name, func(t *testing.T) {
			blockdevtest.Run(t, func(t *testing.T) blockdev.Device {
				d := open(t, blockdev.MemoryConfig{Size: 8 << 20, Queues: 2, PoolSize: 8 << 20})
				return blockdev.NewFaulty(d, func(*blockdev.Request) blockdev.Fault { return fault })
			})
		})
	}
}

func TestFaultyOutcome(t *testing.T) {
	m := open(t, blockdev.MemoryConfig{Size: 1 << 20, PoolSize: 1 << 20})
	hold := make(chan struct{})
	faults := make(chan blockdev.Fault, 3)
	d := blockdev.NewFaulty(m, func(*blockdev.Request) blockdev.Fault { return <-faults })
	done := make(chan error, 1)
	run := func(f blockdev.Fault) {
		faults <- f
		d.Queue(0).Submit(&blockdev.Request{Op: blockdev.Flush, Done: func(r *blockdev.Request) { done <- r.Err }})
		d.Queue(0).Kick()
	}
	run(blockdev.Fault{Err: blockdev.ErrMedia})
	if err := <-done; !errors.Is(err, blockdev.ErrMedia) || m.Count(blockdev.Flush) != 0 {
		t.Errorf("before the device: %v, %d flushes", err, m.Count(blockdev.Flush))
	}
	run(blockdev.Fault{Err: blockdev.ErrLost, After: true})
	if err := <-done; !errors.Is(err, blockdev.ErrLost) || m.Count(blockdev.Flush) != 1 {
		t.Errorf("after the device: %v, %d flushes", err, m.Count(blockdev.Flush))
	}
	run(blockdev.Fault{Hold: hold})
	select {
	case err := <-done:
		t.Errorf("a held request ended: %v", err)
	default:
	}
	close(hold)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
