// Package transport is what the NVMe host asks of a fabric: associations, queues and memory that the fabric
// can reach. The 64-byte commands and 16-byte completions are opaque here, except for the fields that belong
// to the fabric: the command identifier, PSDT and the SGL of a command (NVMe over Fabrics 1.1a section 2.1).
//
// The words are NVMe-oF's: an association is one host's exclusive relation to one controller; it has one
// admin queue and some I/O queues, and ends as a whole.
package transport

import (
	"context"
	"net/netip"
	"time"
)

// Address says where a controller's port is and from where to go there.
type Address struct {
	// Remote is TRADDR, an IPv4 or IPv6 address (zones kept) or an InfiniBand GID; Port is TRSVCID.
	Remote netip.Addr
	Port   uint16
	// GID says that Remote is an InfiniBand GID (ADRFAM 3), not an IPv6 address.
	GID bool
	// Local is the source address to bind, if valid. LocalDevice, if not empty, is the RDMA device to use, by its
	// own name or its network device's; software iWARP has only the name "tcp", and goes where Local leads.
	Local       netip.Addr
	LocalDevice string
	// TOS is the IP type of service when TOSSet.
	TOS    uint8
	TOSSet bool
}

// String is "10.0.0.1:4420".
func (a Address) String() string { return netip.AddrPortFrom(a.Remote, a.Port).String() }

// Dialer opens associations over one kind of fabric.
type Dialer interface {
	// Dial resolves addr, finds the local device, and makes mem reachable for I/O on it. mem lies outside the
	// Go heap and outlives the association. Nothing has been sent to the target's program yet.
	// Errors: *ConnectError, ctx's.
	Dial(ctx context.Context, addr Address, mem []byte) (Association, error)
}

// Association is the fabric's side of one association: the device, the registered memory, the queues.
type Association interface {
	// Provider is the name of the RDMA provider, Device that of the local RDMA device.
	Provider() string
	Device() string
	// OpenQueue connects one queue on the fabric. The Connect command is the caller's to send on it.
	// Errors: *ConnectError, ctx's.
	OpenQueue(ctx context.Context, p QueueParams) (Queue, error)
	// Close closes every queue, waits until no device touches memory any more, deregisters it. Idempotent.
	Close() error
}

// QueueParams are the sizes of a queue.
type QueueParams struct {
	ID uint16 // 0 is the admin queue
	// Depth is the number of entries, 1-based: SQSIZE + 1. At most Depth-1 commands are outstanding.
	Depth int
	// ControllerID is the controller's real ID for an I/O queue, 0 for the admin queue.
	ControllerID uint16
	// InCapsule is how many bytes of data fit into a command capsule: IOCCSZ*16 - 64; 0 on the admin queue.
	InCapsule int
}

// Direction is where a command's data goes.
type Direction uint8

// Directions of a data transfer.
const (
	None         Direction = iota
	ToHost                 // controller to host: reads
	ToController           // host to controller: writes
)

// Request is one command on a queue. The caller owns it and its memory, and may not touch either between
// Submit and Done. It is made once and used again and again.
type Request struct {
	// Command is the submission queue entry. The transport sets the command identifier (bytes 2-3), PSDT
	// (byte 1) and the SGL (bytes 24-39).
	Command [64]byte
	// Data lies within the association's memory; empty for a command without data.
	Data      []byte
	Direction Direction
	// Done is called exactly once for each Submit that returned nil, on whichever goroutine polled. It may
	// submit again and kick; it must not poll, close or block.
	Done func(*Request)

	// Completion is the completion queue entry when Err is nil, whatever its status says.
	Completion [16]byte
	// Err is why there is no completion: a *LostError, or the device's refusal. The command may have been executed.
	Err error

	// Owner is the caller's, to find its record again.
	Owner any
}

// Queue is one NVMe queue pair on the fabric. Submit, Kick and Poll may be called from any goroutine.
//
// Requests are posted in the order of Submit at the next Kick or Poll; completions arrive in any order. A
// queue is either polled by its user or watched by its own goroutine, which waits for the device's event.
// Kick hands it to that goroutine. A user that polls keeps it as long as its Polls return more than 0, and
// spares the device's events and a goroutine's wake-up.
type Queue interface {
	// Submit puts r into the next free slot. It returns ErrQueueFull, at once, when Depth-1 commands are
	// outstanding (try again after a completion), or the *LostError that ended the queue.
	Submit(r *Request) error
	// Kick starts what was submitted, one doorbell for all of it, and sees to it that completions are noticed
	// without a Poll. It may complete requests, calling Done on this goroutine.
	Kick()
	// Poll starts what was submitted, then completes what has come, calling Done on this goroutine, for at
	// most wait or until at least one was completed, and returns how many. After 0 the queue's own goroutine
	// watches; after more the caller must poll again, soon, until it gets 0. It returns 0 at once when
	// another goroutine polls already or nothing is outstanding. wait 0 looks once; wait below 0 too, but a
	// caller that gets 0 keeps the queue as if it had got more.
	Poll(wait time.Duration) int
	// Outstanding is how many requests wait for their completion.
	Outstanding() int
	// Done is closed when the queue has ended; Err is then why (a *LostError, or ErrClosed after Close).
	Done() <-chan struct{}
	Err() error
	// Fail ends the queue for the given reason as if the connection had been lost: a completion that never
	// came. It does not wait.
	Fail(cause error)
	// Close ends the queue: the connection is torn down, and when no device touches memory any more, every
	// outstanding request is completed with the queue's error. It interrupts Poll and may be called twice.
	// It must not be called from a Done callback.
	Close() error
	// Counters are the queue's totals since it was opened.
	Counters() Counters
}

// Counters count what a queue has done.
type Counters struct {
	Commands   uint64 `json:"commands"`    // submitted
	InCapsule  uint64 `json:"in_capsule"`  // writes whose data went in the capsule
	BytesRead  uint64 `json:"bytes_read"`  // to the host
	BytesWrite uint64 `json:"bytes_write"` // to the controller
	Doorbells  uint64 `json:"doorbells"`   // chains posted
	Polls      uint64 `json:"polls"`       // polls that found something
	Events     uint64 `json:"events"`      // times the queue slept and was woken
}
