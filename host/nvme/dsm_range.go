package nvme

import "encoding/binary"

// MaxRanges is the most ranges in one Dataset Management command, and
// RangeSize the bytes that each takes.
const (
	MaxRanges = 256
	RangeSize = 16
)

// Range is one range of a Dataset Management command (NVM 3.2.3, figure
// "Dataset Management – Range Definition"):
//
//	0 context attributes (4)  4 length in blocks (4)  8 starting LBA (8)
type Range struct {
	Attributes uint32
	Blocks     uint32 // 1-based; 0 names no block
	SLBA       uint64
}

// Put writes the range into the first [RangeSize] bytes of b, without allocating.
func (r Range) Put(b []byte) {
	_ = b[RangeSize-1]
	binary.LittleEndian.PutUint32(b, r.Attributes)
	binary.LittleEndian.PutUint32(b[4:], r.Blocks)
	binary.LittleEndian.PutUint64(b[8:], r.SLBA)
}

// Append appends the range's wire form.
func (r Range) Append(b []byte) []byte {
	b, p := grow(b, RangeSize)
	r.Put(p)
	return b
}

// ParseRange decodes the range at the start of b.
func ParseRange(b []byte) (Range, error) {
	if err := need("Dataset Management range", b, RangeSize); err != nil {
		return Range{}, err
	}
	return Range{
		Attributes: binary.LittleEndian.Uint32(b),
		Blocks:     binary.LittleEndian.Uint32(b[4:]),
		SLBA:       binary.LittleEndian.Uint64(b[8:]),
	}, nil
}
