package fuse

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// TestFio has fio write and verify through each of the ways that programs do I/O.
func TestFio(t *testing.T) {
	needProgram(t, "fio")
	const mixed = "--bssplit=4k/60:64k/20:512k/15:1m/5"
	for name, args := range map[string][]string{
		"io_uring":        {"--ioengine=io_uring", "--direct=1", "--iodepth=32", mixed},
		"libaio":          {"--ioengine=libaio", "--direct=1", "--iodepth=32", mixed},
		"buffered":        {"--ioengine=psync", "--fsync=64", mixed},
		"mapped":          {"--ioengine=mmap", mixed, "--io_size=8m"},
		"parts of blocks": {"--ioengine=io_uring", "--direct=1", "--iodepth=16", "--bs=1536", "--size=3m", "--io_size=3m"},
	} {
		t.Run(name, func(t *testing.T) {
			d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 16 << 20, BlockSize: 4096, Queues: 2, Latency: 10 * time.Microsecond})
			m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d}})
			a := []string{
				"--name=verify", "--filename=" + m.File("n1"), "--rw=randwrite", "--size=16m", "--io_size=24m",
				"--verify=crc32c", "--verify_fatal=1", "--allow_file_create=0", "--verify_state_save=0",
			}
			run(t, "fio", append(a, args...)...)
		})
	}
}

// TestLoopDevice puts a file system on a loop device on the file, as users without a kernel block device do.
func TestLoopDevice(t *testing.T) {
	needRoot(t)
	needFUSE(t)
	needProgram(t, "losetup", "mkfs.ext4", "mount", "umount", "fsck.ext4")
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip(err)
	}
	d := blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 64 << 20, BlockSize: 4096, Queues: 2})
	m := mount(t, Config{Devices: map[string]blockdev.Device{"n1": d}})
	loop := strings.TrimSpace(run(t, "losetup", "--find", "--show", "--direct-io=on", m.File("n1")))
	attached := true
	t.Cleanup(func() {
		if attached {
			_ = exec.Command("losetup", "-d", loop).Run()
		}
	})
	dir := t.TempDir()
	run(t, "mkfs.ext4", "-q", loop)
	run(t, "mount", "-o", "discard", loop, dir)
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	if err := os.CopyFS(filepath.Join(dir, "tree"), os.DirFS("..")); err != nil {
		t.Fatal(err)
	}
	err := m.Unmount(t.Context(), false)
	if err == nil || !strings.Contains(err.Error(), loop+" is set up on") || !strings.Contains(err.Error(), "mounted on "+dir) {
		t.Errorf("unmount under a loop device: %v", err)
	}
	run(t, "umount", dir)
	run(t, "fsck.ext4", "-f", "-n", loop)
	run(t, "mount", "-o", "ro", loop, dir)
	run(t, "diff", "-r", "..", filepath.Join(dir, "tree"))
	run(t, "umount", dir)
	run(t, "losetup", "-d", loop)
	attached = false
	if d.Count(blockdev.Flush) == 0 {
		t.Error("fsync of the file system did not reach the device")
	}
}

// BenchmarkFio is what a program sees of a device that takes no time: kernel, go-fuse and this package.
func BenchmarkFio(b *testing.B) {
	needProgram(b, "fio")
	for _, c := range []struct {
		rw, bs string
		depth  int
	}{{"randread", "4k", 1}, {"randread", "4k", 32}, {"randwrite", "4k", 1}, {"randwrite", "4k", 32}, {"read", "128k", 8}} {
		b.Run(fmt.Sprintf("%s %s depth %d", c.rw, c.bs, c.depth), func(b *testing.B) {
			d := blockdevtest.Memory(b, blockdev.MemoryConfig{Size: 1 << 30, Null: true, Latency: -1, Queues: 2})
			// A device that moves data has written to its buffers; the kernel is slower at copying from memory that
			// nobody ever wrote to, which it has yet to make.
			for p := d.Pool().Region(); len(p) > 0; p = p[blockdev.PageSize:] {
				p[0] = 1
			}
			m := mount(b, Config{Devices: map[string]blockdev.Device{"n1": d}})
			for b.Loop() {
				out := run(b, "fio", "--name=b", "--filename="+m.File("n1"), "--size=1g", "--ioengine=io_uring", "--direct=1",
					"--rw="+c.rw, "--bs="+c.bs, fmt.Sprintf("--iodepth=%d", c.depth),
					"--time_based", "--runtime=3", "--output-format=terse", "--terse-version=3")
				f := strings.Split(out, ";") // fields 8 and 49, counted from 1, are read and write IOPS
				read, _ := strconv.Atoi(f[7])
				write, _ := strconv.Atoi(f[48])
				b.ReportMetric(float64(read+write), "IOPS")
			}
		})
	}
}
