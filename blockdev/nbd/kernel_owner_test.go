package nbd

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// owner is a process of its own that attaches a device kept in a file.
type owner struct {
	*exec.Cmd
	index int
}

const ownerFile = "FARBLK_NBD_OWNER_FILE"

func startOwner(t *testing.T, file string) *owner {
	t.Helper()
	o := &owner{Cmd: exec.Command(os.Args[0])}
	o.Env = append(os.Environ(), ownerFile+"="+file)
	o.Stderr = os.Stderr
	out, err := o.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.Process.Kill(); _ = o.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if n, _ := fmt.Sscanf(line, "nbd %d", &o.index); n != 1 {
		t.Fatalf("the owner said %q (%v)", line, err)
	}
	return o
}

func fileDevice(t testing.TB, path string) *blockdev.Memory {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return memory(t, keptIn(f))
}

func keptIn(f *os.File) blockdev.MemoryConfig {
	return blockdev.MemoryConfig{Size: 64 << 20, Queues: 2, PoolSize: 16 << 20, File: f, ID: "kept"}
}

// beOwner is the other process: it attaches, says where, and lives until it is killed.
func beOwner(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	d, err := blockdev.NewMemory(keptIn(f))
	if err != nil {
		return err
	}
	a, err := Attach(context.Background(), AttachConfig{Index: -1, Device: d})
	if err != nil {
		return err
	}
	fmt.Printf("nbd %d\n", a.Index)
	select {}
}

// TestCaseE08Recovery kills the owner of a device under load, and takes over: no error, no write lost.
func TestCaseE08Recovery(t *testing.T) {
	ctx := needKernel(t)
	path := filepath.Join(t.TempDir(), "data")
	o := startOwner(t, path)
	load := exec.CommandContext(ctx, "fio", "--name=verify", "--filename="+devPath(o.index), "--direct=1", "--ioengine=libaio",
		"--iodepth=16", "--rw=randwrite", "--bs=4k", "--size=32m", "--io_size=96m", "--verify=crc32c", "--verify_state_save=0", "--verify_fatal=1", "--minimal")
	var out bytes.Buffer
	load.Stdout, load.Stderr = &out, &out
	load.WaitDelay = time.Second
	if err := load.Start(); err != nil {
		t.Fatal(err)
	}
	if !awaitWrites(t, ctx, o.index, 1000) { // under load
		t.Fatalf("fio does not write: %s", out.String())
	}
	if _, err := Reattach(ctx, AttachConfig{Index: o.index, Device: memory(t, blockdev.MemoryConfig{Size: 1 << 20})}); err == nil {
		t.Error("a device was taken over with another identifier")
	}
	if err := o.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = o.Wait()
	look, err := lockIndex(ctx, defaultLockDir, o.index, unix.LOCK_SH, 0) // as another's Stale does
	if err != nil {
		t.Fatal(err)
	}
	stale, err := Stale("")
	if err != nil || len(stale) != 1 || stale[0].Index != o.index || stale[0].Identifier != "kept" {
		t.Errorf("left over: %+v, %v", stale, err)
	}
	time.AfterFunc(lockTimeout/10, func() { look.Close() })
	a, err := Reattach(ctx, AttachConfig{Index: o.index, Device: fileDevice(t, path)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Detach(ctx, true) })
	if err := load.Wait(); err != nil {
		t.Errorf("fio: %v\n%s", err, out.String())
	}
	if stale, err := Stale(""); err != nil || len(stale) != 0 {
		t.Errorf("left over after it was taken over: %+v, %v", stale, err)
	}
	if got, want := notedThread(a.lock), readState(o.index).pid; got != want {
		t.Errorf("the lock file names %d, the kernel %d", got, want)
	}
	detach(t, ctx, a)
}

// TestCaseE07LivingSocket: the kernel ignores a new socket as long as the old one lives, without an error of its own.
// It is noticed, and does no harm. In TestCaseE08Recovery the old one is dead.
func TestCaseE07LivingSocket(t *testing.T) {
	ctx := needKernel(t)
	a := attach(t, ctx, AttachConfig{Index: -1, Device: memory(t, blockdev.MemoryConfig{Size: 8 << 20})})
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if err := a.replace(short, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a new socket beside one that lives: %v", err)
	}
	fio(t, ctx, a.Path, "--rw=randwrite", "--bs=4k", "--size=4m")
	detach(t, ctx, a)
}

// writes counts those that a device has completed (Documentation/block/stat.rst, field 5).
func writes(t *testing.T, index int) (n int64) {
	b, err := os.ReadFile(sysPath(index, "stat"))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Sscan(strings.Fields(string(b))[4], &n)
	return n
}

// inFlight counts the requests that a device has not answered.
func inFlight(t *testing.T, index int) (n int) {
	b, err := os.ReadFile(sysPath(index, "inflight"))
	if err != nil {
		t.Fatal(err)
	}
	var reads, writes int
	_, _ = fmt.Sscan(string(b), &reads, &writes)
	return reads + writes
}

