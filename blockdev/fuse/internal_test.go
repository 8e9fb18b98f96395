package fuse

import (
	"context"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	gofuse "github.com/hanwen/go-fuse/v2/fuse"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

func TestMountTable(t *testing.T) {
	const table = `22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw
300 27 0:53 / /mnt/with\040blank\134 rw,nosuid,nodev - fuse.farblk farblk rw,user_id=0

short line
`
	want := []mountEntry{
		{dev: "0:21", point: "/proc", fsType: "proc", source: "proc"},
		{dev: "0:53", point: `/mnt/with blank\`, fsType: "fuse.farblk", source: "farblk"},
	}
	if d := cmp.Diff(want, parseMountTable(table), cmp.AllowUnexported(mountEntry{})); d != "" {
		t.Error(d)
	}
}

func TestGate(t *testing.T) {
	for range 200 {
		g := gate{idle: make(chan struct{})}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 50 {
					if g.enter() {
						select {
						case <-g.idle:
							t.Error("idle with one inside")
						default:
						}
						g.leave()
					}
				}
			})
		}
		g.close()
		g.close()
		<-g.idle
		if g.enter() {
			t.Error("entered a closed gate")
		}
		wg.Wait()
	}
}

func TestBlockLockMask(t *testing.T) {
	var l blockLock
	for _, c := range []struct {
		off, n int64
		want   uint64
	}{
		{0, 1, 1},
		{1<<20 - 1, 2, 3},
		{63 << 20, 2 << 20, 1<<63 | 1},
		{0, 64 << 20, ^uint64(0)},
		{5<<20 + 7, 200 << 20, ^uint64(0)},
		{64 << 20, 63 << 20, 1<<63 - 1},
		{10, 0, 1},
	} {
		if got := l.mask(c.off, c.n); got != c.want {
			t.Errorf("%d bytes at %d: %#x, want %#x", c.n, c.off, got, c.want)
		}
	}
}

// BenchmarkHandler is our share of a request, without the kernel and go-fuse: 0 allocs/op.
func BenchmarkHandler(b *testing.B) {
	d := blockdevtest.Memory(b, blockdev.MemoryConfig{Size: 1 << 30, Null: true, Latency: -1, Queues: 2})
	fs := newFileSystem(context.Background(), true, false)
	if err := fs.add("n1", d); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 4096)
	b.Run("read 4k", func(b *testing.B) {
		in := gofuse.ReadIn{Size: 4096}
		in.NodeId = gofuse.FUSE_ROOT_ID
		b.ReportAllocs()
		for b.Loop() {
			in.Offset = (in.Offset + 4096) % (1 << 30)
			r, s := fs.Read(nil, &in, buf)
			if !s.Ok() {
				b.Fatal(s)
			}
			r.Done()
		}
	})
	for name, off := range map[string]uint64{"write 4k": 0, "write 4k unaligned": 100} {
		b.Run(name, func(b *testing.B) {
			in := gofuse.WriteIn{Offset: off}
			in.NodeId = gofuse.FUSE_ROOT_ID
			b.ReportAllocs()
			for b.Loop() {
				if _, s := fs.Write(nil, &in, buf); !s.Ok() {
					b.Fatal(s)
				}
			}
		})
	}
}
