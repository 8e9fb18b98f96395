package fuse

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(serveAt); path != "" {
		if err := serve(path); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func needFUSE(t testing.TB) {
	t.Helper()
	if err := checkDevice(); err != nil {
		t.Skip(err)
	}
	if os.Geteuid() != 0 {
		needProgram(t, "fusermount3")
	}
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

func needProgram(t testing.TB, names ...string) {
	t.Helper()
	for _, n := range names {
		if _, err := exec.LookPath(n); err != nil {
			t.Skip(err)
		}
	}
}

// mount mounts until the test ends.
func mount(t testing.TB, c Config) *Mounted {
	t.Helper()
	needFUSE(t)
	if c.Path == "" {
		c.Path = filepath.Join(t.TempDir(), "mnt")
	}
	m, err := Mount(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := m.Unmount(ctx, false); err != nil {
			t.Error(err)
			_ = m.Unmount(ctx, true)
		}
	})
	return m
}

// open avoids package os, which would ask the file to be polled, from a goroutine that the server may need.
func open(t testing.TB, path string, flags int) int {
	t.Helper()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open %s: %v", path, err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}
