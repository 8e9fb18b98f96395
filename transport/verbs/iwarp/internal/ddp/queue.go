package ddp

// Error types of the DDP layer in a Terminate (RFC 5041 section 7).
const (
	TypeLocal    = 0 // local catastrophic error
	TypeTagged   = 1
	TypeUntagged = 2
)

// Codes of TypeTagged.
const (
	TaggedInvalidSTag = 0
	TaggedBounds      = 1
	TaggedWrap        = 3
	TaggedVersion     = 4
)

// Codes of TypeUntagged.
const (
	UntaggedQueue    = 1
	UntaggedNoBuffer = 2 // invalid MSN: no buffer available
	UntaggedMSN      = 3 // invalid MSN: out of range
	UntaggedMO       = 4
	UntaggedTooLong  = 5
	UntaggedVersion  = 6
)

// Queue is the receiving state of one untagged queue over a transport that keeps order: messages come one after
// another, and so do their segments (RFC 5041 section 5.4). The zero Queue expects message 1.
type Queue struct {
	done   uint32 // messages complete
	Offset uint32 // bytes placed of the message under way
}

// Check tests the segment h of n payload bytes against the order of messages. code is one of TypeUntagged,
// if not ok. It changes nothing.
func (q *Queue) Check(h *Header) (code uint8, ok bool) {
	if h.MSN != q.done+1 {
		return UntaggedMSN, false
	}
	if h.MO != q.Offset {
		return UntaggedMO, false
	}
	return 0, true
}

// Placed records the segment of n bytes that Check let pass.
func (q *Queue) Placed(n int, last bool) {
	if last {
		q.done, q.Offset = q.done+1, 0
		return
	}
	q.Offset += uint32(n)
}
