package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

// TestModel compares random reads, writes, holes and zeroed ranges of any alignment with a byte slice.
func TestModel(t *testing.T) {
	for _, c := range []struct {
		block   int
		latency time.Duration
		asFile  bool
	}{{512, -1, false}, {4096, 0, true}, {4096, 30 * time.Microsecond, false}, {65536, -1, false}} {
		t.Run(fmt.Sprintf("block %d latency %v file %v", c.block, c.latency, c.asFile), func(t *testing.T) {
			const size = 4<<20 + 65536
			d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: size, BlockSize: c.block, Latency: c.latency, Queues: 3, PoolSize: 2 << 20})
			cfg := Config{Devices: map[string]blockdev.Device{"n1": d}}
			if c.asFile {
				cfg.Path = filepath.Join(t.TempDir(), "disk")
				if err := os.WriteFile(cfg.Path, []byte("hidden"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			m := mount(t, cfg)
			fd := open(t, m.File("n1"), unix.O_RDWR)
			source := rand.NewChaCha8([32]byte{byte(c.block >> 8)})
			r := rand.New(source)
			model, buf := make([]byte, size), make([]byte, 3<<20)
			for i := range 400 {
				off := r.Int64N(size)
				n := min(1+r.Int64N([]int64{100, 5000, 200 << 10, 3 << 20}[i%4]), size-off)
				if i%5 == 0 { // aligned
					off, n = off&^65535, min((n+65535)&^65535, size-off&^65535)
				}
				switch op := r.IntN(8); op {
				case 0, 1, 2:
					got, err := unix.Pread(fd, buf[:n], off)
					if err != nil || got != int(n) || !bytes.Equal(buf[:n], model[off:off+n]) {
						t.Fatalf("step %d: read of %d at %d: %d, %v, or other data", i, n, off, got, err)
					}
				case 3, 4, 5:
					_, _ = source.Read(buf[:n])
					if got, err := unix.Pwrite(fd, buf[:n], off); err != nil || got != int(n) {
						t.Fatalf("step %d: write of %d at %d: %d, %v", i, n, off, got, err)
					}
					copy(model[off:], buf[:n])
				default:
					mode := uint32(unix.FALLOC_FL_KEEP_SIZE | unix.FALLOC_FL_PUNCH_HOLE)
					if op == 6 {
						mode = unix.FALLOC_FL_KEEP_SIZE | unix.FALLOC_FL_ZERO_RANGE
					}
					if err := unix.Fallocate(fd, mode, off, n); err != nil {
						t.Fatalf("step %d: fallocate %#x of %d at %d: %v", i, mode, n, off, err)
					}
					clear(model[off : off+n])
				}
			}
			all := make([]byte, size+1)
			for done := 0; done < size; { // past the end, a read is short
				n, err := unix.Pread(fd, all[done:], int64(done))
				if err != nil || n == 0 {
					t.Fatal(n, err)
				}
				done += n
			}
			if !bytes.Equal(all[:size], model) {
				t.Error("the device differs from the model")
			}
			for _, op := range []blockdev.Op{blockdev.Read, blockdev.Write, blockdev.Discard, blockdev.WriteZeroes} {
				if d.Count(op) == 0 {
					t.Errorf("no %v reached the device", op)
				}
			}
		})
	}
}

// TestCaseE14PartsOfBlocks has many writers change bytes of the same blocks, which are larger than their writes.
func TestCaseE14PartsOfBlocks(t *testing.T) {
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20, BlockSize: 4096, Latency: 20 * time.Microsecond, Queues: 2})
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d}})
	const writers, stripe, span = 8, 512, 128 << 10
	var wg sync.WaitGroup
	for w := range writers {
		fd := open(t, m.File("n1"), unix.O_RDWR|unix.O_DIRECT)
		wg.Go(func() {
			b := bytes.Repeat([]byte{byte(w + 1)}, stripe)
			for off := w * stripe; off < span; off += writers * stripe {
				if _, err := unix.Pwrite(fd, b, int64(off)); err != nil {
					t.Error(err)
				}
			}
			whole := bytes.Repeat([]byte{0xee}, 4096) // beside them, whole blocks
			for off := span + w*4096; off < 2*span; off += writers * 4096 {
				if _, err := unix.Pwrite(fd, whole, int64(off)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	b := make([]byte, 2*span)
	if n, err := unix.Pread(open(t, m.File("n1"), unix.O_RDONLY), b, 0); n != len(b) || err != nil {
		t.Fatal(n, err)
	}
	for i, v := range b {
		want := byte(0xee)
		if i < span {
			want = byte(i/stripe%writers + 1)
		}
		if v != want {
			t.Fatalf("byte %d is %#x, want %#x: a write was undone", i, v, want)
		}
	}
}

// TestCaseE13Size: no size or offset is cut to 32 bits, of bytes or of blocks.
func TestCaseE13Size(t *testing.T) {
	const size = 10 << 40
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": blockdevtest.Memory(t, blockdev.MemoryConfig{Size: size})}})
	fd := open(t, m.File("n1"), unix.O_RDWR|unix.O_DIRECT)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != size {
		t.Errorf("size %d, %v", st.Size, err)
	}
	for i, off := range []int64{size - 4096, (size - 4096) % (1 << 41), (size - 4096) % (1 << 32)} {
		if _, err := unix.Pwrite(fd, bytes.Repeat([]byte{byte(i + 1)}, 4096), off); err != nil {
			t.Fatal(err)
		}
	}
	b := make([]byte, 4096)
	if _, err := unix.Pread(fd, b, size-4096); err != nil || b[0] != 1 || b[4095] != 1 {
		t.Errorf("the last block holds %d, %v", b[0], err)
	}
}

func TestAttributes(t *testing.T) {
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 8 << 20, BlockSize: 4096})
	ro := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20, ReadOnly: true})
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d, "n2": ro}})
	stat := func(name string) (st unix.Stat_t) {
		if err := unix.Stat(m.File(name), &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := stat("n1"); st.Size != 8<<20 || st.Mode != unix.S_IFREG|0o600 || st.Blksize != 4096 || st.Blocks != 8<<20/512 || int(st.Uid) != os.Geteuid() {
		t.Errorf("stat: %+v", st)
	}
	if st := stat("n2"); st.Size != 1<<20 || st.Mode != unix.S_IFREG|0o400 {
		t.Errorf("stat of a read-only device: %+v", st)
	}
	var sx unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, m.File("n1"), 0, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &sx); err != nil || sx.Size != 8<<20 {
		t.Errorf("statx: size %d, %v", sx.Size, err)
	}
	if _, err := unix.Open(m.File("n2"), unix.O_RDWR, 0); err != unix.EROFS && err != unix.EACCES { // the latter if not root
		t.Errorf("opening a read-only device for writing: %v", err)
	}
	if _, err := unix.Open(m.File("n3"), unix.O_RDWR|unix.O_CREAT, 0o600); err != unix.EPERM {
		t.Errorf("creating a file: %v", err)
	}
	fd := open(t, m.File("n1"), unix.O_RDWR|unix.O_TRUNC) // as "cat image >n1" does
	if err := unix.Ftruncate(fd, 8<<20); err != nil {
		t.Errorf("truncating to the same size: %v", err)
	}
	if err := unix.Ftruncate(fd, 4096); err != unix.EINVAL {
		t.Errorf("truncating: %v", err)
	}
	if err := unix.Fchmod(fd, 0o640); err != nil || stat("n1").Mode&0o777 != 0o640 {
		t.Errorf("chmod: %v, mode %o", err, stat("n1").Mode)
	}
	if err := unix.Fallocate(fd, 0, 0, 4096); err != unix.EOPNOTSUPP {
		t.Errorf("plain fallocate: %v", err)
	}
	for _, c := range []struct {
		off    int64
		whence int
		want   int64
		err    error
	}{{4097, unix.SEEK_DATA, 4097, nil}, {0, unix.SEEK_HOLE, 8 << 20, nil}, {8 << 20, unix.SEEK_DATA, -1, unix.ENXIO}, {0, unix.SEEK_END, 8 << 20, nil}} {
		if got, err := unix.Seek(fd, c.off, c.whence); got != c.want || err != c.err {
			t.Errorf("seek %d from %d: %d, %v", c.whence, c.off, got, err)
		}
	}
	page := make([]byte, 8192)
	if n, err := unix.Pread(fd, page, 8<<20); n != 0 || err != nil {
		t.Errorf("read at the end: %d, %v", n, err)
	}
	if n, err := unix.Pread(fd, page, 8<<20-100); n != 100 || err != nil {
		t.Errorf("read over the end: %d, %v", n, err)
	}
	if n, err := unix.Pwrite(fd, page, 8<<20-4096); n != 4096 || err != nil {
		t.Errorf("write over the end: %d, %v", n, err)
	}
	if _, err := unix.Pwrite(fd, page, 8<<20); err != unix.ENOSPC {
		t.Errorf("write at the end: %v", err)
	}
	if err := d.Resize(4 << 20); err != nil || stat("n1").Size != 4<<20 {
		t.Errorf("size after a resize: %d, %v", stat("n1").Size, err)
	}
	before := d.Count(blockdev.Flush)
	if err := unix.Fsync(fd); err != nil || d.Count(blockdev.Flush) != before+1 {
		t.Errorf("fsync: %v, flushes %d", err, d.Count(blockdev.Flush)-before)
	}
	if _, err := unix.Pwrite(open(t, m.File("n1"), unix.O_WRONLY|unix.O_DSYNC), page, 0); err != nil || d.FUACount() != 1 {
		t.Errorf("write with O_DSYNC: %v, FUA %d", err, d.FUACount())
	}
}

