package nbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// StaleDevice is a kernel device that Attach made, and whose process is gone.
type StaleDevice struct {
	Index      int    `json:"index"`
	Path       string `json:"path"`       // "/dev/nbdN"
	Identifier string `json:"identifier"` // as given to Attach
	Size       int64  `json:"size"`       // bytes
}

// Stale finds what dead processes left behind, to be taken over by Reattach or removed by DetachIndex. A device
// counts as left behind when nobody holds its lock file; and if it never had one (see noteThread), when the thread
// that connected it is gone too. lockDir is AttachConfig's.
func Stale(lockDir string) ([]StaleDevice, error) {
	if lockDir == "" {
		lockDir = defaultLockDir
	}
	list, err := indices()
	if err != nil {
		return nil, err
	}
	var out []StaleDevice
	for _, i := range list {
		s := readState(i)
		id, mine := ownIdentifier(s.backend)
		if !s.connected || !mine {
			continue
		}
		lock, err := lockIndex(context.Background(), lockDir, i, unix.LOCK_SH, 0) // several may look at once
		if err != nil {
			if errors.Is(err, unix.EWOULDBLOCK) {
				continue // somebody took it over
			}
			return out, err
		}
		noted := notedThread(lock)
		lock.Close()
		if s.pid != noted && threadLives(s.pid) {
			continue // just connected, or it could get no lock file
		}
		out = append(out, StaleDevice{Index: i, Path: devPath(i), Identifier: id, Size: s.size})
	}
	return out, nil
}

const defaultLockDir = "/run/lock/farblk"

// lockIndex takes the lock file of an index, which is held as long as the file is open: by its owner with how LOCK_EX. It
// waits for timeout.
func lockIndex(ctx context.Context, dir string, index, how int, timeout time.Duration) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "nbd"+strconv.Itoa(index)+".lock"), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(timeout); ; {
		if err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) || ctx.Err() != nil {
			f.Close()
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		time.Sleep(pollInterval)
	}
}

// noteThread says in the lock file that it is in use for the device that the kernel says this thread connected. From then
// on the lock alone tells whether somebody looks after the device. The thread does not: the kernel goes on naming it after
// a Reattach, its number may become another's, and it may be there as a zombie. The lock file of a device that has just been
// connected, and not locked yet, still names the thread of an earlier one.
func noteThread(lock *os.File, pid int) error {
	b := []byte(strconv.Itoa(pid))
	if _, err := lock.WriteAt(b, 0); err != nil {
		return err
	}
	return lock.Truncate(int64(len(b)))
}

// notedThread is what noteThread has written, or 0.
func notedThread(lock *os.File) int {
	b := make([]byte, 20)
	n, _ := lock.ReadAt(b, 0)
	pid, _ := strconv.Atoi(string(b[:n]))
	return pid
}

// threadLives says whether a thread exists and has not ended (proc(5), /proc/pid/stat, field 3).
func threadLives(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	after := b[bytes.LastIndexByte(b, ')')+1:] // the name before it may hold anything
	f := bytes.Fields(after)
	return len(f) > 0 && !bytes.ContainsAny(f[0], "ZXx")
}

// ownIdentifier says whether an identifier was given by Attach, and gives the caller's part.
func ownIdentifier(backend string) (string, bool) {
	return strings.CutPrefix(backend, identifierPrefix)
}
