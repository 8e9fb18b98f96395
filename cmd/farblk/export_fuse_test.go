package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/fuse"
	"farblk/cmd/internal/session"
)

// fuseOver is an export of one device.
func fuseOver(t *testing.T, d blockdev.Device) *fuseExport {
	t.Helper()
	m, err := fuse.Mount(t.Context(), fuse.Config{Path: filepath.Join(t.TempDir(), "m"), Devices: map[string]blockdev.Device{"n1": d}})
	if err != nil {
		t.Fatal(err)
	}
	return &fuseExport{m: m}
}

// Closing without force takes nothing away: not from somebody who came a moment ago, nor from a flush that is slow.
func TestFUSECloseDoesNotForce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	memory, err := blockdev.NewMemory(blockdev.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	closeIn := func(e *fuseExport, in time.Duration, force bool) error {
		ctx, cancel := context.WithTimeout(context.Background(), in)
		defer cancel()
		return e.Close(ctx, force)
	}

	e := fuseOver(t, memory)
	f, err := unix.Open(e.m.File("n1"), unix.O_RDWR, 0) // os.Open would have Go's poller ask this very process
	if err != nil {
		t.Fatal(err)
	}
	var busy *session.BusyError
	if err := closeIn(e, time.Second, false); !errors.As(err, &busy) || !e.Has(nil) {
		t.Error("closed in use:", err)
	}
	if _, err := unix.Pwrite(f, make([]byte, 4096), 0); err != nil {
		t.Error("a write after that:", err)
	}
	if err := unix.Close(f); err != nil {
		t.Error(err)
	}
	if err := closeIn(e, time.Second, false); err != nil || e.Has(nil) || e.Leftovers() != nil {
		t.Error(err, e.Leftovers())
	}

	slow := blockdev.NewFaulty(memory, func(r *blockdev.Request) blockdev.Fault {
		if r.Op == blockdev.Flush {
			return blockdev.Fault{Delay: 200 * time.Millisecond}
		}
		return blockdev.Fault{}
	})
	e = fuseOver(t, slow)
	if err := closeIn(e, 50*time.Millisecond, false); !errors.Is(err, context.DeadlineExceeded) || !e.Has(nil) {
		t.Error("closed before the flush ended:", err)
	}
	if err := closeIn(e, 10*time.Second, false); err != nil || e.Has(nil) {
		t.Error(err)
	}
}