func TestCaseE18SharedMapping(t *testing.T) {
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d}})
	fd := open(t, m.File("n1"), unix.O_RDWR)
	b, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	// touched in a system call, so that the fault does not hold a processor that the server needs
	zero := open(t, "/dev/zero", unix.O_RDONLY)
	if _, err := unix.Read(zero, b[:300000]); err != nil {
		t.Fatal(err)
	}
	copy(b[300000-8:], "mapped!!")
	if err := errors.Join(unix.Msync(b, unix.MS_SYNC), unix.Munmap(b)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 8)
	if _, err := unix.Pread(open(t, m.File("n1"), unix.O_RDONLY), got, 300000-8); err != nil || string(got) != "mapped!!" {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestAddRemove(t *testing.T) {
	a, b := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20}), blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 2 << 20})
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": a}})
	if err := m.Add("n10", b); err != nil {
		t.Fatal(err)
	}
	if m.Add("n10", b) == nil || m.Add("x/y", b) == nil {
		t.Error("a name that is taken or impossible was accepted")
	}
	out, err := exec.Command("ls", m.Path()).CombinedOutput()
	if err != nil || string(out) != "n1\nn10\n" {
		t.Errorf("ls: %q, %v", out, err)
	}
	fd := open(t, m.File("n10"), unix.O_RDWR)
	if err := m.Remove(t.Context(), "n10"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 512)
	if _, err := unix.Pread(fd, buf, 0); err != unix.EIO {
		t.Errorf("reading a removed device: %v", err)
	}
	if err := unix.Access(m.File("n10"), unix.F_OK); err != unix.ENOENT {
		t.Errorf("the removed file: %v", err)
	}
	if _, err := unix.Pread(open(t, m.File("n1"), unix.O_RDONLY), buf, 0); err != nil {
		t.Errorf("the other device: %v", err)
	}
	if err := m.Remove(t.Context(), "n10"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("removing twice: %v", err)
	}
	_ = unix.Close(fd)
}

