package nvme

import "math/big"

// Uint128 is an unsigned 128-bit number, as capacities and SMART counters are.
type Uint128 struct{ Lo, Hi uint64 }

// Big returns the value as a big integer.
func (u Uint128) Big() *big.Int {
	v := new(big.Int).SetUint64(u.Hi)
	return v.Lsh(v, 64).Or(v, new(big.Int).SetUint64(u.Lo))
}

// String returns the value in decimal.
func (u Uint128) String() string { return u.Big().String() }

// MarshalJSON writes the value as a number.
func (u Uint128) MarshalJSON() ([]byte, error) { return []byte(u.String()), nil }
