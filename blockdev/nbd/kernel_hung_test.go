package nbd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"farblk/blockdev"
)

// TestCaseH23HungDevice takes a device from the kernel whose requests have no end, while processes wait for them: in
// read and in fsync. They are let go with an error, in bounded time: nobody is left in uninterruptible sleep.
func TestCaseH23HungDevice(t *testing.T) {
	ctx := needKernel(t)
	var hangs atomic.Bool
	hold := make(chan struct{})
	d := blockdev.NewFaulty(memory(t, blockdev.MemoryConfig{Size: 8 << 20}), func(*blockdev.Request) (f blockdev.Fault) {
		if hangs.Load() {
			f.Hold = hold
		}
		return f
	})
	var a *Attachment
	t.Cleanup(func() { a.running.Wait() })
	a = attach(t, ctx, AttachConfig{Index: -1, Device: d})
	t.Cleanup(func() { close(hold) }) // first of all
	hangs.Store(true)
	var users []*exec.Cmd
	ended := make(chan error, 2)
	for _, args := range [][]string{
		{"if=" + a.Path, "of=/dev/null", "iflag=direct"},
		{"if=/dev/zero", "of=" + a.Path, "seek=10", "conv=fsync"},
	} {
		dd := exec.Command("dd", append(args, "bs=64k", "count=1", "status=none")...)
		if err := dd.Start(); err != nil {
			t.Fatal(err)
		}
		users = append(users, dd)
		go func() { ended <- dd.Wait() }()
	}
	for len(a.Holders()) < 2 || inFlight(t, a.Index) < 2 { // neither procfs nor sysfs gives an event
		if ctx.Err() != nil {
			t.Fatalf("%v use it, %d requests are under way", a.Holders(), inFlight(t, a.Index))
		}
		time.Sleep(time.Millisecond)
	}
	for _, dd := range users {
		awaitState(t, ctx, dd.Process.Pid, "D")
	}
	detach := func(limit time.Duration, force bool) error {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		begin := time.Now()
		defer func() {
			if d := time.Since(begin); d > limit+time.Second {
				t.Errorf("force %v: it took %v", force, d)
			}
		}()
		return a.Detach(ctx, force)
	}
	var busy *BusyError
	if err := detach(2*time.Second, false); !errors.As(err, &busy) {
		t.Errorf("in use: %v", err)
	}
	if err := detach(2*time.Second, true); err != nil && !errors.Is(err, context.DeadlineExceeded) { // the requests have no end
		t.Errorf("by force: %v", err)
	}
	late := time.After(2 * time.Second)
	for range users {
		select {
		case err := <-ended:
			if err == nil {
				t.Error("a process saw no error")
			}
		case <-late:
			t.Fatalf("they still wait, in states %s and %s", taskState(users[0].Process.Pid), taskState(users[1].Process.Pid))
		}
	}
	if s := readState(a.Index); s.connected || s.size != 0 {
		t.Errorf("it is still there: %+v", s)
	}
}

// awaitState waits until a process is in a state.
func awaitState(t *testing.T, ctx context.Context, pid int, state string) {
	t.Helper()
	for taskState(pid) != state { // /proc gives no event
		if ctx.Err() != nil {
			t.Fatalf("process %d is in state %s, not %s", pid, taskState(pid), state)
		}
		time.Sleep(time.Millisecond)
	}
}

// taskState is a process's state in one letter: D is uninterruptible sleep, T is stopped.
func taskState(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(b), ") ")
	state, _, _ := strings.Cut(rest, " ")
	return state
}
