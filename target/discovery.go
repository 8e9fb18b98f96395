package target

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// discoveryLog builds the log page for the host of ctrl, which sees the
// subsystems that it may use, on every port. local is the address that the host
// reached us by; it stands in for listeners on all addresses.
func (t *Target) discoveryLog(ctrl *controller, local verbs.Addr) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	var entries []nvme.DiscoveryEntry
	for _, p := range t.ports {
		addr := p.addr
		if !addr.IP.IsValid() || addr.IP.IsUnspecified() {
			addr.IP = local.IP
		}
		e := discoveryEntry(addr.Family, netip.AddrPortFrom(addr.IP, addr.Port))
		e.PortID = p.id
		if p == ctrl.port {
			e.SubType, e.SubNQN = nvme.SubsystemDiscovery, nvme.DiscoveryNQN
			entries = append(entries, e)
		}
		e.SubType = nvme.SubsystemNVM
		for _, nqn := range slices.Sorted(maps.Keys(t.subsystems)) {
			if t.subsystems[nqn].allows(ctrl.hostNQN) {
				e.SubNQN = nqn
				entries = append(entries, e)
			}
		}
	}
	for _, r := range t.referrals {
		e := discoveryEntry(verbs.FamilyIP, r.Addr)
		e.SubType, e.SubNQN = nvme.SubsystemReferral, nvme.DiscoveryNQN
		entries = append(entries, e)
	}
	b := nvme.DiscoveryHeader{Generation: t.generation.Load(), Records: uint64(len(entries))}.Append(nil)
	for _, e := range entries {
		b = e.Append(b)
	}
	return b
}

func discoveryEntry(f verbs.Family, a netip.AddrPort) nvme.DiscoveryEntry {
	e := nvme.DiscoveryEntry{
		TransportType: nvme.TransportRDMA, AddressFamily: nvme.FamilyIPv4,
		Requirements: 1 << 2, // SQ flow control may be switched off
		CNTLID:       nvme.AnyController, AdminSQSize: adminDepth,
		ServiceID: strconv.Itoa(int(a.Port())),
		Address:   a.Addr().Unmap().WithZone("").String(),
		RDMA:      nvme.RDMAAddress{QPType: 1, Provider: 1, CMS: 1},
	}
	switch {
	case f == verbs.FamilyIB:
		e.AddressFamily = nvme.FamilyIB
	case a.Addr().Unmap().Is6():
		e.AddressFamily = nvme.FamilyIPv6
	}
	return e
}
