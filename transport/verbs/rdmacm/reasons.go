package rdmacm

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"farblk/transport/verbs"
)

// eventType is enum rdma_cm_event_type.
type eventType int

const (
	addrResolved eventType = iota
	addrError
	routeResolved
	routeError
	connectRequest
	connectResponse
	connectError
	unreachable
	rejected
	established
	disconnected
	deviceRemoval
	multicastJoin
	multicastError
	addrChange
	timewaitExit
)

// String is the event's name in words.
func (e eventType) String() string {
	words := [...]string{
		"address resolved", "address error", "route resolved", "route error", "connect request", "connect response",
		"connect error", "unreachable", "rejected", "established", "disconnected", "device removal",
		"multicast join", "multicast error", "address change", "timewait exit",
	}
	if e >= 0 && int(e) < len(words) {
		return words[e]
	}
	return fmt.Sprintf("event %d", int(e))
}

// errnoError gives an errno of librdmacm, libibverbs or the kernel's CM the class of package verbs.
func errnoError(e syscall.Errno) error {
	switch e {
	case syscall.ENODEV:
		return verbs.ErrNoDevice
	case syscall.EADDRINUSE:
		return verbs.ErrAddrInUse
	case syscall.EADDRNOTAVAIL:
		return verbs.ErrAddrNotAvailable
	case syscall.ECONNREFUSED:
		return verbs.ErrRefused
	case syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.ENETDOWN:
		return verbs.ErrUnreachable
	case syscall.ETIMEDOUT:
		return verbs.ErrTimeout
	case syscall.ECONNRESET, syscall.ENOTCONN, syscall.EPIPE:
		return verbs.ErrDisconnected
	case syscall.EOPNOTSUPP, syscall.ENOSYS:
		return verbs.ErrUnsupported
	default:
		return nil
	}
}

// callError is a failed library call: its name, what it was for, and why. errno is positive.
func callError(call string, errno int, about any) error {
	e := syscall.Errno(errno)
	if class := errnoError(e); class != nil {
		return fmt.Errorf("%v: %w (%s: %w)", about, class, call, e)
	}
	return fmt.Errorf("%v: %s: %w", about, call, e)
}

// resolveFailure is the event that ended address or route resolution.
func resolveFailure(t eventType, status int, remote verbs.Addr) error {
	e := syscall.Errno(abs(status))
	switch {
	case t == deviceRemoval:
		return fmt.Errorf("%v: %w", remote, verbs.ErrDeviceRemoved)
	case (t == addrError || t == routeError) && e == syscall.ENODEV: // of the loopback interface only the route says so
		return fmt.Errorf("%w leads to %v: the route to it goes over a network interface without RDMA", verbs.ErrNoDevice, remote)
	case t == addrError && (e == syscall.EADDRNOTAVAIL || e == syscall.EADDRINUSE):
		return fmt.Errorf("%v: %w (%v)", remote, errnoError(e), t)
	case t == addrError && e == syscall.ETIMEDOUT:
		return fmt.Errorf("%v: %w: the address did not resolve in time (no ARP or neighbour reply)", remote, verbs.ErrUnreachable)
	case status != 0:
		return fmt.Errorf("%v: %w (%v: %w)", remote, verbs.ErrUnreachable, t, e)
	default:
		return fmt.Errorf("%v: %w (%v)", remote, verbs.ErrUnreachable, t)
	}
}

// Reject reasons of IBA 12.6.7.2 that need a word of their own.
const reasonConsumer = 28

