package nbd

import (
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
// counts as left behind when neither the thread that connected it exists nor anybody holds its lock file. lockDir is
// AttachConfig's.
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
		gone := formerOwner(lock)
		lock.Close()
		if _, err := os.Stat("/proc/" + strconv.Itoa(s.pid)); err == nil && s.pid != gone {
			continue
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

// The kernel goes on naming the thread that connected a device after that was taken over, and the thread's number may
// become another's. So whoever takes over writes it into the lock file: noteFormerOwner, with 0 for none.
func noteFormerOwner(lock *os.File, pid int) error {
	b := []byte(strconv.Itoa(pid))
	if _, err := lock.WriteAt(b, 0); err != nil {
		return err
	}
	return lock.Truncate(int64(len(b)))
}

// formerOwner is what noteFormerOwner has written, or 0.
func formerOwner(lock *os.File) int {
	b := make([]byte, 20)
	n, _ := lock.ReadAt(b, 0)
	pid, _ := strconv.Atoi(string(b[:n]))
	return pid
}

// ownIdentifier says whether an identifier was given by Attach, and gives the caller's part.
func ownIdentifier(backend string) (string, bool) {
	return strings.CutPrefix(backend, identifierPrefix)
}
