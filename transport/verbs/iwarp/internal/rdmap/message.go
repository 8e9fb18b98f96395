// Package rdmap is the RDMA protocol of iWARP, RFC 5040: the control byte that rides in DDP's header, the Read
// Request and the Terminate message. No socket, no clock, no memory. Every field is big-endian.
package rdmap

import "encoding/binary"

// Version of RDMAP (RFC 5040 section 4.1): 1 on the wire, whatever MPA's revision.
const Version = 1

// Opcode of a message (RFC 5040 section 4.1, figure 4).
type Opcode uint8

// Opcodes.
const (
	Write Opcode = iota
	ReadRequest
	ReadResponse
	Send
	SendInvalidate
	SendSE
	SendSEInvalidate
	Terminate
)

const (
	shiftVersion = 6
	maskOpcode   = 0x0f
)

// Control is the control byte of op in this version.
func Control(op Opcode) uint8 { return Version<<shiftVersion | uint8(op) }

// ParseControl takes the control byte apart.
func ParseControl(b uint8) (version uint8, op Opcode) {
	return b >> shiftVersion, Opcode(b & maskOpcode)
}

// ReadSize is the payload of a Read Request.
const ReadSize = 28

// Read is an RDMA Read Request (RFC 5040 section 4.4):
//
//	0  4  data sink STag
//	4  8  data sink tagged offset
//	12 4  size in bytes
//	16 4  data source STag
//	20 8  data source tagged offset
type Read struct {
	SinkSTag   uint32
	SinkTO     uint64
	Size       uint32
	SourceSTag uint32
	SourceTO   uint64
}

// ParseRead decodes a Read Request's payload; false means that it has not ReadSize bytes.
func ParseRead(b []byte) (r Read, ok bool) {
	if len(b) != ReadSize {
		return Read{}, false
	}
	return Read{
		SinkSTag:   binary.BigEndian.Uint32(b),
		SinkTO:     binary.BigEndian.Uint64(b[4:]),
		Size:       binary.BigEndian.Uint32(b[12:]),
		SourceSTag: binary.BigEndian.Uint32(b[16:]),
		SourceTO:   binary.BigEndian.Uint64(b[20:]),
	}, true
}

// Append encodes r after dst.
func (r *Read) Append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, r.SinkSTag)
	dst = binary.BigEndian.AppendUint64(dst, r.SinkTO)
	dst = binary.BigEndian.AppendUint32(dst, r.Size)
	dst = binary.BigEndian.AppendUint32(dst, r.SourceSTag)
	return binary.BigEndian.AppendUint64(dst, r.SourceTO)
}
