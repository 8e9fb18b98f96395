package rdmacm

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"farblk/transport/verbs"
)

// Address families in a struct sockaddr, Linux's numbers.
const (
	afInet  = 2
	afInet6 = 10
	afIB    = 27
)

// Service IDs of the RDMA IP CM service, TCP port space (IBA annex A11): the port is in the low 16 bits.
const (
	serviceTCP     = uint64(0x0000000001060000)
	servicePort    = uint64(0x000000000000ffff)
	serviceNotPort = ^servicePort
)

// sockaddr is a struct sockaddr_storage in memory: the family in native order, the rest in network order.
// IPv4: port@2, address@4. IPv6: port@2, address@8, scope@24 (native). AF_IB: P_Key@2, flow@4, GID@8,
// service ID@24, its mask@32, scope@40.
type sockaddr [128]byte

// encode writes a into a sockaddr. A zone is an interface's name or number.
func encode(a verbs.Addr) (sockaddr, error) {
	var s sockaddr
	ip := a.IP.Unmap()
	switch {
	case !ip.IsValid():
		return s, fmt.Errorf("%w: no address given", verbs.ErrAddrNotAvailable)
	case a.Family == verbs.FamilyIB:
		if !ip.Is6() {
			return s, fmt.Errorf("%w: %v is not a GID", verbs.ErrAddrNotAvailable, a.IP)
		}
		binary.NativeEndian.PutUint16(s[0:], afIB)
		binary.BigEndian.PutUint16(s[2:], 0xffff) // the default partition, full member
		gid := ip.As16()
		copy(s[8:], gid[:])
		binary.BigEndian.PutUint64(s[24:], serviceTCP|uint64(a.Port))
		mask := ^uint64(0)
		if a.Port == 0 {
			mask = serviceNotPort // any port of the space
		}
		binary.BigEndian.PutUint64(s[32:], mask)
	case ip.Is4():
		binary.NativeEndian.PutUint16(s[0:], afInet)
		binary.BigEndian.PutUint16(s[2:], a.Port)
		b := ip.As4()
		copy(s[4:], b[:])
	default:
		binary.NativeEndian.PutUint16(s[0:], afInet6)
		binary.BigEndian.PutUint16(s[2:], a.Port)
		b := ip.As16()
		copy(s[8:], b[:])
		if z := ip.Zone(); z != "" {
			scope, err := strconv.ParseUint(z, 10, 32)
			if err != nil {
				i, err := net.InterfaceByName(z)
				if err != nil {
					return s, fmt.Errorf("%w: no network interface %q for %v", verbs.ErrAddrNotAvailable, z, a)
				}
				scope = uint64(i.Index)
			}
			binary.NativeEndian.PutUint32(s[24:], uint32(scope))
		}
	}
	return s, nil
}

// decode reads what the connection manager filled in; an unset address is the zero Addr.
func decode(s *sockaddr) verbs.Addr {
	switch binary.NativeEndian.Uint16(s[0:]) {
	case afInet:
		return verbs.Addr{IP: netip.AddrFrom4([4]byte(s[4:8])), Port: binary.BigEndian.Uint16(s[2:])}
	case afInet6:
		ip := netip.AddrFrom16([16]byte(s[8:24])).Unmap()
		if scope := binary.NativeEndian.Uint32(s[24:]); scope != 0 && ip.Is6() {
			zone := strconv.FormatUint(uint64(scope), 10)
			if i, err := net.InterfaceByIndex(int(scope)); err == nil {
				zone = i.Name
			}
			ip = ip.WithZone(zone)
		}
		return verbs.Addr{IP: ip, Port: binary.BigEndian.Uint16(s[2:])}
	case afIB:
		return verbs.Addr{
			Family: verbs.FamilyIB, IP: netip.AddrFrom16([16]byte(s[8:24])),
			Port: uint16(binary.BigEndian.Uint64(s[24:]) & servicePort),
		}
	default:
		return verbs.Addr{}
	}
}
