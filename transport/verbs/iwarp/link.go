package iwarp

import (
	"errors"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
)

// link is the TCP connection under a queue pair. fd is used without the net package's locks, which a goroutine
// that waits for the socket holds: the queue pair uses it only in state up and under rx.mu or tx.mu, and the engine
// closes the connection only after that.
type link struct {
	tcp *net.TCPConn
	raw syscall.RawConn
	fd  int
}

// newLink makes every close of tcp a reset, release excepted. So what the socket holds is not sent after the end of the
// queue pair, nor after the end of the process, however it ends.
func newLink(tcp *net.TCPConn) (link, error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return link{}, err
	}
	l := link{tcp: tcp, raw: raw, fd: -1}
	if err := raw.Control(func(fd uintptr) { l.fd = int(fd) }); err != nil {
		return link{}, err
	}
	return l, tcp.SetLinger(0)
}

// errAgain: the socket has nothing to read, or no room.
const errAgain = syscall.EAGAIN

func (l *link) readv(v []unix.Iovec) (int, syscall.Errno) {
	for {
		n, _, e := syscall.Syscall(unix.SYS_READV, uintptr(l.fd), uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
		if e != syscall.EINTR {
			return int(n), e
		}
	}
}

func (l *link) read(b []byte) (int, syscall.Errno) {
	for {
		n, _, e := syscall.Syscall(unix.SYS_READ, uintptr(l.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		if e != syscall.EINTR {
			return int(n), e
		}
	}
}

func (l *link) writev(v []unix.Iovec) (int, syscall.Errno) {
	m := unix.Msghdr{Iov: &v[0]}
	m.SetIovlen(len(v))
	for {
		n, _, e := syscall.Syscall(unix.SYS_SENDMSG, uintptr(l.fd), uintptr(unsafe.Pointer(&m)), unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if e != syscall.EINTR {
			return int(n), e
		}
	}
}

// finish sends the end of the stream; the peer sees it after all that was written.
func (l *link) finish() { _ = unix.Shutdown(l.fd, unix.SHUT_WR) }

// release makes the coming close an orderly one.
func (l *link) release() { _ = l.tcp.SetLinger(-1) }

// acknowledged tells whether the peer has all data that was written. The end of the stream counts as one byte, and may
// be under way.
func (l *link) acknowledged() bool {
	n, err := unix.IoctlGetInt(l.fd, unix.SIOCOUTQ)
	return err == nil && n <= 1
}

// Options of every connection. The user timeout ends a connection whose peer stopped acknowledging data, the
// keepalive one that is idle: both in about half a minute, which is long before TCP's own quarter of an hour.
const (
	userTimeout = 30 * time.Second
	keepIdle    = 10 * time.Second
	keepEvery   = 5 * time.Second
	keepCount   = 4
)

func configure(tcp *net.TCPConn) error {
	if err := tcp.SetNoDelay(true); err != nil {
		return err
	}
	if err := tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepIdle, Interval: keepEvery, Count: keepCount}); err != nil {
		return err
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	if err := raw.Control(func(fd uintptr) {
		opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	}); err != nil {
		return err
	}
	return opt
}

// maxSegmentSize is TCP's own, for the size of FPDUs.
func (l *link) maxSegmentSize() int {
	mss, err := unix.GetsockoptInt(l.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	if err != nil {
		return 536 // what every path carries (RFC 9293 section 3.7.1)
	}
	return mss
}

// socketError adds the verbs error of a socket's.
func socketError(err error) error {
	for errno, v := range map[syscall.Errno]error{
		syscall.ECONNREFUSED:  verbs.ErrRefused,
		syscall.ENETUNREACH:   verbs.ErrUnreachable,
		syscall.EHOSTUNREACH:  verbs.ErrUnreachable,
		syscall.ENETDOWN:      verbs.ErrUnreachable,
		syscall.EINVAL:        verbs.ErrUnreachable, // a link-local address without its zone
		syscall.ENODEV:        verbs.ErrUnreachable, // a zone that is not there
		syscall.ETIMEDOUT:     verbs.ErrTimeout,
		syscall.ECONNRESET:    verbs.ErrDisconnected,
		syscall.EPIPE:         verbs.ErrDisconnected,
		syscall.EADDRINUSE:    verbs.ErrAddrInUse,
		syscall.EADDRNOTAVAIL: verbs.ErrAddrNotAvailable,
	} {
		if errors.Is(err, errno) {
			return &causeError{v, err}
		}
	}
	return err
}

// causeError is a verbs error with what the kernel said.
type causeError struct{ verbs, cause error }

func (e *causeError) Error() string   { return e.verbs.Error() + ": " + e.cause.Error() }
func (e *causeError) Unwrap() []error { return []error{e.verbs, e.cause} }
