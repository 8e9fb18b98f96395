package nbd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pathLimit is the room for a path in a Unix socket's address, less the closing zero (unix(7)).
const pathLimit = 107

// ListenUnix listens at path, which only the owner may connect to (mode 0600). A socket left behind by a
// process that is gone is replaced; one at which somebody listens, and any other kind of file, is an error.
// Closing the listener removes the file, if it is still the listener's.
func ListenUnix(path string) (net.Listener, error) {
	if path == "" || len(path) > pathLimit {
		return nil, fmt.Errorf("nbd: the path of a socket must have from 1 to %d bytes, this one has %d: %q", pathLimit, len(path), path)
	}
	l, err := bindUnix(path)
	if errors.Is(err, unix.EADDRINUSE) {
		if err = removeStale(path); err == nil {
			l, err = bindUnix(path)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("nbd: listen: %w", err)
	}
	return l, nil
}

func bindUnix(path string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		// Linux gives the file the mode that the socket has when it is bound, so nobody else gets in before.
		if e := raw.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); e != nil {
			return e
		}
		return os.NewSyscallError("fchmod", err)
	}}
	l, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	f, err := os.Lstat(path)
	if err != nil {
		u.Close()
		return nil, err
	}
	return &unixListener{UnixListener: u, path: path, file: f}, nil
}

// removeStale removes the socket at path if nobody listens there.
func removeStale(path string) error {
	before, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if before.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("%s exists and is not a socket", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return fmt.Errorf("somebody listens at %s already: %w", path, unix.EADDRINUSE)
	case !errors.Is(err, unix.ECONNREFUSED):
		return err
	}
	if now, err := os.Lstat(path); err != nil || !os.SameFile(before, now) {
		return fmt.Errorf("somebody else is replacing %s: %w", path, unix.EADDRINUSE)
	}
	return os.Remove(path)
}

// unixListener removes its own file when it is closed, and no other.
type unixListener struct {
	*net.UnixListener
	path string
	file os.FileInfo
	once sync.Once
}

func (l *unixListener) Close() error {
	l.once.Do(func() {
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(l.file, now) {
			_ = os.Remove(l.path)
		}
	})
	return l.UnixListener.Close()
}
