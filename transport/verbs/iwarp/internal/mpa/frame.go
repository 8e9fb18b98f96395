// Package mpa is the Marker PDU Aligned framing of iWARP over TCP: RFC 5044, and the enhanced connection setup
// of RFC 6581. Codecs and negotiation only: no socket, no clock. Every field is big-endian but the CRC.
package mpa

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Revisions of the protocol: 1 is RFC 5044, 2 is RFC 6581.
const (
	Revision1 = 1
	Revision2 = 2
)

// Sizes of a request or reply frame (RFC 5044 section 7.1.1).
const (
	HeaderSize = 20  // key, flags, revision, private data length
	MaxPrivate = 512 // private data, with the enhanced words of RFC 6581
	// EnhancedSize is the IRD and ORD words in front of the private data (RFC 6581 section 9.1).
	EnhancedSize = 4
)

// MaxDepth is the largest IRD or ORD that fits (14 bits). It also says "not negotiated" (RFC 6581 section 9.1).
const MaxDepth = 0x3fff

const (
	keyRequest = "MPA ID Req Frame"
	keyReply   = "MPA ID Rep Frame"
	keySize    = 16

	flagMarkers  = 0x80
	flagCRC      = 0x40
	flagReject   = 0x20
	flagEnhanced = 0x10

	bitA = 0x8000 // in the IRD word: peer-to-peer, the initiator sends an RTR frame
	bitB = 0x4000 // in the IRD word: the RTR frame may be an FPDU of length 0
	bitC = 0x8000 // in the ORD word: ... an RDMA Write of length 0
	bitD = 0x4000 // in the ORD word: ... an RDMA Read of length 0
)

// Errors of Parse.
var (
	ErrShort = errors.New("MPA frame cut short")
	ErrKey   = errors.New("no MPA key")
)

// Kind tells the two frames of the handshake apart.
type Kind uint8

// The kinds of frames.
const (
	Request Kind = iota
	Reply
)

func (k Kind) key() string {
	if k == Reply {
		return keyReply
	}
	return keyRequest
}

// RTR is the set of ready-to-receive frames that a peer can use (RFC 6581 section 9.2).
type RTR uint8

// Members of RTR, to be or-ed.
const (
	RTRFPDU  RTR = 1 << iota // an FPDU of length 0
	RTRWrite                 // an RDMA Write of length 0
	RTRRead                  // an RDMA Read of length 0
)

// Enhanced is the connection setup data of revision 2 (RFC 6581 section 9.1).
type Enhanced struct {
	PeerToPeer bool // the responder may send first: the initiator's first FPDU is an RTR frame
	RTR        RTR
	IRD, ORD   uint16 // the sender's own, at most MaxDepth
}

// Frame is an MPA request or reply:
//
//	0   16  key
//	16   1  M(0x80) C(0x40) R(0x20) S(0x10) reserved
//	17   1  revision
//	18   2  length of what follows
//	20   4  only with S: A B IRD(14), C D ORD(14)
//	..   n  private data
type Frame struct {
	Kind       Kind
	Markers    bool // the sender wants markers in what it receives
	CRC        bool
	Reject     bool // replies only
	Revision   uint8
	IsEnhanced bool
	Enhanced   Enhanced
	Private    []byte
}

// Length gives the whole frame's size from its first HeaderSize bytes, without trusting anything else in it.
func Length(header []byte, kind Kind) (int, error) {
	n := min(len(header), keySize)
	if !bytes.Equal(header[:n], []byte(kind.key())[:n]) {
		return 0, ErrKey
	}
	if len(header) < HeaderSize {
		return 0, ErrShort
	}
	private := int(binary.BigEndian.Uint16(header[18:]))
	if private > MaxPrivate {
		return 0, fmt.Errorf("MPA private data of %d bytes, more than %d", private, MaxPrivate)
	}
	return HeaderSize + private, nil
}

// Parse decodes one frame that fills b. Private aliases b.
func Parse(b []byte, kind Kind) (Frame, error) {
	n, err := Length(b, kind)
	if err != nil {
		return Frame{}, err
	}
	if len(b) < n {
		return Frame{}, ErrShort
	}
	if len(b) > n {
		return Frame{}, fmt.Errorf("%d bytes after the MPA frame", len(b)-n)
	}
	flags := b[16]
	f := Frame{
		Kind:    kind,
		Markers: flags&flagMarkers != 0, CRC: flags&flagCRC != 0, Reject: flags&flagReject != 0,
		Revision: b[17], Private: b[HeaderSize:],
	}
	if f.Revision < Revision2 || flags&flagEnhanced == 0 {
		return f, nil // S is a reserved bit in revision 1
	}
	if len(f.Private) < EnhancedSize {
		return Frame{}, fmt.Errorf("enhanced MPA frame with %d bytes after its header", len(f.Private))
	}
	ird, ord := binary.BigEndian.Uint16(f.Private), binary.BigEndian.Uint16(f.Private[2:])
	f.IsEnhanced = true
	f.Enhanced = Enhanced{PeerToPeer: ird&bitA != 0, IRD: ird & MaxDepth, ORD: ord & MaxDepth}
	if ird&bitB != 0 {
		f.Enhanced.RTR |= RTRFPDU
	}
	if ord&bitC != 0 {
		f.Enhanced.RTR |= RTRWrite
	}
	if ord&bitD != 0 {
		f.Enhanced.RTR |= RTRRead
	}
	f.Private = f.Private[EnhancedSize:]
	return f, nil
}

// Append encodes f after dst. Private data too long for the frame is an error.
func (f Frame) Append(dst []byte) ([]byte, error) {
	size := len(f.Private)
	if f.IsEnhanced {
		size += EnhancedSize
	}
	if size > MaxPrivate {
		return dst, fmt.Errorf("private data of %d bytes does not fit an MPA frame", len(f.Private))
	}
	dst = append(dst, f.Kind.key()...)
	var flags byte
	for _, b := range []struct {
		on  bool
		bit byte
	}{{f.Markers, flagMarkers}, {f.CRC, flagCRC}, {f.Reject, flagReject}, {f.IsEnhanced, flagEnhanced}} {
		if b.on {
			flags |= b.bit
		}
	}
	dst = append(dst, flags, f.Revision)
	dst = binary.BigEndian.AppendUint16(dst, uint16(size))
	if f.IsEnhanced {
		e := f.Enhanced
		ird, ord := e.IRD&MaxDepth, e.ORD&MaxDepth
		if e.PeerToPeer {
			ird |= bitA
		}
		if e.RTR&RTRFPDU != 0 {
			ird |= bitB
		}
		if e.RTR&RTRWrite != 0 {
			ord |= bitC
		}
		if e.RTR&RTRRead != 0 {
			ord |= bitD
		}
		dst = binary.BigEndian.AppendUint16(dst, ird)
		dst = binary.BigEndian.AppendUint16(dst, ord)
	}
	return append(dst, f.Private...), nil
}
