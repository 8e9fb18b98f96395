package nvme

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// SGLType is the last byte of an SGL descriptor: type in bits 7:4, sub type in
// bits 3:0 (Base 4.1.2; RDMA 3.2 for the keyed ones).
type SGLType uint8

// The descriptors that NVMe over RDMA uses.
const (
	SGLData            SGLType = 0x00 // unkeyed address: not on fabrics
	SGLOffset          SGLType = 0x01 // data block, in the capsule
	SGLKeyed           SGLType = 0x40 // keyed data block
	SGLKeyedInvalidate SGLType = 0x4F // keyed data block, the target invalidates the key
	SGLLastSegment     SGLType = 0x31 // last segment of a list, in the capsule
)

// MaxKeyedLength is the most bytes that a keyed descriptor's 24-bit length holds.
const MaxKeyedLength = 1<<24 - 1

// SGL is a decoded 16-byte descriptor. On the wire:
//
//	keyed    0 address (8)  8 length (3)  11 key (4)   15 type
//	offset   0 offset (8)   8 length (4)  12 reserved  15 type
type SGL struct {
	Type    SGLType
	Address uint64 // an offset into the capsule's data for SGLOffset
	Length  uint32 // bytes
	Key     uint32 // keyed types only
}

// KeyedSGL returns a descriptor of remote memory. Length must not exceed
// [MaxKeyedLength].
func KeyedSGL(addr uint64, length, key uint32) SGL {
	return SGL{Type: SGLKeyed, Address: addr, Length: length, Key: key}
}

// InCapsuleSGL returns a descriptor of data that follows the command in its
// capsule. The offset is always 0.
func InCapsuleSGL(length uint32) SGL { return SGL{Type: SGLOffset, Length: length} }

func (t SGLType) keyed() bool { return t&0xF0 == 0x40 }

func parseSGL(b []byte) SGL {
	s := SGL{Type: SGLType(b[15]), Address: binary.LittleEndian.Uint64(b)}
	if s.Type.keyed() {
		s.Length = binary.LittleEndian.Uint32(b[8:]) & MaxKeyedLength
		s.Key = binary.LittleEndian.Uint32(b[11:])
	} else {
		s.Length = binary.LittleEndian.Uint32(b[8:])
	}
	return s
}

// ParseSGL decodes the descriptor at the start of b.
func ParseSGL(b []byte) (SGL, error) {
	if err := need("SGL descriptor", b, 16); err != nil {
		return SGL{}, err
	}
	return parseSGL(b), nil
}

func (s SGL) put(b []byte) {
	binary.LittleEndian.PutUint64(b, s.Address)
	if s.Type.keyed() {
		binary.LittleEndian.PutUint32(b[8:], s.Length&MaxKeyedLength)
		binary.LittleEndian.PutUint32(b[11:], s.Key)
	} else {
		binary.LittleEndian.PutUint32(b[8:], s.Length)
		binary.LittleEndian.PutUint32(b[12:], 0)
	}
	b[15] = byte(s.Type)
}

// Append appends the descriptor's 16 bytes.
func (s SGL) Append(b []byte) []byte {
	b, p := grow(b, 16)
	s.put(p)
	return b
}

// ErrInCapsuleOffset says that data in the capsule does not start at offset 0
// or does not fit in it.
var ErrInCapsuleOffset = errors.New("nvme: in-capsule data must start at offset 0 and lie inside the capsule")

// CheckInCapsule checks an SGLOffset descriptor against the room that the
// capsule has for data, in bytes. Both an offset and a length are untrusted.
func (s SGL) CheckInCapsule(room int) error {
	if s.Address != 0 || room < 0 || uint64(s.Length) > uint64(room) {
		return ErrInCapsuleOffset
	}
	return nil
}

func (s SGL) String() string {
	if s.Type.keyed() {
		return fmt.Sprintf("keyed %#x+%d key %#x", s.Address, s.Length, s.Key)
	}
	return fmt.Sprintf("type %#02x %#x+%d", uint8(s.Type), s.Address, s.Length)
}