// TestCaseE11OneError checks that a failed request is answered and leaves the others alone.
func TestCaseE11OneError(t *testing.T) {
	d := blockdev.NewFaulty(blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20}), func(r *blockdev.Request) (f blockdev.Fault) {
		if r.Op == blockdev.Write && r.Off == 0 {
			f.Err = fmt.Errorf("write: %w", blockdev.ErrMedia)
		}
		return f
	})
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d}})
	fd := open(t, m.File("n1"), unix.O_RDWR)
	for range 100 {
		if _, err := unix.Pwrite(fd, make([]byte, 512), 0); err != unix.EIO {
			t.Fatal(err)
		}
		if _, err := unix.Pwrite(fd, make([]byte, 700), 512); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBusy(t *testing.T) {
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20})}})
	fd := open(t, m.File("n1"), unix.O_RDWR)
	err := m.Unmount(t.Context(), false)
	var busy *BusyError
	if !errors.As(err, &busy) || !errors.Is(err, unix.EBUSY) ||
		!slices.ContainsFunc(busy.Holders, func(h Holder) bool { return h.PID == os.Getpid() && h.Path == m.File("n1") }) {
		t.Fatalf("unmount in use: %v", err)
	}
	if _, err := unix.Pread(fd, make([]byte, 512), 0); err != nil {
		t.Fatalf("the refused unmount did harm: %v", err)
	}
	if err := m.Unmount(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Pread(fd, make([]byte, 512), 0); err == nil {
		t.Error("after a forced unmount the file still answers")
	}
	if _, err := os.Stat(m.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder that Mount made is left: %v", err)
	}
}

