package fuse

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

// serveAt names the folder that this test binary serves, instead of testing, until SIGTERM.
const serveAt = "FARBLK_TEST_FUSE_SERVE"

func serve(path string) error {
	dev, err := blockdev.NewMemory(blockdev.MemoryConfig{Size: 64 << 20, Queues: 2, Latency: -1})
	if err != nil {
		return err
	}
	m, err := Mount(context.Background(), Config{Path: path, Devices: map[string]blockdev.Device{"n1": dev}})
	if err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	fmt.Println("ready")
	<-stop
	return m.Unmount(context.Background(), false)
}

// startServer serves a folder in another process and returns when it can be used.
func startServer(t testing.TB, program, path string, attr *syscall.SysProcAttr) *exec.Cmd {
	t.Helper()
	c := exec.Command(program)
	c.SysProcAttr = attr
	c.Env = append(os.Environ(), serveAt+"="+path)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		_ = detach(path)
	})
	b := make([]byte, 200)
	if n, err := out.Read(b); err != nil || string(b[:n]) != "ready\n" {
		t.Fatalf("the other process: %q, %v", b[:n], err)
	}
	return c
}

// TestCaseE19StaleMount kills a server and mounts at the same place; TestCaseE15 is the same with one that lives.
func TestCaseE19StaleMount(t *testing.T) {
	needFUSE(t)
	path := filepath.Join(t.TempDir(), "mnt")
	other := startServer(t, os.Args[0], path, nil)
	fd := open(t, path+"/n1", unix.O_RDWR)
	cfg := Config{Path: path, Devices: map[string]blockdev.Device{"n1": blockdevtest.Memory(t, blockdev.MemoryConfig{Size: 1 << 20})}}
	if _, err := Mount(t.Context(), cfg); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("mounting over a living mount: %v", err)
	}
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.Wait()
	if _, err := unix.Pread(fd, make([]byte, 512), 0); err == nil {
		t.Fatal("the killed server answers")
	}
	if err := unix.Access(path, unix.F_OK); err != unix.ENOTCONN {
		t.Fatalf("the stale mount: %v", err)
	}
	m := mount(t, cfg)
	if _, err := unix.Pread(open(t, m.File("n1"), unix.O_RDWR), make([]byte, 512), 0); err != nil {
		t.Error(err)
	}
}

// TestWithoutRoot serves as a user who needs fusermount3 to mount and unmount.
func TestWithoutRoot(t *testing.T) {
	needFUSE(t)
	needProgram(t, "fusermount3", "dd")
	var nobody *syscall.SysProcAttr            // or who we are
	dir, err := os.MkdirTemp("/tmp", "farblk") // the user must be able to reach it
	if err == nil && os.Geteuid() == 0 {
		nobody = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		err = os.Chown(dir, 65534, 65534)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	program := filepath.Join(dir, "server")
	if err := os.Link(os.Args[0], program); err != nil {
		run(t, "cp", os.Args[0], program)
	}
	if err := os.Chmod(program, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "mnt")
	server := startServer(t, program, path, nobody)
	dd := exec.Command("dd", "if=/dev/zero", "of="+path+"/n1", "bs=1M", "count=4", "oflag=direct", "conv=notrunc,fsync")
	dd.SysProcAttr = nobody
	if out, err := dd.CombinedOutput(); err != nil {
		t.Errorf("dd: %v: %s", err, out)
	}
	if err := server.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := server.Wait(); err != nil {
		t.Errorf("the server did not unmount: %v", err)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("the folder that Mount made is left")
	}
}
