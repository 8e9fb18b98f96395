package verbs

import (
	"errors"
	"fmt"
)

// Errors of every provider; test with errors.Is.
var (
	ErrNoDevice         = errors.New("no RDMA device")
	ErrUnreachable      = errors.New("unreachable")
	ErrRefused          = errors.New("connection refused: nothing listens there")
	ErrTimeout          = errors.New("timed out")
	ErrStale            = errors.New("stale connection")
	ErrDisconnected     = errors.New("the peer closed the connection")
	ErrDeviceRemoved    = errors.New("the RDMA device was removed")
	ErrQueueFull        = errors.New("queue full")
	ErrClosed           = errors.New("closed")
	ErrUnsupported      = errors.New("not supported by this device")
	ErrAddrInUse        = errors.New("address in use")
	ErrAddrNotAvailable = errors.New("no such local address")
)

// RejectError is a connection request that the peer or its connection manager turned down.
type RejectError struct {
	// Reason is the connection manager's code (IBA 12.6.7.2): 8 no listener, 10 stale connection, 28 the
	// consumer's own reject; 0 where the fabric carries none (iWARP).
	Reason int
	// Consumer says that the peer's program itself rejected: only then does PrivateData mean something.
	Consumer    bool
	PrivateData []byte
}

// Error gives the reason in words.
func (e *RejectError) Error() string {
	if e.Consumer {
		return "rejected by the target"
	}
	return fmt.Sprintf("rejected by the connection manager: %s (reason %d)", rejectWords(e.Reason), e.Reason)
}

// Is matches ErrRefused and ErrStale by the reason.
func (e *RejectError) Is(target error) bool {
	return e.Reason == rejectInvalidServiceID && target == ErrRefused ||
		e.Reason == rejectStaleConn && target == ErrStale
}

const (
	rejectInvalidServiceID = 8
	rejectStaleConn        = 10
)

// rejectWords names the reject reasons of IBA 12.6.7.2, table 112.
func rejectWords(reason int) string {
	words := map[int]string{
		1: "no queue pair available", 2: "no end-to-end context available", 3: "no resources available",
		4: "timeout", 5: "unsupported request", 6: "invalid communication ID",
		7: "invalid communication instance", 8: "nothing listens there (invalid service ID)",
		9: "invalid transport service type", 10: "stale connection", 11: "RDC does not exist",
		12: "primary remote port rejected", 13: "primary remote port redirected", 14: "invalid primary remote port LID",
		15: "invalid primary remote port SL", 16: "invalid primary remote port traffic class",
		17: "invalid primary remote port hop limit", 18: "invalid primary remote port packet rate",
		24: "port and CM redirection", 25: "port redirection", 26: "invalid path MTU",
		27: "insufficient responder resources", 28: "rejected by the consumer",
		29: "RNR retry count rejected", 30: "duplicate local communication ID", 31: "invalid class version",
		32: "invalid flow label", 33: "invalid alternate flow label", 65: "the service handle is invalid",
	}
	if w, ok := words[reason]; ok {
		return w
	}
	return "unknown reason"
}

// HandshakeError is a peer that answered, but not as a peer of this fabric would: a plain TCP service, or a
// RoCE target's TCP port.
type HandshakeError struct{ Detail string }

// Error says what came instead.
func (e *HandshakeError) Error() string { return "not an iWARP peer: " + e.Detail }

// MemlockError is a registration refused because of the limit on locked memory (RLIMIT_MEMLOCK).
type MemlockError struct {
	Need, Limit uint64 // bytes
}

// Error says how to raise the limit.
func (e *MemlockError) Error() string {
	return fmt.Sprintf("needs %d KiB of locked memory but the limit (ulimit -l) is %d KiB: "+
		"raise it with 'ulimit -l unlimited', LimitMEMLOCK=infinity in the systemd unit, or a line in /etc/security/limits.d, "+
		"or lower --pool-size", e.Need>>10, e.Limit>>10)
}

// Status is how a work request ended (IBA 11.6.2).
type Status uint8

// Completion statuses.
const (
	StatusOK Status = iota
	StatusLocalLength
	StatusLocalQPOperation
	StatusLocalProtection
	StatusFlushed
	StatusBadResponse
	StatusLocalAccess
	StatusRemoteInvalidRequest
	StatusRemoteAccess
	StatusRemoteOperation
	StatusRetryExceeded
	StatusRNRRetryExceeded
	StatusFatal
	StatusOther
)

// String is the status in the specification's words.
func (s Status) String() string {
	words := [...]string{
		"success", "local length error", "local QP operation error", "local protection error",
		"work request flushed", "bad response", "local access error", "remote invalid request error",
		"remote access error", "remote operation error", "transport retry count exceeded",
		"RNR retry count exceeded", "fatal error", "other error",
	}
	if int(s) < len(words) {
		return words[s]
	}
	return "unknown status"
}
