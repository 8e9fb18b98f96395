package nvme

import (
	"encoding/hex"
	"fmt"
)

// UUID is 16 bytes in the order of its text form, as NVMe sends host IDs and
// namespace UUIDs.
type UUID [16]byte

// ParseUUID parses the 36 character form, in either case.
func ParseUUID(s string) (u UUID, err error) {
	bad := fmt.Errorf("%q is not a UUID such as 01234567-89ab-cdef-0123-456789abcdef", s)
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return u, bad
	}
	raw, err := hex.DecodeString(s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:])
	if err != nil {
		return u, bad
	}
	return UUID(raw), nil
}

// IsZero says whether the UUID is not set.
func (u UUID) IsZero() bool { return u == UUID{} }

func (u UUID) String() string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// MarshalText returns the text form.
func (u UUID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText parses the text form.
func (u *UUID) UnmarshalText(b []byte) (err error) {
	*u, err = ParseUUID(string(b))
	return err
}

// NGUID is a namespace's globally unique identifier.
type NGUID [16]byte

// IsZero says whether the identifier is not set.
func (g NGUID) IsZero() bool { return g == NGUID{} }

func (g NGUID) String() string { return hex.EncodeToString(g[:]) }

// MarshalText returns 32 hexadecimal digits.
func (g NGUID) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// EUI64 is a namespace's IEEE extended unique identifier.
type EUI64 [8]byte

// IsZero says whether the identifier is not set.
func (e EUI64) IsZero() bool { return e == EUI64{} }

func (e EUI64) String() string { return hex.EncodeToString(e[:]) }

// MarshalText returns 16 hexadecimal digits.
func (e EUI64) MarshalText() ([]byte, error) { return []byte(e.String()), nil }
