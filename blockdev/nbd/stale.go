package nbd

import (
	"context"
	"errors"
	"os"
	"strconv"

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
// counts as left behind when neither the thread that connected it exists nor anybody holds its lock file.
// lockDir is AttachConfig's.
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
		if _, err := os.Stat("/proc/" + strconv.Itoa(s.pid)); err == nil {
			continue
		}
		lock, err := lockIndex(context.Background(), lockDir, i, 0)
		if err != nil {
			if errors.Is(err, unix.EWOULDBLOCK) {
				continue // somebody took it over
			}
			return out, err
		}
		lock.Close()
		out = append(out, StaleDevice{Index: i, Path: devPath(i), Identifier: id, Size: s.size})
	}
	return out, nil
}