// awaitWrites waits until a device has completed n writes more, and says whether it did before ctx ended.
func awaitWrites(t *testing.T, ctx context.Context, index int, n int64) bool {
	t.Helper()
	tick := time.NewTicker(time.Millisecond) // sysfs gives no event
	defer tick.Stop()
	for begin := writes(t, index); writes(t, index) < begin+n; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// TestCaseE17Stale removes what a killed process left behind.
func TestCaseE17Stale(t *testing.T) {
	ctx := needKernel(t)
	o := startOwner(t, filepath.Join(t.TempDir(), "data"))
	if stale, err := Stale(""); err != nil || len(stale) != 0 {
		t.Errorf("left over while the owner lives: %+v, %v", stale, err)
	}
	_ = o.Process.Kill()
	_ = o.Wait()
	stale, err := Stale("")
	if err != nil || len(stale) != 1 {
		t.Fatalf("left over: %+v, %v", stale, err)
	}
	f, err := os.Open(stale[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	var busy *BusyError
	if err := DetachIndex(ctx, stale[0].Index, false); !errors.As(err, &busy) {
		t.Errorf("removing a left-over that is open: %v", err)
	}
	f.Close()
	if err := DetachIndex(ctx, stale[0].Index, false); err != nil {
		t.Error(err)
	}
	if s := readState(o.index); s.connected || s.size != 0 {
		t.Errorf("after its removal: %+v", s)
	}
}

// TestCaseE17Lock: the lock tells about a device whose lock file names the kernel's thread, even if that thread is there.
func TestCaseE17Lock(t *testing.T) {
	ctx := needKernel(t)
	a := attach(t, ctx, AttachConfig{Index: -1, Device: memory(t, blockdev.MemoryConfig{Size: 8 << 20})})
	if err := unix.Flock(int(a.lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if stale, err := Stale(""); err != nil || len(stale) != 1 || stale[0].Index != a.Index {
		t.Errorf("nobody holds the lock: %+v, %v", stale, err)
	}
	if err := noteThread(a.lock, os.Getppid()); err != nil { // as an earlier device left it
		t.Fatal(err)
	}
	if stale, err := Stale(""); err != nil || len(stale) != 0 {
		t.Errorf("just connected: %+v, %v", stale, err)
	}
	detach(t, ctx, a)
}

// TestCaseE17Closing: a process that closes a left-over waits for what it wrote, and does not show as a holder.
func TestCaseE17Closing(t *testing.T) {
	ctx := needKernel(t)
	for _, sent := range []bool{true, false} { // what it wrote was sent to the owner, or comes when that is gone
		o := startOwner(t, filepath.Join(t.TempDir(), "data"))
		kill := func() { _ = o.Process.Kill(); _ = o.Wait() }
		if sent {
			_ = o.Process.Signal(syscall.SIGSTOP)
			awaitState(t, ctx, o.Process.Pid, "T")
		} else {
			kill()
		}
		w := exec.CommandContext(ctx, "dd", "if=/dev/zero", "of="+devPath(o.index), "bs=64k", "count=1", "conv=notrunc", "status=none")
		if err := w.Start(); err != nil {
			t.Fatal(err)
		}
		for !requestsWait(o.index) || len(holders(o.index, -1)) > 0 { // sysfs gives no event
			if ctx.Err() != nil {
				t.Fatalf("sent %v: requests wait: %v, holders: %v", sent, requestsWait(o.index), holders(o.index, -1))
			}
			time.Sleep(time.Millisecond)
		}
		if sent {
			kill()
		}
		var busy *BusyError
		if err := DetachIndex(ctx, o.index, false); !errors.As(err, &busy) || !busy.Waiting {
			t.Errorf("sent %v: %v", sent, err)
		}
		if err := DetachIndex(ctx, o.index, true); err != nil {
			t.Error(err)
		}
		_ = w.Wait()
	}
}

// TestCaseE02Stop stops and continues the owner of a device in the midst of requests.
func TestCaseE02Stop(t *testing.T) {
	ctx := needKernel(t)
	const depth = 8
	o := startOwner(t, filepath.Join(t.TempDir(), "data"))
	done := make(chan string, 1)
	go func() {
		out, err := exec.CommandContext(ctx, "fio", "--name=v", "--filename="+devPath(o.index), "--direct=1", "--ioengine=libaio", fmt.Sprint("--iodepth=", depth),
			"--rw=randwrite", "--bs=4k", "--size=16m", "--verify=crc32c", "--verify_state_save=0", "--minimal").CombinedOutput()
		if err != nil {
			done <- fmt.Sprintf("%v\n%s", err, out)
		}
		close(done)
	}()
	for range 5 {
		if !awaitWrites(t, ctx, o.index, 100) { // under load, and again after each stop
			t.Fatal("fio does not write")
		}
		_ = o.Process.Signal(syscall.SIGSTOP)
		awaitState(t, ctx, o.Process.Pid, "T")
		for inFlight(t, o.index) < depth { // until all that fio asks for waits
			if ctx.Err() != nil {
				t.Fatalf("the stop meets %d requests", inFlight(t, o.index))
			}
			time.Sleep(time.Millisecond)
		}
		_ = o.Process.Signal(syscall.SIGCONT)
	}
	if s := <-done; s != "" {
		t.Error(s)
	}
	_ = o.Process.Kill()
	_ = o.Wait()
	if err := DetachIndex(ctx, o.index, false); err != nil {
		t.Error(err)
	}
}