// TestUnmountedByOthers is what an administrator's umount and a connection aborted from outside do.
func TestUnmountedByOthers(t *testing.T) {
	needRoot(t)
	for _, flags := range []int{0, unix.MNT_FORCE} {
		d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20})
		m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d}})
		if err := unix.Unmount(m.Path(), flags); err != nil {
			t.Fatal(err)
		}
		m.Wait()
		if d.Count(blockdev.Flush) == 0 {
			t.Error("not flushed at the end")
		}
	}
}

// TestFoldersRemoved: what Mount makes on the way to its path goes again, but for what others use by then.
func TestFoldersRemoved(t *testing.T) {
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	top := t.TempDir()
	m := mount(t, Config{Path: filepath.Join(top, "a/b/c"), Devices: map[string]blockdev.Device{"n1": d}})
	if err := os.Mkdir(filepath.Join(top, "a/other"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Unmount(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	for path, stays := range map[string]bool{"a": true, "a/other": true, "a/b": false} {
		if _, err := os.Stat(filepath.Join(top, path)); err == nil != stays {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestRefused(t *testing.T) {
	needFUSE(t)
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]Config{
		"no path":               {},
		"two devices on a file": {Path: file, Devices: map[string]blockdev.Device{"n1": d, "n2": d}},
		"folder not empty":      {Path: dir, Devices: map[string]blockdev.Device{"n1": d}},
		"not a file":            {Path: "/dev/null", Devices: map[string]blockdev.Device{"n1": d}},
		"impossible name":       {Path: filepath.Join(dir, "new/folder"), Devices: map[string]blockdev.Device{"..": d}},
	} {
		if _, err := Mount(t.Context(), c); err == nil {
			t.Errorf("%s: mounted", name)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); err == nil {
		t.Error("a refused mount left its folder")
	}
}

// TestCaseH23ForceWhileStuck takes the mount away while the device does not answer: the process lets go when it does.
func TestCaseH23ForceWhileStuck(t *testing.T) {
	needRoot(t) // else this process could not even be killed while it waits for itself
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20, Latency: time.Hour})
	view, stuck := blockdevtest.Arrived(d, blockdev.Read, 1)
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": view}})
	fd := open(t, m.File("n1"), unix.O_RDWR)
	read := make(chan error, 1)
	go func() {
		_, err := unix.Pread(fd, make([]byte, 512), 0)
		read <- err
	}()
	<-stuck
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := m.Unmount(ctx, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("unmount with a stuck device: %v", err)
	}
	if err := <-read; err == nil {
		t.Error("the reader was not released")
	}
	if _, err := os.Stat(m.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder that Mount made is left: %v", err)
	}
	_ = d.Close() // fails the request
	m.Wait()
}

// TestCaseE20OwnMount: the process asks its own mount nothing. Who uses it can be told while it answers nobody.
func TestCaseE20OwnMount(t *testing.T) {
	needRoot(t)
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20, Latency: time.Hour})
	const readers = 40 // more than go-fuse has of requests
	view, stuck := blockdevtest.Arrived(d, blockdev.Read, readers)
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": view}})
	var reading sync.WaitGroup
	for range readers {
		fd := open(t, m.File("n1"), unix.O_RDWR|unix.O_DIRECT)
		reading.Go(func() { _, _ = unix.Pread(fd, make([]byte, 4096), 0) })
	}
	<-stuck
	begin := time.Now()
	var busy *BusyError
	if err := m.Unmount(t.Context(), false); !errors.As(err, &busy) || time.Since(begin) > 5*time.Second {
		t.Errorf("unmount in use: %v after %v", err, time.Since(begin))
	}
	_ = d.Close() // fails the reads
	reading.Wait()
	if err := m.Unmount(t.Context(), true); err != nil {
		t.Log("unmount of a device that is closed:", err)
	}
}
