// Package verbs is what farblk asks of an RDMA device, whoever provides it: protection domains, registered
// memory, queue pairs, work requests, completions and connection events, in the words of the InfiniBand
// specification (chapters 10 and 11) and of RFC 5040.
//
// It differs from libibverbs on purpose in three ways:
//   - A queue pair owns its one completion queue, for sends and receives alike: an NVMe queue is one queue
//     pair with one owner, so nothing would ever share a completion queue.
//   - Memory is named by Go slices. All of it must lie outside the Go heap or be pinned, and inside a region
//     that was registered, because a device may write to it at any time.
//   - Conn is an rdma_cm identifier: one connection from address resolution to disconnect.
//
// A provider passes the suite in verbstest.
package verbs

import (
	"context"
	"time"
)

// Provider gives access to one family of RDMA devices.
type Provider interface {
	// Name is the word for --provider: "verbs" or "iwarp".
	Name() string
	// Devices lists what the provider could use now. No device is an empty list and no error.
	Devices() ([]Device, error)
	// Resolve finds the local device and the route to r.Remote, within ctx. Errors: ErrNoDevice,
	// ErrUnreachable, ErrAddrInUse, ErrAddrNotAvailable, ctx's.
	Resolve(ctx context.Context, r Route) (Conn, error)
	// Listen waits for connections on addr; port 0 takes a free one. backlog 0 means the provider's default.
	Listen(ctx context.Context, addr Addr, backlog int) (Listener, error)
}

// Route names the two ends of a connection to be.
type Route struct {
	Remote Addr
	// Local binds the source address (not the port); the zero Addr leaves the choice to routing.
	Local Addr
	// TOS is the IP type of service of the connection's packets, when TOSSet.
	TOS    uint8
	TOSSet bool
	// Device restricts the choice to the RDMA device of this name, or over the network device of this name
	// (Device.NetDevice); empty is any.
	Device string
}

// Link is the kind of network under a device.
type Link uint8

// The links that a Device can have.
const (
	LinkUnknown Link = iota
	LinkInfiniBand
	LinkRoCE
	LinkIWARP
)

// String is the name a user sees.
func (l Link) String() string {
	switch l {
	case LinkInfiniBand:
		return "InfiniBand"
	case LinkRoCE:
		return "RoCE"
	case LinkIWARP:
		return "iWARP"
	default:
		return "unknown"
	}
}

// Device describes an RDMA device and its limits (IBA 11.2.1.2, Query HCA).
type Device struct {
	Name       string // "mlx5_0", "rxe0", "siw0"; "tcp" for software iWARP
	Link       Link
	NetDevice  string // "eth0", if known
	MaxQPDepth int    // work requests in one send or receive queue
	MaxSGE     int    // scatter/gather elements in one work request, at most MaxSGE here too
	MaxCQE     int    // completions in one completion queue
	// MaxResponderResources bounds incoming RDMA READs under way at once on one QP (IRD),
	// MaxInitiatorDepth the outgoing ones (ORD).
	MaxResponderResources int
	MaxInitiatorDepth     int
	// MaxMR is the largest region that can be registered, in bytes; 0 is unknown.
	MaxMR uint64
	// MemoryWindows says that PD.NewWindow works.
	MemoryWindows bool
}

// MaxSGE is the number of scatter/gather elements that a work request has room for.
const MaxSGE = 4

// Access is what a memory region allows, besides local reads (IBA 10.6.3).
type Access uint8

// Access rights, to be or-ed. RemoteWrite and ReadSink need LocalWrite.
const (
	LocalWrite  Access = 1 << iota // receives may be placed here
	RemoteRead                     // the peer may RDMA READ
	RemoteWrite                    // the peer may RDMA WRITE
	// ReadSink: the answers to our RDMA READs may be placed here. Over an iWARP adapter the peer may then
	// RDMA WRITE here too: an answer is a tagged message as a write is (RFC 5040 section 5.2.2), under a key
	// that the peer learns from the request.
	ReadSink
)

