package rdmap

import (
	"encoding/binary"
	"fmt"
)

// Layer that found an error (RFC 5040 section 4.8).
type Layer uint8

// Layers.
const (
	LayerRDMA Layer = 0
	LayerDDP  Layer = 1
	LayerLLP  Layer = 2 // MPA
)

// Error types of LayerRDMA, and their codes (RFC 5040 section 4.8, figure 10).
const (
	TypeLocal      = 0
	TypeProtection = 1
	TypeOperation  = 2

	ProtectionInvalidSTag      = 0
	ProtectionBounds           = 1
	ProtectionAccess           = 2
	ProtectionOtherStream      = 3
	ProtectionWrap             = 4
	ProtectionCannotInvalidate = 9
	OperationVersion           = 5
	OperationOpcode            = 6
	OperationStream            = 7 // catastrophic error, localized to the stream
)

const (
	terminateSize = 4
	lengthSize    = 2
	maxHeader     = 18 // DDP's untagged header

	bitLength = 0x80 // HDRCT: the DDP segment length is there
	bitDDP    = 0x40 // ... the DDP header
	bitRDMA   = 0x20 // ... the RDMA Read Request
)

// MaxTerminate is the longest payload of a Terminate.
const MaxTerminate = terminateSize + lengthSize + maxHeader + ReadSize

// Term is a Terminate message (RFC 5040 section 4.8):
//
//	0  1  layer(4), error type(4)
//	1  1  error code
//	2  1  M(0x80) D(0x40) R(0x20) reserved
//	3  1  reserved
//	4  2  with M: length of the segment in error
//	..    with D: its DDP header
//	..    with R: the Read Request in error
type Term struct {
	Layer Layer
	Type  uint8
	Code  uint8
	// Length is the segment's; Header its DDP header, of ddp.TaggedSize or UntaggedSize bytes; Read the Read
	// Request's payload. Header is nil where there was no segment.
	Length uint16
	Header []byte
	Read   []byte
}

// ParseTerm decodes a Terminate's payload as far as it goes: a peer that leaves out headers is understood.
// false means that not even the error is there. Header and Read alias b.
func ParseTerm(b []byte) (t Term, ok bool) {
	if len(b) < terminateSize {
		return Term{}, false
	}
	t.Layer, t.Type, t.Code = Layer(b[0]>>4), b[0]&0x0f, b[1]
	count, rest := b[2], b[terminateSize:]
	if count&bitLength == 0 || len(rest) < lengthSize {
		return t, true
	}
	t.Length, rest = binary.BigEndian.Uint16(rest), rest[lengthSize:]
	if count&bitDDP == 0 || len(rest) == 0 {
		return t, true
	}
	size := maxHeader
	if rest[0]&0x80 != 0 {
		size = 14
	}
	if len(rest) < size {
		return t, true
	}
	t.Header, rest = rest[:size], rest[size:]
	if count&bitRDMA != 0 && len(rest) >= ReadSize {
		t.Read = rest[:ReadSize]
	}
	return t, true
}

// Append encodes t after dst.
func (t *Term) Append(dst []byte) []byte {
	var count byte
	if t.Header != nil {
		count |= bitLength | bitDDP
		if t.Read != nil {
			count |= bitRDMA
		}
	}
	dst = append(dst, byte(t.Layer)<<4|t.Type&0x0f, t.Code, count, 0)
	if t.Header == nil {
		return dst
	}
	dst = binary.BigEndian.AppendUint16(dst, t.Length)
	dst = append(dst, t.Header...)
	return append(dst, t.Read...)
}

type reason struct {
	layer      Layer
	kind, code uint8
}

var reasons = map[reason]string{
	{LayerRDMA, TypeProtection, ProtectionInvalidSTag}:      "invalid STag",
	{LayerRDMA, TypeProtection, ProtectionBounds}:           "base or bounds violation",
	{LayerRDMA, TypeProtection, ProtectionAccess}:           "access rights violation",
	{LayerRDMA, TypeProtection, ProtectionOtherStream}:      "STag of another stream",
	{LayerRDMA, TypeProtection, ProtectionWrap}:             "tagged offset wraps",
	{LayerRDMA, TypeProtection, ProtectionCannotInvalidate}: "STag cannot be invalidated",
	{LayerRDMA, TypeOperation, OperationVersion}:            "invalid RDMAP version",
	{LayerRDMA, TypeOperation, OperationOpcode}:             "unexpected opcode",
	{LayerRDMA, TypeOperation, OperationStream}:             "catastrophic error of the stream",
	{LayerRDMA, TypeOperation, ProtectionCannotInvalidate}:  "STag cannot be invalidated",
	{LayerDDP, 1, 0}: "invalid STag",
	{LayerDDP, 1, 1}: "base or bounds violation",
	{LayerDDP, 1, 2}: "STag of another stream",
	{LayerDDP, 1, 3}: "tagged offset wraps",
	{LayerDDP, 1, 4}: "invalid DDP version",
	{LayerDDP, 2, 1}: "invalid queue number",
	{LayerDDP, 2, 2}: "no receive buffer for the message",
	{LayerDDP, 2, 3}: "message sequence number out of range",
	{LayerDDP, 2, 4}: "invalid message offset",
	{LayerDDP, 2, 5}: "message too long for the receive buffer",
	{LayerDDP, 2, 6}: "invalid DDP version",
	{LayerLLP, 0, 1}: "connection lost",
	{LayerLLP, 0, 2}: "CRC error",
	{LayerLLP, 0, 3}: "marker error",
	{LayerLLP, 0, 4}: "invalid MPA request or reply",
	{LayerLLP, 0, 5}: "local catastrophic error",
	{LayerLLP, 0, 6}: "insufficient IRD",
	{LayerLLP, 0, 7}: "no matching RTR frame",
}

// String is the error in the specifications' words.
func (t *Term) String() string {
	layer := map[Layer]string{LayerRDMA: "RDMAP", LayerDDP: "DDP", LayerLLP: "MPA"}[t.Layer]
	if layer == "" {
		layer = fmt.Sprintf("layer %d", t.Layer)
	}
	words := reasons[reason{t.Layer, t.Type, t.Code}]
	if words == "" {
		words = fmt.Sprintf("error type %d, code %#x", t.Type, t.Code)
	}
	return layer + ": " + words
}
