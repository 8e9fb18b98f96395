package nvme

import (
	"fmt"
	"strings"
)

// The discovery log, page 70h, is a header and then entries of the same size
// in bytes (Base 5.16.1.23).
const (
	DiscoveryHeaderSize = 1024
	DiscoveryEntrySize  = 1024
)

// MaxDiscoveryRecords is the most entries that a host should accept: far more
// than any fabric has, yet only 64 MiB. The count on the wire is untrusted.
const MaxDiscoveryRecords = 1 << 16

// DiscoveryHeader starts the discovery log:
//
//	0 generation (8)  8 records (8)  16 record format (2)
type DiscoveryHeader struct {
	Generation uint64 // changes with the log; compare before and after reading it
	Records    uint64
	Format     uint16 // 0
}

func (h *DiscoveryHeader) layout(l layout) {
	l.u64(0, &h.Generation)
	l.u64(8, &h.Records)
	l.u16(16, &h.Format)
}

// Append appends the 1024 bytes.
func (h DiscoveryHeader) Append(b []byte) []byte {
	b, p := grow(b, DiscoveryHeaderSize)
	h.layout(layout{p, true})
	return b
}

// ParseDiscoveryHeader decodes the header at the start of b, 1024 bytes, and
// refuses a record format or a number of records that makes no sense.
func ParseDiscoveryHeader(b []byte) (h DiscoveryHeader, err error) {
	if err := need("discovery log header", b, DiscoveryHeaderSize); err != nil {
		return h, err
	}
	h.layout(layout{b, false})
	if h.Format != 0 {
		return h, fmt.Errorf("nvme: discovery log has record format %d, only 0 is known", h.Format)
	}
	if h.Records > MaxDiscoveryRecords {
		return h, fmt.Errorf("nvme: discovery log claims %d records, more than the %d that are accepted", h.Records, MaxDiscoveryRecords)
	}
	return h, nil
}

// DiscoveryEntry is one entry of the discovery log:
//
//	0 TRTYPE  1 ADRFAM  2 SUBTYPE  3 TREQ  4 PORTID  6 CNTLID  8 ASQSZ  10 EFLAGS
//	32 TRSVCID (32)  256 SUBNQN (256)  512 TRADDR (256)  768 TSAS (256)
//
// Texts arrive padded with zeros or spaces and are kept without.
type DiscoveryEntry struct {
	TransportType TransportType
	AddressFamily AddressFamily
	SubType       SubsystemType
	Requirements  uint8
	PortID        uint16
	CNTLID        uint16 // AnyController for dynamic controllers
	AdminSQSize   uint16
	Flags         uint16
	ServiceID     string // port number
	SubNQN        string
	Address       string
	RDMA          RDMAAddress // means something for TransportRDMA only
}

// RDMAAddress is the transport specific part of an entry (RDMA 3.4, figure
// "Transport Specific Address Subtype Definition").
type RDMAAddress struct {
	QPType   uint8 // 1 connected, 2 datagram
	Provider uint8 // 1 none given, 2 InfiniBand, 3 RoCE, 4 RoCE v2, 5 iWARP
	CMS      uint8 // 1 RDMA CM
	PKey     uint16
}

// TransportType is TRTYPE.
type TransportType uint8

// Transport types.
const (
	TransportRDMA TransportType = 1
	TransportFC   TransportType = 2
	TransportTCP  TransportType = 3
	TransportLoop TransportType = 254
)

func (t TransportType) String() string {
	switch t {
	case TransportRDMA:
		return "rdma"
	case TransportFC:
		return "fc"
	case TransportTCP:
		return "tcp"
	case TransportLoop:
		return "loop"
	}
	return fmt.Sprintf("transport %d", uint8(t))
}

// MarshalText returns nvme-cli's word for the type.
func (t TransportType) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// AddressFamily is ADRFAM.
type AddressFamily uint8

// Address families.
const (
	FamilyIPv4 AddressFamily = 1
	FamilyIPv6 AddressFamily = 2
	FamilyIB   AddressFamily = 3
	FamilyFC   AddressFamily = 4
	FamilyLoop AddressFamily = 254
)

func (f AddressFamily) String() string {
	switch f {
	case FamilyIPv4:
		return "ipv4"
	case FamilyIPv6:
		return "ipv6"
	case FamilyIB:
		return "ib"
	case FamilyFC:
		return "fc"
	case FamilyLoop:
		return "loop"
	}
	return fmt.Sprintf("family %d", uint8(f))
}

// MarshalText returns nvme-cli's word for the family.
func (f AddressFamily) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// SubsystemType is SUBTYPE.
type SubsystemType uint8

// Subsystem types.
const (
	SubsystemReferral  SubsystemType = 1 // another discovery service
	SubsystemNVM       SubsystemType = 2
	SubsystemDiscovery SubsystemType = 3 // this discovery service itself
)

func (s SubsystemType) String() string {
	switch s {
	case SubsystemReferral:
		return "discovery subsystem referral"
	case SubsystemNVM:
		return "nvme subsystem"
	case SubsystemDiscovery:
		return "current discovery subsystem"
	}
	return fmt.Sprintf("type %d", uint8(s))
}

// MarshalText returns nvme-cli's words for the type.
func (s SubsystemType) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (e *DiscoveryEntry) layout(l layout) {
	l.u8(0, (*uint8)(&e.TransportType))
	l.u8(1, (*uint8)(&e.AddressFamily))
	l.u8(2, (*uint8)(&e.SubType))
	l.u8(3, &e.Requirements)
	l.u16(4, &e.PortID)
	l.u16(6, &e.CNTLID)
	l.u16(8, &e.AdminSQSize)
	l.u16(10, &e.Flags)
	l.ascii(32, 32, &e.ServiceID)
	l.nul(256, 256, &e.SubNQN)
	l.ascii(512, 256, &e.Address)
	l.u8(768, &e.RDMA.QPType)
	l.u8(769, &e.RDMA.Provider)
	l.u8(770, &e.RDMA.CMS)
	l.u16(776, &e.RDMA.PKey)
}

// Append appends the 1024 bytes.
func (e DiscoveryEntry) Append(b []byte) []byte {
	b, p := grow(b, DiscoveryEntrySize)
	e.layout(layout{p, true})
	return b
}

// ParseDiscoveryEntry decodes the entry at the start of b.
func ParseDiscoveryEntry(b []byte) (e DiscoveryEntry, err error) {
	if err := need("discovery log entry", b, DiscoveryEntrySize); err != nil {
		return e, err
	}
	e.layout(layout{b, false})
	e.ServiceID = strings.TrimLeft(e.ServiceID, " ")
	e.Address = strings.TrimLeft(e.Address, " ")
	return e, nil
}
