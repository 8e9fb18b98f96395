package transport

import (
	"errors"
	"fmt"
	"strings"
)

// Errors of queues; test with errors.Is.
var (
	// ErrQueueFull says that the queue has no free slot now.
	ErrQueueFull = errors.New("queue full")
	// ErrClosed says that the queue was closed by its owner.
	ErrClosed = errors.New("queue closed")
)

// Classes of a failed connect, for errors.Is on a *ConnectError.
var (
	ErrRefused     = errors.New("nothing listens there")
	ErrUnreachable = errors.New("unreachable")
	ErrTimeout     = errors.New("timed out")
	ErrNoDevice    = errors.New("no RDMA device")
	ErrRejected    = errors.New("rejected")
	ErrStale       = errors.New("stale connection")
	ErrMemlock     = errors.New("locked-memory limit")
	ErrWrongPeer   = errors.New("not an NVMe/RDMA port")
)

// ConnectError is a connection that could not be made.
type ConnectError struct {
	Addr  string // where to
	Queue uint16
	// Class is one of the errors above, or nil.
	Class error
	// Reason is the connection manager's or NVMe/RDMA's reject code; 0 if none.
	Reason int
	// NVMe says that Reason is an NVMe/RDMA reject status (NVMe/RDMA transport, table of reject codes).
	NVMe bool
	// Err is the cause, in words that a user understands; Hint what to do, if there is something.
	Err  error
	Hint string
}

// Error is one line: what happened, to what, and what to do.
func (e *ConnectError) Error() string {
	s := e.Err.Error()
	switch {
	case e.Queue != 0:
		s = fmt.Sprintf("%s queue %d: %s", e.Addr, e.Queue, s)
	case !strings.Contains(s, e.Addr):
		s = e.Addr + ": " + s
	}
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// Unwrap gives class and cause.
func (e *ConnectError) Unwrap() []error {
	if e.Class == nil {
		return []error{e.Err}
	}
	return []error{e.Class, e.Err}
}

// LostError is a connection that ended with commands perhaps under way: those commands may have been
// executed, now or later, or not at all.
type LostError struct{ Cause error }

// Error says why the connection ended.
func (e *LostError) Error() string { return "connection lost: " + e.Cause.Error() }

// Unwrap gives the cause.
func (e *LostError) Unwrap() error { return e.Cause }

// ProtocolError is a target that broke the protocol.
type ProtocolError struct{ Detail string }

// Error says what it did.
func (e *ProtocolError) Error() string { return "protocol violation by the target: " + e.Detail }
