package nvme

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// layout carries fields between a struct and its wire form. One description of
// a structure serves both directions, so they cannot drift apart.
type layout struct {
	b     []byte
	write bool
}

func (l layout) u8(off int, v *uint8) {
	if l.write {
		l.b[off] = *v
	} else {
		*v = l.b[off]
	}
}

func (l layout) u16(off int, v *uint16) {
	if l.write {
		binary.LittleEndian.PutUint16(l.b[off:], *v)
	} else {
		*v = binary.LittleEndian.Uint16(l.b[off:])
	}
}

func (l layout) u32(off int, v *uint32) {
	if l.write {
		binary.LittleEndian.PutUint32(l.b[off:], *v)
	} else {
		*v = binary.LittleEndian.Uint32(l.b[off:])
	}
}

func (l layout) u64(off int, v *uint64) {
	if l.write {
		binary.LittleEndian.PutUint64(l.b[off:], *v)
	} else {
		*v = binary.LittleEndian.Uint64(l.b[off:])
	}
}

func (l layout) u128(off int, v *Uint128) {
	l.u64(off, &v.Lo)
	l.u64(off+8, &v.Hi)
}

func (l layout) bytes(off int, v []byte) {
	if l.write {
		copy(l.b[off:off+len(v)], v)
	} else {
		copy(v, l.b[off:])
	}
}

// ascii is a field of n bytes padded with spaces (Base 1.4.2, ASCII strings).
func (l layout) ascii(off, n int, v *string) { l.text(off, n, ' ', v) }

// nul is a field of n bytes that ends at the first NUL, such as an NQN.
func (l layout) nul(off, n int, v *string) { l.text(off, n, 0, v) }

func (l layout) text(off, n int, pad byte, v *string) {
	f := l.b[off : off+n]
	if l.write {
		for i := copy(f, *v); i < n; i++ {
			f[i] = pad
		}
		return
	}
	*v = trimText(f)
}

// trimText drops what targets pad text with, whichever of the two they chose,
// and replaces what could drive a terminal.
func trimText(f []byte) string {
	s := string(f)
	if i := strings.IndexByte(s, 0); i >= 0 {
		s = s[:i]
	}
	clean := func(r rune) rune {
		if r < 0x20 || r == 0x7F {
			return '?'
		}
		return r
	}
	return strings.TrimRight(strings.Map(clean, strings.ToValidUTF8(s, "?")), " ")
}

// grow appends n zero bytes and returns the longer slice and the new part.
func grow(b []byte, n int) (all, part []byte) {
	all = append(b, make([]byte, n)...)
	return all, all[len(b):]
}

// LengthError says that a structure is shorter than its layout.
type LengthError struct {
	What      string
	Got, Want int // bytes
}

func (e *LengthError) Error() string {
	return fmt.Sprintf("nvme: %s is %d bytes long, at least %d are needed", e.What, e.Got, e.Want)
}

func need(what string, b []byte, n int) error {
	if len(b) < n {
		return &LengthError{what, len(b), n}
	}
	return nil
}
