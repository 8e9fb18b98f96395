package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// letGo gives up the exported devices and files that this process was started with, as in `farblk disconnect <DEVICE`,
// but for standard output and error: it would be their user itself. Each descriptor becomes /dev/null. It asks nothing
// of the files, because whoever serves them may hang.
func letGo() {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer null.Close()
	open, _ := filepath.Glob("/proc/self/fd/*")
	for _, path := range open {
		fd, err := strconv.Atoi(filepath.Base(path))
		if err != nil || fd == 1 || fd == 2 {
			continue
		}
		if what, err := os.Readlink(path); err == nil && (strings.HasPrefix(what, "/dev/nbd") || onFUSE(fd)) {
			_ = unix.Dup3(int(null.Fd()), fd, unix.O_CLOEXEC)
		}
	}
}

// onFUSE tells from proc_pid_fdinfo(5) and proc_pid_mountinfo(5) whether an open file is in a FUSE mount.
func onFUSE(fd int) bool {
	info, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return false
	}
	_, id, _ := strings.Cut(string(info), "mnt_id:")
	id, _, _ = strings.Cut(strings.TrimSpace(id), "\n")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.HasPrefix(line, id+" ") {
			_, kind, _ := strings.Cut(line, " - ")
			return strings.HasPrefix(kind, "fuse")
		}
	}
	return false
}
