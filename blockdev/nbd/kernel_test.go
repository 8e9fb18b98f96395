package nbd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

// The tests of this file change this machine's block devices: they run in a virtual machine that says so.
const kernelTests = "FARBLK_NBD_KERNEL"

func needKernel(t *testing.T) context.Context {
	t.Helper()
	if os.Getenv(kernelTests) == "" {
		t.Skip(kernelTests + " is not set: scripts/vm/tests/06-nbd-attach.sh runs this in a machine of its own")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func memory(t testing.TB, c blockdev.MemoryConfig) *blockdev.Memory {
	t.Helper()
	if c.PoolSize == 0 {
		c.PoolSize = 16 << 20
	}
	return blockdevtest.Memory(t, c)
}

func attach(t *testing.T, ctx context.Context, c AttachConfig) *Attachment {
	t.Helper()
	a, err := Attach(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // a test that fails half-way must not disturb the next
		if err := a.Detach(ctx, true); err != nil {
			t.Error(err)
		}
	})
	return a
}

func detach(t *testing.T, ctx context.Context, a *Attachment) {
	t.Helper()
	if err := a.Detach(ctx, false); err != nil {
		t.Fatal(err)
	}
	if s := readState(a.Index); s.connected || s.size != 0 {
		t.Errorf("%s after Detach: %+v", a.Path, s)
	}
}

func command(t *testing.T, ctx context.Context, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func fio(t *testing.T, ctx context.Context, path string, args ...string) {
	t.Helper()
	command(t, ctx, "fio", append([]string{
		"--name=verify", "--filename=" + path, "--direct=1", "--ioengine=libaio",
		"--iodepth=32", "--verify=crc32c", "--verify_state_save=0", "--minimal", "--verify_fatal=1",
	}, args...)...)
}

func TestKernelVerify(t *testing.T) {
	ctx := needKernel(t)
	for _, c := range []struct{ block, queues, connections int }{{512, 1, 1}, {4096, 2, 2}} {
		t.Run(fmt.Sprintf("blocks of %d", c.block), func(t *testing.T) {
			d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, BlockSize: c.block, Queues: c.queues})
			a := attach(t, ctx, AttachConfig{Index: -1, Device: d, Connections: c.connections})
			if s := readState(a.Index); s.queues != c.connections || s.size != 64<<20 || s.backend != "farblk:memory" {
				t.Errorf("%+v", s)
			}
			fio(t, ctx, a.Path, "--rw=randwrite", fmt.Sprintf("--bsrange=%d-1m", c.block), fmt.Sprintf("--blockalign=%d", c.block),
				"--size=48m", "--io_size=32m")
			fio(t, ctx, a.Path, "--rw=write", "--bs=128k", "--size=48m", "--fsync=16")
			if d.Count(blockdev.Flush) == 0 {
				t.Error("fsync did not reach the device as a flush")
			}
			before := d.Count(blockdev.Discard)
			command(t, ctx, "blkdiscard", a.Path)
			if d.Count(blockdev.Discard) == before {
				t.Error("blkdiscard did not reach the device")
			}
			command(t, ctx, "blkdiscard", "-z", a.Path)
			detach(t, ctx, a)
			if err := a.Detach(ctx, false); err != nil {
				t.Errorf("second Detach: %v", err)
			}
		})
	}
}

