package blockdevtest

import (
	"testing"

	"farblk/blockdev"
)

// Memory gives a device until the test ends, when none of its buffers may be leased any more.
func Memory(t testing.TB, c blockdev.MemoryConfig) *blockdev.Memory {
	t.Helper()
	d, err := blockdev.NewMemory(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := d.Pool().Leased(); n != 0 {
			t.Errorf("%d bytes are still leased", n)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}