// PD is a protection domain. Queue pairs and regions of different domains do not see each other.
type PD interface {
	// Register makes b reachable for the device. b must stay mapped, and outside the Go heap, until MR.Close.
	// Errors: *MemlockError when the locked-memory limit is in the way.
	Register(b []byte, access Access) (MR, error)
	// NewWindow makes an unbound memory window, or gives ErrUnsupported.
	NewWindow() (Window, error)
	// Close frees the domain; its regions and queue pairs must be closed before.
	Close() error
}

// MR is a registered memory region.
type MR interface {
	// LKey goes into an SGE, RKey to the peer.
	LKey() uint32
	RKey() uint32
	// RemoteAddr is the address by which the peer reaches b, which must lie within the region.
	RemoteAddr(b []byte) uint64
	// Close deregisters. No work request may use the region, and no connected peer may still hold its key.
	Close() error
}

// Window is a key that is given out for one transfer and dies with it: by SEND with invalidate from the
// peer, or by Invalidate. A region's own key lives on (IBA 10.6.7, RFC 5040 section 5.3).
type Window interface {
	// Bind gives access to b, which must lie within mr, under a fresh key. mr need not give the peer any
	// access itself; for RemoteWrite it must have LocalWrite.
	Bind(mr MR, b []byte, access Access) (rkey uint32, addr uint64, err error)
	// Invalidate ends the key at once. It is no error if the peer did so before.
	Invalidate() error
	Close() error
}

// SGE is one piece of memory of a work request. Data lies within the region that LKey names.
type SGE struct {
	Data []byte
	LKey uint32
}

// Opcode tells work requests and completions apart.
type Opcode uint8

// Operations of the send queue, and the one of the receive queue.
const (
	OpSend Opcode = iota
	OpSendInvalidate
	OpRDMAWrite
	OpRDMARead
	OpRecv
)

// String is the field's name for the operation.
func (o Opcode) String() string {
	switch o {
	case OpSend:
		return "SEND"
	case OpSendInvalidate:
		return "SEND with invalidate"
	case OpRDMAWrite:
		return "RDMA WRITE"
	case OpRDMARead:
		return "RDMA READ"
	case OpRecv:
		return "RECV"
	default:
		return "unknown operation"
	}
}

// SendFlags modify a send work request.
type SendFlags uint8

// Flags of SendWR, to be or-ed.
const (
	Signaled  SendFlags = 1 << iota // make a completion on success; a failure always makes one
	Solicited                       // wake a peer that waits for solicited events only
	Fence                           // wait for earlier RDMA READs first
)

// SendWR is a work request for the send queue. It has no pointer into the Go heap but SGEs' slices, so that
// an array of them can be kept and reused.
type SendWR struct {
	ID         uint64 // returned in the completion
	Op         Opcode
	Flags      SendFlags
	NumSGE     int
	SGEs       [MaxSGE]SGE
	RemoteAddr uint64 // RDMA READ and WRITE
	RKey       uint32 // RDMA READ and WRITE: the peer's key; SEND with invalidate: the key to invalidate
}

// RecvWR is a work request for the receive queue: room for one message.
type RecvWR struct {
	ID  uint64
	SGE SGE
}

// Completion is the end of a work request.
type Completion struct {
	ID     uint64
	Op     Opcode
	Status Status
	// VendorError is the device's own code, for the message; 0 if none.
	VendorError uint32
	// Bytes is the length of a received message or of a read's data.
	Bytes int
	// InvalidatedKey is the local key that the peer's SEND with invalidate ended, when Invalidated.
	InvalidatedKey uint32
	Invalidated    bool
}

// QPConfig is the size of a queue pair. Depths are honoured exactly or exceeded; more than the device's limit
// is an error.
type QPConfig struct {
	SendDepth, RecvDepth int // work requests that can be outstanding
}