// TestCaseE13Size checks a size at which 32 bits of blocks are not enough, to the last byte.
func TestCaseE13Size(t *testing.T) {
	ctx := needKernel(t)
	const size = 10 << 40
	d := memory(t, blockdev.MemoryConfig{Size: size, BlockSize: 4096})
	a := attach(t, ctx, AttachConfig{Index: -1, Device: d})
	f, err := os.OpenFile(a.Path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err != nil || end != size {
		t.Errorf("size %d, %v", end, err)
	}
	page := aligned(4096)
	fillRandom(page)
	if _, err := f.WriteAt(page, size-4096); err != nil {
		t.Fatal(err)
	}
	back := aligned(4096)
	if _, err := f.ReadAt(back, size-4096); err != nil || !bytes.Equal(page, back) {
		t.Errorf("the last block came back different (%v)", err)
	}
	f.Close()
	detach(t, ctx, a)
}

func aligned(n int) []byte {
	b := make([]byte, n+4096)
	return b[-uintptr(unsafe.Pointer(unsafe.SliceData(b)))&4095:][:n]
}

func fillRandom(b []byte) {
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
}

// TestCaseE15Busy tries to attach where somebody is, and to detach while somebody is there.
func TestCaseE15Busy(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 32 << 20})
	a := attach(t, ctx, AttachConfig{Index: -1, Device: d, Identifier: "first"})
	begin := time.Now()
	_, err := Attach(ctx, AttachConfig{Index: a.Index, Device: d, Identifier: "second"})
	var busy *BusyError
	if !errors.As(err, &busy) || busy.PID == 0 || busy.Backend != "farblk:first" || !errors.Is(err, unix.EBUSY) {
		t.Errorf("attaching over it: %v", err)
	}
	if d := time.Since(begin); d > 4*time.Second {
		t.Errorf("that took %v to find out", d)
	}

	f, err := os.Open(a.Path)
	if err != nil {
		t.Fatal(err)
	}
	err = a.Detach(ctx, false)
	if !errors.As(err, &busy) || len(busy.Holders) != 1 || busy.Holders[0].PID != os.Getpid() {
		t.Errorf("detaching what is open: %v", err)
	}
	f.Close()

	command(t, ctx, "mkfs.ext4", "-q", a.Path)
	dir := t.TempDir()
	command(t, ctx, "mount", a.Path, dir)
	err = a.Detach(ctx, false)
	if !errors.As(err, &busy) || !strings.Contains(err.Error(), a.Path+" is mounted on "+dir) {
		t.Errorf("detaching what is mounted: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "still"), []byte("there"), 0o600); err != nil {
		t.Errorf("the refused Detach did harm: %v", err)
	}
	command(t, ctx, "umount", dir)

	fio(t, ctx, a.Path, "--rw=randwrite", "--bs=4k", "--size=8m")
	f, err = os.Open(a.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := a.Detach(ctx, true); err != nil {
		t.Errorf("detaching what is open, by force: %v", err)
	}
	if _, err := f.Read(make([]byte, 4096)); err == nil {
		t.Error("a detached device was read")
	}
}

// TestCaseE06ConnectError connects to a busy index: the answer is that, and not what is left of a command before.
func TestCaseE06ConnectError(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20})
	a := attach(t, ctx, AttachConfig{Index: -1, Device: d})
	if err := d.Resize(4 << 20); err != nil { // leads to a RECONFIGURE
		t.Fatal(err)
	}
	ours, theirs, err := socketPairs(1)
	if err != nil {
		t.Fatal(err)
	}
	defer ours[0].Close()
	defer closeAll(theirs)
	for range 10 {
		if _, err := kernelCall(nlConnect, kernelSettings{index: a.Index, size: 4096, fds: descriptors(theirs)}); !errors.Is(err, unix.EBUSY) {
			t.Errorf("CONNECT: %v", err)
		}
	}
	detach(t, ctx, a)
}

// TestCaseE09Timeouts attaches one index twice, with other timeouts: the first are not to stay.
func TestCaseE09Timeouts(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20})
	for _, c := range []struct {
		connections int
		timeout     time.Duration
		want        string
	}{{2, 100 * time.Second, "100000"}, {1, 100 * time.Second, "10000"}, {2, 1000 * time.Hour, "1209600000"}} {
		a := attach(t, ctx, AttachConfig{Index: 4, Device: d, Connections: c.connections, RequestTimeout: c.timeout})
		got, err := os.ReadFile(sysPath(4, "queue", "io_timeout"))
		if strings.TrimSpace(string(got)) != c.want {
			t.Errorf("%d connections: the kernel's timeout is %s ms (%v), want %s", c.connections, got, err, c.want)
		}
		detach(t, ctx, a)
	}
}

// TestCaseE04JustLoaded attaches as soon as the module is loaded, while somebody looks into the new devices.
func TestCaseE04JustLoaded(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20})
	for range 3 {
		for { // what looked at the last test's device may still have it open
			if out, err := exec.CommandContext(ctx, "rmmod", "nbd").CombinedOutput(); err == nil || !hasFamily() {
				break
			} else if ctx.Err() != nil {
				t.Fatalf("rmmod: %v: %s", err, out)
			}
			time.Sleep(pollInterval)
		}
		looked, stop := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(looked)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if f, err := os.Open("/dev/nbd0"); err == nil {
					f.Close()
				}
				time.Sleep(time.Millisecond)
			}
		}()
		a, err := Attach(ctx, AttachConfig{Index: 0, Device: d})
		close(stop)
		<-looked
		if err != nil {
			t.Fatal(err)
		}
		detach(t, ctx, a)
	}
}

