package session

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"
)

// process starts one that lives until it is told to end, or until the test does.
func process(t *testing.T, lock *os.File) (cmd *exec.Cmd, end func() error) {
	t.Helper()
	cmd = exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if lock != nil {
		cmd.ExtraFiles = []*os.File{lock}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceValue(func() error {
		_ = in.Close()
		return cmd.Wait()
	})
	t.Cleanup(func() { _ = end() })
	return cmd, end
}

// A session that fails to start removes its folder. When another one has taken the free name before the command that
// started the first looks, that one keeps what is its own.
func TestFailedStartLeavesTheNextAlone(t *testing.T) {
	d, _ := stateDir(t, nil)
	a := create(t, d, config(), false)
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a.Remove() // as the process does that has failed
	c := config()
	c.Subsystem = "nqn.b"
	b := create(t, d, c, false)
	defer b.Remove()
	if err := os.WriteFile(b.file("log"), []byte("not yours\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	a.reap(cmd)
	if b.Path != a.Path || !alive(b.Path) || a.words != "" {
		t.Errorf("%s took the name of %s: alive is %v, last words %q", b.Path, a.Path, alive(b.Path), a.words)
	}
}

// The number of an owner that died may be somebody else's when its folder is taken over: that one is not killed.
func TestTakeOverForgetsTheOwner(t *testing.T) {
	d, _ := stateDir(t, map[string]bool{"/dev/nbd0": true})
	f := create(t, d, config(), false)
	stranger, end := process(t, nil)
	if err := os.WriteFile(f.file("lock"), []byte(strconv.Itoa(stranger.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	die(t, f, Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1})
	defer create(t, d, config(), false).Remove()
	if err := d.Disconnect(t.Context(), "farblk0", true); err == nil {
		t.Error("disconnected a session that is just being started")
	}
	if err := end(); err != nil {
		t.Error("the stranger:", err)
	}
}

// Several dead sessions are cleared away together, though each takes its time.
func TestDisconnectSeveralDead(t *testing.T) {
	t.Parallel()
	d, _ := stateDir(t, nil)
	var dead []*Folder
	for i := range 3 {
		c := config()
		c.Subsystem = fmt.Sprint("nqn.", i)
		dead = append(dead, create(t, d, c, false))
	}
	for _, f := range dead {
		die(t, f, Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1})
	}
	d.RemoveLeftover = func(Leftover, bool) error {
		<-time.After(700 * time.Millisecond) // the kernel takes it
		return nil
	}
	var wg sync.WaitGroup
	for _, f := range dead {
		wg.Go(func() {
			if err := d.Disconnect(t.Context(), filepath.Base(f.Path), true); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// A session that was killed and is still being taken apart, which takes the kernel a moment, is listed as what it is.
func TestListShowsOneThatIsDying(t *testing.T) {
	d, _ := stateDir(t, map[string]bool{"/dev/nbd0": true})
	f := create(t, d, config(), false)
	time.AfterFunc(50*time.Millisecond, func() { die(t, f, Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1}) })
	if all, err := d.List(); err != nil || len(all) != 1 || all[0].State != Crashed {
		t.Errorf("%+v, %v", all, err)
	}
}

// Nor is disconnect told that it does not answer.
func TestDisconnectOneThatIsDying(t *testing.T) {
	t.Parallel()
	d, _ := stateDir(t, nil)
	f := create(t, d, config(), false)
	dying, end := process(t, f.lock)
	f.lock.Close() // the process has it
	if err := os.WriteFile(f.file("lock"), []byte(strconv.Itoa(dying.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(500*time.Millisecond, func() { _ = end() })
	if err := d.Disconnect(t.Context(), "farblk0", false); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(f.Path); err == nil {
		t.Error("its folder is still there")
	}
}

// Nor does it keep the same connection from being made anew.
func TestCreateWaitsForOneThatIsDying(t *testing.T) {
	t.Parallel()
	d, _ := stateDir(t, nil)
	f := create(t, d, config(), false)
	dead, _ := process(t, nil)
	if err := dead.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.file("lock"), []byte(strconv.Itoa(dead.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	for !dying(f.Path) { // the kill takes a moment; then it is a zombie until the test ends
		time.Sleep(time.Millisecond)
	}
	time.AfterFunc(50*time.Millisecond, func() { die(t, f) })
	create(t, d, config(), false).Remove()
}
