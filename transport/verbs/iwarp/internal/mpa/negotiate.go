package mpa

import "fmt"

// Local is what this side brings to the negotiation.
type Local struct {
	CRC      bool // ask for CRC; without it the peer decides (RFC 5044 section 7.1.1: either side can force it)
	Revision uint8
	IRD, ORD uint16
	// MaxIRD bounds how far IRD may be raised to what the peer wants to use (RFC 6581 section 9.1). It is the IRD
	// with a peer of revision 1, which can neither say how many RDMA Reads it will issue nor learn what is served.
	MaxIRD     uint16
	PeerToPeer bool // initiator: let the responder send first, by an RTR frame
	RTR        RTR  // what kinds of RTR frames this side can do
}

// Outcome is what both sides agreed on.
type Outcome struct {
	CRC      bool
	IRD, ORD uint16 // incoming and outgoing RDMA Reads at once, of this side
	// RTR is the one frame that the initiator sends first, 0 for none.
	RTR RTR
}

// NegotiationError is a handshake that cannot go on. Code is the Terminate code of RFC 5044 section 8 and
// RFC 6581 section 9.4 (layer LLP, type MPA).
type NegotiationError struct {
	Code   uint8
	Detail string
}

// Error is the detail.
func (e *NegotiationError) Error() string { return e.Detail }

// Codes of NegotiationError and of FPDU errors, those that are found here.
const (
	CodeCRC             = 2
	CodeInvalidFrame    = 4 // invalid MPA request or reply frame
	CodeInsufficientIRD = 6
	CodeNoRTR           = 7
)

// NewRequest is the initiator's frame.
func NewRequest(l Local, private []byte) Frame {
	f := Frame{Kind: Request, CRC: l.CRC, Revision: l.Revision, Private: private}
	if l.Revision >= Revision2 {
		f.IsEnhanced = true
		f.Enhanced = Enhanced{IRD: l.IRD, ORD: l.ORD}
		if l.PeerToPeer {
			f.Enhanced.PeerToPeer, f.Enhanced.RTR = true, l.RTR
		}
	}
	return f
}

// CheckRequest tells whether a responder can serve req: a known revision, no markers.
func CheckRequest(req Frame) error {
	if req.Revision != Revision1 && req.Revision != Revision2 {
		return &NegotiationError{CodeInvalidFrame, fmt.Sprintf("MPA revision %d", req.Revision)}
	}
	if req.Markers {
		return &NegotiationError{CodeInvalidFrame, "the peer wants MPA markers"}
	}
	if req.IsEnhanced && req.Enhanced.PeerToPeer && req.Enhanced.RTR == 0 {
		return &NegotiationError{CodeNoRTR, "peer-to-peer without any RTR frame"}
	}
	return nil
}

// Accept is the responder's positive reply to req, and the outcome. ORD is lowered to what the initiator serves.
func Accept(req Frame, l Local, private []byte) (Frame, Outcome) {
	out := Outcome{CRC: req.CRC || l.CRC, IRD: l.IRD, ORD: l.ORD}
	f := Frame{Kind: Reply, CRC: out.CRC, Revision: req.Revision, Private: private}
	if !req.IsEnhanced {
		out.IRD = l.MaxIRD
		return f, out
	}
	if req.Enhanced.IRD != MaxDepth {
		out.ORD = min(out.ORD, req.Enhanced.IRD)
	}
	if req.Enhanced.PeerToPeer {
		// One kind is chosen. A Write needs nothing of the responder, so it goes first.
		for _, r := range []RTR{RTRWrite, RTRRead, RTRFPDU} {
			if req.Enhanced.RTR&l.RTR&r != 0 {
				out.RTR = r
				break
			}
		}
	}
	if out.RTR == RTRRead {
		out.IRD = max(out.IRD, 1) // that frame has to be served
	}
	f.IsEnhanced = true
	f.Enhanced = Enhanced{IRD: out.IRD, ORD: out.ORD, PeerToPeer: req.Enhanced.PeerToPeer, RTR: out.RTR}
	return f, out
}

// Refuse is the responder's negative reply to req, with the consumer's private data.
func Refuse(req Frame, private []byte) Frame {
	f := Frame{Kind: Reply, CRC: req.CRC, Reject: true, Revision: min(max(req.Revision, Revision1), Revision2), Private: private}
	if req.IsEnhanced {
		f.IsEnhanced = true
		f.Enhanced = Enhanced{IRD: req.Enhanced.ORD, ORD: req.Enhanced.IRD}
	}
	return f
}

// Conclude is the initiator's reading of a positive reply to its own req.
func Conclude(req, reply Frame, l Local) (Outcome, error) {
	if reply.Revision != req.Revision {
		return Outcome{}, &NegotiationError{
			CodeInvalidFrame,
			fmt.Sprintf("asked for MPA revision %d, answered with %d", req.Revision, reply.Revision),
		}
	}
	if reply.Markers {
		return Outcome{}, &NegotiationError{CodeInvalidFrame, "the peer wants MPA markers"}
	}
	if reply.IsEnhanced != req.IsEnhanced {
		return Outcome{}, &NegotiationError{CodeInvalidFrame, "the reply's setup data does not fit the request"}
	}
	out := Outcome{CRC: req.CRC || reply.CRC, IRD: l.IRD, ORD: l.ORD}
	if !req.IsEnhanced {
		out.IRD = l.MaxIRD
		return out, nil
	}
	e := reply.Enhanced
	if e.IRD != MaxDepth {
		out.ORD = min(out.ORD, e.IRD)
	}
	if e.ORD != MaxDepth && e.ORD > out.IRD {
		if e.ORD > l.MaxIRD {
			return Outcome{}, &NegotiationError{
				CodeInsufficientIRD,
				fmt.Sprintf("the peer wants to issue %d RDMA Reads at once, %d can be served", e.ORD, l.MaxIRD),
			}
		}
		out.IRD = e.ORD
	}
	if !req.Enhanced.PeerToPeer {
		return out, nil
	}
	for _, r := range []RTR{RTRWrite, RTRRead, RTRFPDU} {
		if e.RTR&req.Enhanced.RTR&r != 0 {
			out.RTR = r
			return out, nil
		}
	}
	if e.PeerToPeer {
		return Outcome{}, &NegotiationError{CodeNoRTR, "no RTR frame that both sides can do"}
	}
	return out, nil
}