// TestCaseE05Churn attaches and detaches one index again and again, and once nothing is left.
func TestCaseE05Churn(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20})
	for range 20 {
		a := attach(t, ctx, AttachConfig{Index: 3, Device: d})
		if a.Path != "/dev/nbd3" {
			t.Fatalf("path %q", a.Path)
		}
		detach(t, ctx, a)
	}
}

// TestCaseE21Resize changes the size of an attached device, both ways.
func TestCaseE21Resize(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20})
	if err := d.Resize(8 << 20); err != nil {
		t.Fatal(err)
	}
	a := attach(t, ctx, AttachConfig{Index: -1, Device: d})
	for _, size := range []int64{64 << 20, 16 << 20} {
		if err := d.Resize(size); err != nil {
			t.Fatal(err)
		}
		for readState(a.Index).size != size {
			if ctx.Err() != nil {
				t.Fatalf("the size is %d, not %d", readState(a.Index).size, size)
			}
			time.Sleep(time.Millisecond) // sysfs gives no event
		}
	}
	detach(t, ctx, a)
}

func TestKernelPartitions(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 32 << 20})
	a := attach(t, ctx, AttachConfig{Index: -1, Device: d})
	table := aligned(512) // a master boot record with two partitions of Linux, each of 8 MiB
	for i, first := range []uint32{2048, 2048 + 16384} {
		entry := table[446+16*i:]
		entry[4] = 0x83
		binary.LittleEndian.PutUint32(entry[8:], first)
		binary.LittleEndian.PutUint32(entry[12:], 16384)
	}
	table[510], table[511] = 0x55, 0xaa
	f, err := os.OpenFile(a.Path, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(table); err != nil {
		t.Fatal(err)
	}
	f.Close()
	detach(t, ctx, a)
	a = attach(t, ctx, AttachConfig{Index: a.Index, Device: d})
	if p := partitions(a.Index); len(p) != 2 {
		t.Errorf("partitions after attach: %v", p)
	}
	detach(t, ctx, a)
	if p := partitions(a.Index); len(p) != 0 {
		t.Errorf("partitions after detach: %v", p)
	}
}

func TestKernelReadOnly(t *testing.T) {
	ctx := needKernel(t)
	a := attach(t, ctx, AttachConfig{Index: -1, ReadOnly: true, Device: memory(t, blockdev.MemoryConfig{Size: 8 << 20})})
	if got := strings.TrimSpace(command(t, ctx, "blockdev", "--getro", a.Path)); got != "1" {
		t.Errorf("read-only is %s", got)
	}
	detach(t, ctx, a)
}

// TestKernelNotRoot runs itself as nobody.
func TestKernelNotRoot(t *testing.T) {
	ctx := needKernel(t)
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20})
	if os.Getuid() != 0 {
		_, err := Attach(ctx, AttachConfig{Index: -1, Device: d})
		if !errors.Is(err, ErrNotRoot) {
			t.Errorf("%v", err)
		}
		return
	}
	if err := loadModule(ctx); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestKernelNotRoot$", "-test.v")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	c.Dir = "/"
	out, err := c.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestKernelWithoutModule has neither the kernel nor this process find modprobe.
func TestKernelWithoutModule(t *testing.T) {
	ctx := needKernel(t)
	old, err := os.ReadFile("/proc/sys/kernel/modprobe")
	if err != nil {
		t.Fatal(err)
	}
	// asking for the family would load it
	if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte("/bin/false"), 0o600); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.WriteFile("/proc/sys/kernel/modprobe", old, 0o600) }()
	out, _ := exec.CommandContext(ctx, "rmmod", "nbd").CombinedOutput()
	if hasFamily() {
		t.Fatalf("the module cannot be removed: something is left (%s)", out)
	}
	t.Setenv("PATH", t.TempDir())
	_, err = Attach(ctx, AttachConfig{Index: -1, Device: memory(t, blockdev.MemoryConfig{Size: 8 << 20})})
	if !errors.Is(err, ErrNoModule) || !strings.Contains(err.Error(), "modprobe nbd") {
		t.Errorf("%v", err)
	}
}