// connectFailure is the event that ended a connection attempt. The status of a reject is the fabric's reason on
// InfiniBand and RoCE, and a negative errno on iWARP: there ECONNRESET is the peer's own reject (or a peer that
// hung up in the handshake) and ECONNREFUSED that nobody listens.
func connectFailure(t eventType, status int, private []byte, remote verbs.Addr) error {
	e := syscall.Errno(abs(status))
	switch {
	case t == rejected && status > 0:
		r := &verbs.RejectError{Reason: status, Consumer: status == reasonConsumer}
		if r.Consumer {
			r.PrivateData = private
		}
		return fmt.Errorf("%v: %w", remote, r)
	case t == rejected && e == syscall.ECONNREFUSED:
		return fmt.Errorf("%v: %w", remote, verbs.ErrRefused)
	case t == rejected:
		return fmt.Errorf("%v: %w", remote, &verbs.RejectError{Consumer: true, PrivateData: private})
	case t == unreachable:
		return fmt.Errorf("%v: %w: no answer to the connection request", remote, verbs.ErrUnreachable)
	case t == deviceRemoval:
		return fmt.Errorf("%v: %w", remote, verbs.ErrDeviceRemoved)
	case t == disconnected:
		return fmt.Errorf("%v: %w while connecting", remote, verbs.ErrDisconnected)
	case status != 0 && errnoError(e) != nil:
		return fmt.Errorf("%v: %w (%v: %w)", remote, errnoError(e), t, e)
	case status != 0:
		return fmt.Errorf("%v: %v: %w", remote, t, e)
	default:
		return fmt.Errorf("%v: %v", remote, t)
	}
}

func abs(n int) int {
	if n < 0 {
		return -n
	}
	return n
}

// endReason is why an event ends a connection that is up; nil if it does not. UNREACHABLE and CONNECT_ERROR may
// come late, after ESTABLISHED, and mean nothing then; TIMEWAIT_EXIT follows an end that is known already.
func endReason(t eventType) error {
	switch t {
	case disconnected:
		return verbs.ErrDisconnected
	case deviceRemoval:
		return verbs.ErrDeviceRemoved
	case addrChange:
		return fmt.Errorf("%w: the address moved to another device", verbs.ErrDisconnected)
	default:
		return nil
	}
}

// workStatus maps enum ibv_wc_status.
func workStatus(s int) verbs.Status {
	m := [...]verbs.Status{
		0: verbs.StatusOK, 1: verbs.StatusLocalLength, 2: verbs.StatusLocalQPOperation, 4: verbs.StatusLocalProtection,
		5: verbs.StatusFlushed, 7: verbs.StatusBadResponse, 8: verbs.StatusLocalAccess, 9: verbs.StatusRemoteInvalidRequest,
		10: verbs.StatusRemoteAccess, 11: verbs.StatusRemoteOperation, 12: verbs.StatusRetryExceeded,
		13: verbs.StatusRNRRetryExceeded, 19: verbs.StatusFatal,
	}
	if s < 0 || s >= len(m) || s != 0 && m[s] == verbs.StatusOK {
		return verbs.StatusOther
	}
	return m[s]
}

// cmNode is the connection manager's device node.
const cmNode = "/dev/infiniband/rdma_cm"

// openFailure explains why the connection manager cannot be opened. devices is the folder with the kernel's RDMA
// devices, node the connection manager's.
func openFailure(e syscall.Errno, devices, node string) error {
	if entries, err := os.ReadDir(devices); err != nil || len(entries) == 0 {
		return fmt.Errorf("%w: this machine has none (%s is empty)", verbs.ErrNoDevice, devices)
	}
	if _, err := os.Stat(node); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w can be used: %s is missing: 'modprobe rdma_ucm', or pass /dev/infiniband into the container",
			verbs.ErrNoDevice, node)
	}
	switch e {
	case syscall.EACCES, syscall.EPERM:
		return fmt.Errorf("%w can be used: %s: %w: run as root or as a user who may open it", verbs.ErrNoDevice, node, e)
	case syscall.ENODEV:
		return fmt.Errorf("%w can be used: libibverbs found no driver for it: 'modprobe ib_uverbs' and install ibverbs-providers",
			verbs.ErrNoDevice)
	default:
		return fmt.Errorf("%w can be used: %s: %w: 'modprobe rdma_ucm'", verbs.ErrNoDevice, node, e)
	}
}

var errTwice = errors.New("the connection has a queue pair already")
