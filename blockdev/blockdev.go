// Package blockdev is the block device that farblk gives to the machine: geometry, asynchronous requests and
// leased buffers. The host implements it for a remote namespace; the exports (NBD, FUSE, ublk) use it.
//
// Data path: an export leases a buffer, lets the kernel's data land in it, submits a request on a queue,
// kicks, and is called back. Memory is bounded by the pool: an export that gets no lease stops reading
// requests until one is released.
package blockdev

import (
	"context"
	"time"
)

// Op is what a request does.
type Op uint8

// Operations.
const (
	Read Op = iota
	Write
	Flush       // everything completed before is made durable
	Discard     // NVMe Dataset Management, deallocate: the content becomes undefined or zero
	WriteZeroes // reads back as zeroes
	numOps
)

// String is the operation's name.
func (o Op) String() string {
	names := [...]string{"read", "write", "flush", "discard", "write zeroes"}
	if o < numOps {
		return names[o]
	}
	return "unknown operation"
}

// Flags modify a request.
type Flags uint8

// Flags of Request, to be or-ed.
const (
	// FUA makes a Write or WriteZeroes durable before it completes.
	FUA Flags = 1 << iota
	// NoUnmap asks WriteZeroes not to deallocate.
	NoUnmap
	// Continued says that the export split a request of its client and that this is not the first part. It
	// changes nothing but what is counted.
	Continued
)

// Request is one operation. The caller owns it and its buffer, and touches neither between Submit and Done.
// It is made once and used again and again; a zero Request with Done set is ready.
type Request struct {
	Op    Op
	Flags Flags
	// Off and Len are in bytes, multiples of the block size, within the device. Len of Read and Write is
	// len(Data), and Len is ignored; Flush ignores both.
	Off, Len int64
	// Data is (part of) a buffer leased from the same device.
	Data []byte
	// Done is called exactly once for each Submit, perhaps before Submit returns, on any goroutine. It may
	// submit and kick; it must not poll, lease with waiting, or block.
	Done func(*Request)
	// Err is the outcome; see the errors of this package.
	Err error

	// Owner is the caller's, to find its record again.
	Owner any

	// Private is the device's, while the request is under way.
	Private Private
}

// Private is room for a device's bookkeeping inside a request, so that it allocates nothing.
type Private struct {
	Next     *Request // a list the request is on
	Progress int64    // bytes issued so far
	Pending  int32    // parts not completed
}

// Queue is one of a device's submission queues. A request stays on its queue. Methods may be called from any
// goroutine.
type Queue interface {
	// Submit takes r; it never blocks and never refuses: what does not fit the device's queue waits in r's
	// own memory. Invalid requests (range, alignment, read-only) complete with an error.
	Submit(r *Request)
	// Kick starts everything submitted, and sees to it that completions are noticed without a Poll. It may
	// complete requests, calling Done on this goroutine.
	Kick()
	// Poll starts everything submitted, then completes what is ready, calling Done on this goroutine, for at
	// most wait or until one completed, and returns how many. After 0 the device's own goroutine watches;
	// after more the caller must poll again, soon, until it gets 0: as long as it does, no event and no
	// goroutine switch is paid for. It returns 0 at once when another goroutine polls already or nothing is
	// outstanding. wait 0 looks once; wait below 0 too, but a caller that gets 0 keeps the queue as if it had
	// got more: it must poll again, soon.
	Poll(wait time.Duration) int
}

// Device is a block device.
type Device interface {
	// Info is the geometry as it is now; Watch calls f after every change until cancel is called. f must not
	// block.
	Info() Info
	Watch(f func(Info)) (cancel func())
	// Queues is how many queues there are, at least one; Queue gives number i modulo that.
	Queues() int
	Queue(i int) Queue
	// Pool is where buffers for this device's requests come from.
	Pool() *Pool
	// Close fails what is outstanding, waits until no buffer is in use by the device, and frees it. The
	// exports must have stopped.
	Close() error
}

// Info describes a device.
type Info struct {
	Size      int64 // bytes, a multiple of BlockSize
	BlockSize int   // bytes, a power of two from 512 to 65536
	// OptimalIO is the preferred size and alignment of requests in bytes; 0 if unknown.
	OptimalIO int
	// MaxTransfer is the largest Read or Write that goes in one command, in bytes; larger ones are split.
	MaxTransfer int
	ReadOnly    bool
	// WriteCache says that completed writes are durable only after a Flush (or with FUA).
	WriteCache bool
	// Discard and WriteZeroes say that the operations are supported; DiscardZeroes that discarded blocks read
	// as zeroes.
	Discard, WriteZeroes, DiscardZeroes bool
	// ID identifies the content for ever: two devices with the same ID are the same namespace.
	ID string
	// Name is for people: "nqn... namespace 1".
	Name string
}

// SubmitWait runs one request on queue 0 and waits for it; for the control path and tests, not for data.
// If ctx ends first the request is still under way, and its buffer in use, until done is closed.
func SubmitWait(ctx context.Context, d Device, r *Request) (done <-chan struct{}, err error) {
	c := make(chan struct{})
	r.Done = func(*Request) { close(c) }
	q := d.Queue(0)
	q.Submit(r)
	q.Kick()
	select {
	case <-c:
		return c, r.Err
	case <-ctx.Done():
		return c, ctx.Err()
	}
}