// QP is a reliable connected queue pair with its completion queue.
//
// PostSend, PostRecv, Poll and Arm may be called from different goroutines; each serialises its own kind.
// Completions of one queue come in the order of its work requests. Once the connection is gone, every
// outstanding work request completes with StatusFlushed, the first perhaps with the cause.
type QP interface {
	// PostSend posts wrs as one chain with one doorbell. It returns how many were posted; fewer than all
	// comes with an error (ErrQueueFull, ErrClosed, or the device's).
	PostSend(wrs []SendWR) (int, error)
	// PostRecv posts receive work requests likewise. It may be called before the connection is up.
	PostRecv(wrs []RecvWR) (int, error)
	// Poll takes up to len(cs) completions and never blocks. An error means that the completion queue itself
	// is unusable (overrun, device gone).
	Poll(cs []Completion) (int, error)
	// Arm asks for one notification at the next completion. To lose none: Arm, Poll once more, then Wait.
	Arm() error
	// Wait blocks until an armed notification has come; spurious returns are allowed. One goroutine waits at
	// a time. Close makes it return ErrClosed, now and ever after.
	Wait() error
	// Close puts the queue pair into the error state, waits until the device no longer touches memory, and
	// frees it. Outstanding work requests have not happened or have happened: only the peer knows.
	// It can be called twice, and while others block in Wait.
	Close() error
}

// ConnParams are the connection manager's parameters (IBA 12.6.5; RFC 6581 for iWARP).
type ConnParams struct {
	PrivateData []byte
	// ResponderResources (IRD) is how many RDMA READs of the peer we serve at once; InitiatorDepth (ORD) how
	// many we issue. They are lowered to what device and peer can do.
	ResponderResources, InitiatorDepth uint8
	RetryCount, RNRRetryCount          uint8 // 0 to 7; 7 for RNR is without end. No meaning on iWARP.
}

// Conn is one connection, active (from Resolve) or passive (from Listener.Accept), in the sense of an
// rdma_cm identifier. Every connection event is acknowledged by the provider itself.
type Conn interface {
	// Provider is the name of the provider that made it, and Device the device it goes over.
	Provider() string
	Device() Device
	LocalAddr() Addr
	RemoteAddr() Addr

	// NewPD allocates a protection domain on this connection's device. Connections whose Device is the same
	// may share it.
	NewPD() (PD, error)
	// NewQP makes this connection's queue pair, once, before Connect or Accept.
	NewQP(pd PD, c QPConfig) (QP, error)

	// Connect asks the peer for the connection and returns its private data (padded by some fabrics: parse by
	// field). Errors: *RejectError, ErrRefused, ErrUnreachable, ErrTimeout, *HandshakeError, ctx's.
	Connect(ctx context.Context, p ConnParams) ([]byte, error)
	// PrivateData is what came with the peer's request (passive side), and PeerParams what it asked for:
	// its ResponderResources bound our RDMA READs under way.
	PrivateData() []byte
	PeerParams() ConnParams
	// Accept agrees to the peer's request and waits until the connection is up.
	Accept(ctx context.Context, p ConnParams) error
	// Reject refuses it with private data, and closes the connection.
	Reject(private []byte) error

	// Disconnected is closed when the connection has ended for any reason, Err says why (nil before).
	Disconnected() <-chan struct{}
	Err() error
	// Disconnect starts an orderly end; it does not wait for the peer.
	Disconnect() error
	// Close ends and frees everything, the queue pair included. It interrupts Connect and Accept, may be
	// called twice, and returns when nothing of the connection runs any more. It does not wait for the peer
	// beyond a second.
	Close() error
}

// Listener waits for connections.
type Listener interface {
	Addr() Addr
	// Accept returns the next connection request, to be answered by Conn.Accept or Conn.Reject.
	Accept(ctx context.Context) (Conn, error)
	// Close interrupts Accept. Connections already returned live on.
	Close() error
}

// DrainTimeout bounds how long QP.Close waits for the device to flush before it destroys the queue pair.
const DrainTimeout = time.Second
