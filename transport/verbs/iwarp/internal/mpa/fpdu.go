package mpa

import (
	"encoding/binary"
	"hash/crc32"
)

// Sizes around the ULPDU in an FPDU (RFC 5044 section 4.1): length, then the ULPDU, 0 to 3 zero bytes, CRC.
const (
	LengthSize = 2
	CRCSize    = 4
	// MaxULPDU is the largest ULPDU that the length field can tell.
	MaxULPDU = 0xffff
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum continues the CRC32C over b; it starts at 0 (RFC 5044 section 4.2).
func Sum(crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }

// Pad is the number of zero bytes that bring length field and ULPDU to a multiple of 4.
func Pad(ulpdu int) int { return -(LengthSize + ulpdu) & 3 }

// Size is that of the whole FPDU.
func Size(ulpdu int) int { return LengthSize + ulpdu + Pad(ulpdu) + CRCSize }

// Trailer is the size of padding and CRC.
func Trailer(ulpdu int) int { return Pad(ulpdu) + CRCSize }

// AppendTrailer adds padding and CRC for a ULPDU whose CRC so far, length field included, is crc. Without CRC
// the field is there all the same, as zero: no receiver checks it (section 4.1).
func AppendTrailer(dst []byte, ulpdu int, crc uint32, useCRC bool) []byte {
	pad := zeros[:Pad(ulpdu)]
	dst = append(dst, pad...)
	if !useCRC {
		return append(dst, zeros[:CRCSize]...)
	}
	// CRC32C goes out in iSCSI's order (RFC 3720 section 12.1), which is little-endian for crc32's value.
	return binary.LittleEndian.AppendUint32(dst, Sum(crc, pad))
}

// CheckTrailer tells whether padding and CRC in b, Trailer(ulpdu) bytes, fit the CRC of what came before.
func CheckTrailer(b []byte, crc uint32) bool {
	pad := len(b) - CRCSize
	return binary.LittleEndian.Uint32(b[pad:]) == Sum(crc, b[:pad])
}

var zeros [CRCSize]byte

// MaxULPDUFor is the largest ULPDU whose FPDU fits one TCP segment of mss bytes (RFC 5044 section 4.5, without
// markers), but at least 128, which section 4.5 asks for.
func MaxULPDUFor(mss int) int {
	return max(128, min((mss-CRCSize)&^3-LengthSize, MaxULPDU))
}
