package nvme

import (
	"encoding/binary"
	"fmt"
)

// Sizes in bytes of the ANA log's header and of a group without its namespaces.
const (
	LogANAHeaderSize = 16
	LogANAGroupSize  = 32
)

// ANAState is the access that a controller has to the namespaces of a group
// (Base 8.1).
type ANAState uint8

// ANA states.
const (
	ANAOptimized      ANAState = 0x1
	ANANonOptimized   ANAState = 0x2
	ANAInaccessible   ANAState = 0x3
	ANAPersistentLoss ANAState = 0x4
	ANAChange         ANAState = 0xF
)

func (s ANAState) String() string {
	switch s {
	case ANAOptimized:
		return "optimized"
	case ANANonOptimized:
		return "non-optimized"
	case ANAInaccessible:
		return "inaccessible"
	case ANAPersistentLoss:
		return "persistent-loss"
	case ANAChange:
		return "change"
	}
	return fmt.Sprintf("state %#x", uint8(s))
}

// MarshalText returns the state in words.
func (s ANAState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// ANALog is the Asymmetric Namespace Access log, page 0Ch (Base 5.16.1.13):
//
//	0 change count (8)  8 groups (2)  16 group descriptors
//
// and each group descriptor
//
//	0 group ID (4)  4 namespaces (4)  8 change count (8)  16 state  32 namespace IDs
type ANALog struct {
	ChangeCount uint64
	Groups      []ANAGroup
}

// ANAGroup is one group of the log.
type ANAGroup struct {
	ID          uint32
	ChangeCount uint64
	State       ANAState
	NSIDs       []uint32
}

// ANAGroupsOnly is the LSP of a Get Log Page for the ANA log that leaves out the namespace IDs (RGO).
const ANAGroupsOnly = 1

// ParseANALog decodes a log. Counts are untrusted: groups and namespaces that do
// not lie inside b are an error, and nothing is allocated for them.
func ParseANALog(b []byte) (log ANALog, err error) {
	if err := need("ANA log", b, LogANAHeaderSize); err != nil {
		return log, err
	}
	log.ChangeCount = binary.LittleEndian.Uint64(b)
	groups := int(binary.LittleEndian.Uint16(b[8:]))
	b = b[LogANAHeaderSize:]
	for range groups {
		if err := need("ANA group descriptor", b, LogANAGroupSize); err != nil {
			return ANALog{}, err
		}
		g := ANAGroup{
			ID:          binary.LittleEndian.Uint32(b),
			ChangeCount: binary.LittleEndian.Uint64(b[8:]),
			State:       ANAState(b[16] & 0xF),
		}
		n := uint64(binary.LittleEndian.Uint32(b[4:]))
		b = b[LogANAGroupSize:]
		if n*4 > uint64(len(b)) {
			return ANALog{}, fmt.Errorf("nvme: ANA group %d claims %d namespaces, the log ends before them", g.ID, n)
		}
		for i := range int(n) {
			g.NSIDs = append(g.NSIDs, binary.LittleEndian.Uint32(b[4*i:]))
		}
		b = b[4*n:]
		log.Groups = append(log.Groups, g)
	}
	return log, nil
}

// Append appends the log.
func (log ANALog) Append(b []byte) []byte {
	b, p := grow(b, LogANAHeaderSize)
	binary.LittleEndian.PutUint64(p, log.ChangeCount)
	binary.LittleEndian.PutUint16(p[8:], uint16(len(log.Groups)))
	for _, g := range log.Groups {
		b, p = grow(b, LogANAGroupSize)
		binary.LittleEndian.PutUint32(p, g.ID)
		binary.LittleEndian.PutUint32(p[4:], uint32(len(g.NSIDs)))
		binary.LittleEndian.PutUint64(p[8:], g.ChangeCount)
		p[16] = byte(g.State)
		for _, id := range g.NSIDs {
			b = binary.LittleEndian.AppendUint32(b, id)
		}
	}
	return b
}
