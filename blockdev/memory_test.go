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
		{}, {Size: -512}, {Size: 513}, {Size: 1 << 20, BlockSize: 1000}, {Size: 1 << 20, BlockSize: 1 << 17},
		{Size: 1 << 20, BlockSize: 256}, {Size: 1 << 20, PoolSize: -1},
	} {
		if d, err := blockdev.NewMemory(c); err == nil {
			d.Close()
			t.Errorf("%+v was accepted", c)
		}
	}
}
