package nvme

import (
	"encoding/binary"
	"fmt"
)

// MaxNamespaceList is the most namespace IDs in one namespace list.
const MaxNamespaceList = 1024

// ParseNamespaceList decodes a namespace list (Base 4.4.2), the data of
// Identify CNS 02h: up to 1024 IDs in rising order, ended by a 0. A list whose
// IDs do not rise, or that starts at or below after, would loop whoever asks
// for the rest, and is refused.
func ParseNamespaceList(b []byte, after uint32) ([]uint32, error) {
	if err := need("namespace list", b, IdentifySize); err != nil {
		return nil, err
	}
	var ids []uint32
	for off := 0; off < IdentifySize; off += 4 {
		id := binary.LittleEndian.Uint32(b[off:])
		if id == 0 {
			break
		}
		if id <= after || id == AllNamespaces {
			return nil, fmt.Errorf("nvme: namespace list has ID %#x after %#x", id, after)
		}
		ids = append(ids, id)
		after = id
	}
	return ids, nil
}

// AppendNamespaceList appends 4096 bytes with the first 1024 of ids.
func AppendNamespaceList(b []byte, ids []uint32) []byte {
	b, p := grow(b, IdentifySize)
	for i, id := range ids[:min(len(ids), MaxNamespaceList)] {
		binary.LittleEndian.PutUint32(p[4*i:], id)
	}
	return b
}

// ChangedNamespaces is the Changed Attached Namespace List, log page 04h (Base
// 5.16.1.5).
type ChangedNamespaces struct {
	Overflow bool // more changed than fit: look at all of them
	IDs      []uint32
}

// ParseChangedNamespaces decodes the log page.
func ParseChangedNamespaces(b []byte) (c ChangedNamespaces, err error) {
	if err := need("Changed Namespace List", b, IdentifySize); err != nil {
		return c, err
	}
	for off := 0; off < IdentifySize; off += 4 {
		switch id := binary.LittleEndian.Uint32(b[off:]); {
		case id == 0:
			return c, nil
		case id == AllNamespaces:
			return ChangedNamespaces{Overflow: true}, nil
		default:
			c.IDs = append(c.IDs, id)
		}
	}
	return c, nil
}

// Append appends the log page's 4096 bytes.
func (c ChangedNamespaces) Append(b []byte) []byte {
	if c.Overflow || len(c.IDs) > MaxNamespaceList {
		return AppendNamespaceList(b, []uint32{AllNamespaces})
	}
	return AppendNamespaceList(b, c.IDs)
}
