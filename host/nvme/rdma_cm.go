package nvme

import (
	"encoding/binary"
	"fmt"
)

// Sizes in bytes of the private data in connection manager messages.
const (
	CMRequestSize = 32
	CMAcceptSize  = 32
	CMRejectSize  = 4
)

// CMRequest is the private data of a connection request (RDMA 3.5):
//
//	0 record format  2 queue ID  4 HRQSIZE  6 HSQSIZE  8 controller ID
//
// What arrives is padded, so only the fields are looked at, never the length
// beyond them.
type CMRequest struct {
	Format uint16 // 0
	QID    uint16
	RQSize uint16 // host's receive queue depth, 1-based
	SQSize uint16 // host's send queue depth, 0-based: SQSIZE of Connect
	CNTLID uint16 // 0 on the admin queue
}

func (r *CMRequest) layout(l layout) {
	l.u16(0, &r.Format)
	l.u16(2, &r.QID)
	l.u16(4, &r.RQSize)
	l.u16(6, &r.SQSize)
	l.u16(8, &r.CNTLID)
}

// Append appends the 32 bytes.
func (r CMRequest) Append(b []byte) []byte {
	b, p := grow(b, CMRequestSize)
	r.layout(layout{p, true})
	return b
}

// ParseCMRequest decodes a request; its record format must be 0. On an error
// the error is a *[CMRejectError], which says how to answer.
func ParseCMRequest(b []byte) (r CMRequest, err error) {
	if len(b) < 10 {
		return r, &CMRejectError{RejectPrivateDataLength}
	}
	r.layout(layout{b, false})
	if r.Format != 0 {
		return r, &CMRejectError{RejectRecordFormat}
	}
	return r, nil
}

// CMAccept is the private data of an accept: 0 record format, 2 CRQSIZE, the
// controller's receive depth, 1-based; 0 from targets that do not say.
type CMAccept struct {
	Format uint16
	RQSize uint16
}

// Append appends the 32 bytes.
func (a CMAccept) Append(b []byte) []byte {
	b, p := grow(b, CMAcceptSize)
	binary.LittleEndian.PutUint16(p, a.Format)
	binary.LittleEndian.PutUint16(p[2:], a.RQSize)
	return b
}

// ParseCMAccept decodes an accept.
func ParseCMAccept(b []byte) (a CMAccept, err error) {
	if err := need("RDMA accept private data", b, 4); err != nil {
		return a, err
	}
	a = CMAccept{binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:])}
	if a.Format != 0 {
		return a, fmt.Errorf("nvme: RDMA accept has record format %d, only 0 is known", a.Format)
	}
	return a, nil
}

// RejectReason is the status in a reject's private data (RDMA 3.5, figure
// "RDMA_CM_REJECT Private Data"): 0 record format, 2 status.
type RejectReason uint16

// Reasons.
const (
	RejectPrivateDataLength RejectReason = 1
	RejectRecordFormat      RejectReason = 2
	RejectQueueID           RejectReason = 3
	RejectSQSize            RejectReason = 4
	RejectRQSize            RejectReason = 5
	RejectNoResources       RejectReason = 6
	RejectIRD               RejectReason = 7
	RejectORD               RejectReason = 8
	RejectControllerID      RejectReason = 9
)

func (r RejectReason) String() string {
	switch r {
	case RejectPrivateDataLength:
		return "invalid private data length"
	case RejectRecordFormat:
		return "invalid record format"
	case RejectQueueID:
		return "invalid queue ID"
	case RejectSQSize:
		return "invalid submission queue size (HSQSIZE)"
	case RejectRQSize:
		return "invalid receive queue size (HRQSIZE)"
	case RejectNoResources:
		return "no resources"
	case RejectIRD:
		return "invalid inbound read depth (IRD)"
	case RejectORD:
		return "invalid outbound read depth (ORD)"
	case RejectControllerID:
		return "invalid controller ID"
	}
	return fmt.Sprintf("reason %d", uint16(r))
}

// Append appends the reject's 4 bytes.
func (r RejectReason) Append(b []byte) []byte {
	return binary.LittleEndian.AppendUint16(append(b, 0, 0), uint16(r))
}

// ParseRejectReason decodes a reject's private data. ok is false where there is
// none, as when the connection manager and not the target rejected.
func ParseRejectReason(b []byte) (r RejectReason, ok bool) {
	if len(b) < CMRejectSize || binary.LittleEndian.Uint16(b) != 0 {
		return 0, false
	}
	r = RejectReason(binary.LittleEndian.Uint16(b[2:]))
	return r, r != 0
}

// CMRejectError is a connection that was, or must be, rejected for a reason of
// NVMe's.
type CMRejectError struct{ Reason RejectReason }

func (e *CMRejectError) Error() string {
	return "nvme: RDMA connection rejected by the target: " + e.Reason.String()
}
