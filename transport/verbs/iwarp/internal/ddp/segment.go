// Package ddp is Direct Data Placement over reliable transports, RFC 5041: segment headers and the checks that
// a receiver makes on untagged segments. No socket, no clock, no memory. Every field is big-endian.
package ddp

import "encoding/binary"

// Version is the one version of DDP on MPA (RFC 5041 section 4.1).
const Version = 1

// Header sizes, the upper layer's control byte included (RFC 5041 sections 4.2 and 4.3).
const (
	TaggedSize   = 14
	UntaggedSize = 18
)

// Untagged queues that RDMAP uses (RFC 5040 section 4.1).
const (
	QueueSend      = 0
	QueueRead      = 1 // RDMA Read Requests
	QueueTerminate = 2
)

const (
	flagTagged  = 0x80
	flagLast    = 0x40
	maskVersion = 0x03
)

// Header is that of a segment:
//
//	tagged    0 1 T(0x80) L(0x40) DV(0x03)   untagged  0 1 the same
//	          1 1 reserved for the ULP                 1 5 reserved for the ULP
//	          2 4 STag                                 6 4 queue number
//	          6 8 tagged offset                       10 4 message sequence number
//	                                                  14 4 message offset
type Header struct {
	Tagged, Last bool
	Version      uint8
	ULP          uint8  // RDMAP's control byte
	STag         uint32 // tagged: the buffer; untagged: the ULP's second reserved field
	TO           uint64
	QN, MSN, MO  uint32
}

// Size of the header, from its first byte.
func Size(first byte) int {
	if first&flagTagged != 0 {
		return TaggedSize
	}
	return UntaggedSize
}

// Parse decodes a header; false means that b is too short.
func Parse(b []byte) (h Header, ok bool) {
	if len(b) == 0 || len(b) < Size(b[0]) {
		return Header{}, false
	}
	h.Tagged, h.Last, h.Version = b[0]&flagTagged != 0, b[0]&flagLast != 0, b[0]&maskVersion
	h.ULP = b[1]
	h.STag = binary.BigEndian.Uint32(b[2:])
	if h.Tagged {
		h.TO = binary.BigEndian.Uint64(b[6:])
		return h, true
	}
	h.QN = binary.BigEndian.Uint32(b[6:])
	h.MSN = binary.BigEndian.Uint32(b[10:])
	h.MO = binary.BigEndian.Uint32(b[14:])
	return h, true
}

// Size of the encoded header.
func (h *Header) Size() int {
	if h.Tagged {
		return TaggedSize
	}
	return UntaggedSize
}

// Append encodes h after dst.
func (h *Header) Append(dst []byte) []byte {
	first := h.Version & maskVersion
	if h.Last {
		first |= flagLast
	}
	if h.Tagged {
		dst = append(dst, first|flagTagged, h.ULP)
		dst = binary.BigEndian.AppendUint32(dst, h.STag)
		return binary.BigEndian.AppendUint64(dst, h.TO)
	}
	dst = append(dst, first, h.ULP)
	dst = binary.BigEndian.AppendUint32(dst, h.STag)
	dst = binary.BigEndian.AppendUint32(dst, h.QN)
	dst = binary.BigEndian.AppendUint32(dst, h.MSN)
	return binary.BigEndian.AppendUint32(dst, h.MO)
}
