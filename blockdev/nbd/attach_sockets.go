package nbd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// socketPairs makes n pairs of connected sockets: our ends, and the kernel's.
func socketPairs(n int) (ours []net.Conn, theirs []*os.File, err error) {
	for range n {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			theirs = append(theirs, os.NewFile(uintptr(fds[1]), "nbd"))
			for _, fd := range fds { // room for a few long requests; a wish
				_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20)
			}
			f := os.NewFile(uintptr(fds[0]), "nbd")
			var c net.Conn
			if c, err = net.FileConn(f); err == nil {
				ours = append(ours, c)
			}
			f.Close()
		}
		if err != nil {
			closeAll(theirs)
			for _, c := range ours {
				c.Close()
			}
			return nil, nil, fmt.Errorf("nbd: socket pair: %w", err)
		}
	}
	return ours, theirs, nil
}

func descriptors(files []*os.File) (fds []int) {
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	return fds
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// serve answers the kernel on one socket. When the kernel has given the socket up, which it does after
// RequestTimeout, it gets a new one, after all that came in on the old one is done with.
func (a *Attachment) serve(sock net.Conn, number int) {
	if !a.srv.admit(sock) {
		return
	}
	a.running.Go(func() {
		err := func() error {
			defer func() {
				sock.Close()
				a.srv.forget(sock)
			}()
			c, err := newConn(a.srv, sock, agreed{export: a.export}, number)
			if err != nil {
				return err
			}
			c.kernel = true
			a.srv.transmit(c)
			if c.farewell {
				return nil
			}
			return io.ErrUnexpectedEOF
		}()
		select {
		case <-a.stop:
			return
		default:
		}
		select {
		case <-a.named:
		default: // the kernel never had it
			return
		}
		if err == nil {
			a.cfg.Logger.Info("nbd: the kernel disconnected", "device", a.Path)
			return
		}
		a.cfg.Logger.Warn("nbd: the kernel gave up a socket; giving it a new one", "device", a.Path)
		ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
		defer cancel()
		if err := a.replace(ctx, 1); err != nil && !errors.Is(err, net.ErrClosed) {
			a.cfg.Logger.Error("nbd: the kernel took no new socket", "device", a.Path, "err", err)
		}
	})
}

// replace gives the kernel n new sockets in place of n that are dead, and waits until it took them: it notices
// that a socket is dead only after its end is closed. It changes nothing else: the kernel would first wait for the
// requests under way, which wait for the sockets.
func (a *Attachment) replace(ctx context.Context, n int) error {
	if err := a.lockKernel(ctx); err != nil {
		return err
	}
	defer a.unlockKernel()
	for number := 0; number < n; {
		if a.detached {
			return net.ErrClosed
		}
		ours, theirs, err := socketPairs(1)
		if err != nil {
			return err
		}
		_, err = kernelCall(nlReconfigure, kernelSettings{
			index: a.Index, backend: a.backend, fds: descriptors(theirs), deadTimeout: a.cfg.DeadTimeout,
		})
		closeAll(theirs)
		if err == nil && peerAlive(ours[0]) {
			a.serve(ours[0], number)
			number++
			continue
		}
		ours[0].Close()
		if err != nil {
			return fmt.Errorf("reconfigure %s: %w", a.Path, err)
		}
		select { // no dead socket yet, or no more of them
		case <-ctx.Done():
			return fmt.Errorf("%s has other sockets that still live: %w", a.Path, ctx.Err())
		case <-time.After(pollInterval):
		}
	}
	return nil
}

// tune adjusts the new device's queue. The kernel waits for the requests under way, so that later is too late.
//
// io_timeout is the time between the kernel's looks at a request that takes long, when all a look can lead to is
// that the request goes to a new socket: 30 s otherwise. The scheduler would be one for a single slow disk, since
// the device has a single hardware queue; measured beside none it costs 10 % of the IOPS at depth 32.
func (a *Attachment) tune(ctx context.Context) {
	a.setQueue(ctx, "scheduler", "none")
	if a.cfg.Connections == 1 {
		a.setQueue(ctx, "io_timeout", strconv.FormatInt(lookAgain.Milliseconds(), 10))
	}
}

func (a *Attachment) setQueue(ctx context.Context, name, value string) {
	path := sysPath(a.Index, "queue", name)
	if err := call(ctx, func() error { return os.WriteFile(path, []byte(value), 0o644) }); err != nil {
		a.cfg.Logger.Warn("nbd: the device stays as the kernel made it: slower, or slower to recover", "device", a.Path, "setting", name, "err", err)
	}
}

// peerAlive says whether the other end of a socket pair is still open somewhere.
func peerAlive(c net.Conn) bool {
	raw, err := rawConn(c)
	if err != nil {
		return false
	}
	alive := false
	_ = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		alive = err == nil && (n == 0 || p[0].Revents&(unix.POLLHUP|unix.POLLRDHUP) == 0)
	})
	return alive
}
