package verbs

import (
	"net/netip"
	"strconv"
)

// Family is the kind of an address.
type Family uint8

// Address families, as NVMe-oF's ADRFAM names them.
const (
	FamilyIP Family = iota // IPv4 or IPv6, by the address itself
	FamilyIB               // an InfiniBand GID, written as an IPv6 address (AF_IB)
)

// Addr is an RDMA connection manager's address: an IP address, or an InfiniBand GID, and a port (for a GID:
// the service ID's low 16 bits in the RDMA IP CM service's TCP port space). IPv6 zones are kept.
type Addr struct {
	Family Family
	IP     netip.Addr
	Port   uint16
}

// IsValid tells whether the address is set.
func (a Addr) IsValid() bool { return a.IP.IsValid() }

// String is "10.0.0.1:4420", "[fe80::1%eth0]:4420" or "[fe80::1]:4420 (ib)".
func (a Addr) String() string {
	if !a.IP.IsValid() {
		return "any:" + strconv.Itoa(int(a.Port))
	}
	s := netip.AddrPortFrom(a.IP, a.Port).String()
	if a.Family == FamilyIB {
		s += " (ib)"
	}
	return s
}
