package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"farblk/transport"
	"farblk/transport/verbs"
)

// The private data of an NVMe/RDMA connection request (RDMA transport specification, figure 3):
//
//	0  RECFMT   2  QID   4  HRQSIZE (1-based)   6  HSQSIZE (0-based)   8  CNTLID   10-31 reserved
const cmRequestLen = 32

func cmRequest(p transport.QueueParams) []byte {
	b := make([]byte, cmRequestLen)
	binary.LittleEndian.PutUint16(b[2:], p.ID)
	binary.LittleEndian.PutUint16(b[4:], uint16(p.Depth))
	binary.LittleEndian.PutUint16(b[6:], uint16(p.Depth-1))
	binary.LittleEndian.PutUint16(b[8:], p.ControllerID)
	return b
}

// checkAccept looks at the target's private data: RECFMT at 0, CRQSIZE at 2. Some fabrics pad it or lose it;
// without it there is nothing to check.
func checkAccept(b []byte, depth int) error {
	if len(b) < 4 {
		return nil
	}
	if f := binary.LittleEndian.Uint16(b); f != 0 {
		return &transport.ProtocolError{Detail: fmt.Sprintf("connection accepted with record format %d, not 0", f)}
	}
	// CRQSIZE 0 is seen from targets that leave it out; a smaller one than our queue would mean RNR.
	if n := int(binary.LittleEndian.Uint16(b[2:])); n != 0 && n < depth-1 {
		return &transport.ProtocolError{Detail: fmt.Sprintf("the controller's receive queue has %d entries for a queue of %d", n, depth)}
	}
	return nil
}

// rejectStatus names the NVMe/RDMA reject codes (RDMA transport specification, figure 6).
func rejectStatus(sts int) string {
	words := [...]string{
		1: "invalid private data length", 2: "invalid record format", 3: "invalid queue ID",
		4: "invalid host submission queue size", 5: "invalid host receive queue size",
		6: "the controller has no resources for another queue",
		7: "invalid IRD (responder resources)", 8: "invalid ORD (initiator depth)", 9: "invalid controller ID",
	}
	if sts > 0 && sts < len(words) {
		return words[sts]
	}
	return "unknown reason"
}

// connectError puts a provider's error into the words of a user of NVMe/RDMA.
func (d *dialer) connectError(addr transport.Address, queue uint16, err error) error {
	var already *transport.ConnectError
	if errors.As(err, &already) {
		return err
	}
	e := &transport.ConnectError{Addr: addr.String(), Queue: queue, Err: err}
	software := d.p.Name() == "iwarp"
	var (
		reject    *verbs.RejectError
		memlock   *verbs.MemlockError
		handshake *verbs.HandshakeError
		protocol  *transport.ProtocolError
	)
	switch {
	case errors.As(err, &reject) && reject.Consumer:
		e.Class = transport.ErrRejected
		if len(reject.PrivateData) >= 4 {
			e.Reason, e.NVMe = int(binary.LittleEndian.Uint16(reject.PrivateData[2:])), true
			e.Err = fmt.Errorf("rejected by the target: %s (NVMe/RDMA status %d)", rejectStatus(e.Reason), e.Reason)
		}
	case errors.Is(err, verbs.ErrRefused):
		e.Class = transport.ErrRefused
		e.Err = errors.New("connection refused: nothing listens at " + addr.String())
		if software {
			e.Hint = "software iWARP reaches iWARP ports only (a RoCE or InfiniBand port needs an RDMA device here); check address and port"
		} else {
			e.Hint = "check address and port, and that the port's transport type is rdma"
		}
	case errors.Is(err, verbs.ErrStale):
		e.Class, e.Reason = transport.ErrStale, reasonOf(reject)
	case errors.As(err, &reject):
		e.Class, e.Reason = transport.ErrRejected, reject.Reason
	case timedOut(err): // before what may be wrapped: a peer that is only slow is none of another kind
		e.Class, e.Err = transport.ErrTimeout, errors.New("no answer in time")
		e.Hint = "check the address, the cable and firewalls"
		if errors.As(err, &handshake) {
			e.Err = errors.New("no answer in time: " + handshake.Detail)
			e.Hint = "the port is slow, or is no NVMe/RDMA port on an iWARP device (trtype rdma)"
		}
	case errors.As(err, &handshake):
		e.Class, e.Hint = transport.ErrWrongPeer, "the port must be an NVMe/RDMA port on an iWARP device (trtype rdma)"
	case errors.As(err, &protocol):
		e.Class = transport.ErrWrongPeer
	case errors.As(err, &memlock):
		e.Class = transport.ErrMemlock
	case errors.Is(err, verbs.ErrNoDevice):
		e.Class = transport.ErrNoDevice // the provider says what to do
	case errors.Is(err, verbs.ErrUnreachable):
		e.Class = transport.ErrUnreachable
		e.Hint = "check the address, the cable and firewalls"
	case errors.Is(err, context.Canceled):
		return err
	}
	return e
}

func timedOut(err error) bool {
	return errors.Is(err, verbs.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) // a socket has its own
}

func reasonOf(r *verbs.RejectError) int {
	if r == nil {
		return 0
	}
	return r.Reason
}

func isStale(err error) bool { return errors.Is(err, transport.ErrStale) }
