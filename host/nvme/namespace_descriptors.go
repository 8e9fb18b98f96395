package nvme

// NamespaceIDs is what the Namespace Identification Descriptor list, CNS 03h,
// says about a namespace (Base 5.17.2.4). On the wire it is a row of
// descriptors: 0 type, 1 length, 2 reserved, 4 value; length 0 ends it.
type NamespaceIDs struct {
	EUI64  EUI64
	NGUID  NGUID
	UUID   UUID
	CSI    uint8
	HasCSI bool
}

// Descriptor types.
const (
	nidtEUI64 = 1
	nidtNGUID = 2
	nidtUUID  = 3
	nidtCSI   = 4
)

// ParseNamespaceIDs decodes the list. Descriptors of an unknown type or an odd
// length are skipped, and one that leaves the list ends it.
func ParseNamespaceIDs(b []byte) (n NamespaceIDs, err error) {
	if err := need("Namespace Identification Descriptor list", b, IdentifySize); err != nil {
		return n, err
	}
	b = b[:IdentifySize]
	for len(b) >= 4 {
		typ, length := b[0], int(b[1])
		if length == 0 || 4+length > len(b) {
			break
		}
		v := b[4 : 4+length]
		switch {
		case typ == nidtEUI64 && length == 8:
			copy(n.EUI64[:], v)
		case typ == nidtNGUID && length == 16:
			copy(n.NGUID[:], v)
		case typ == nidtUUID && length == 16:
			copy(n.UUID[:], v)
		case typ == nidtCSI && length == 1:
			n.CSI, n.HasCSI = v[0], true
		}
		b = b[4+length:]
	}
	return n, nil
}

// Append appends the 4096 bytes, with a descriptor for each ID that is set.
func (n NamespaceIDs) Append(b []byte) []byte {
	b, p := grow(b, IdentifySize)
	put := func(typ byte, v []byte) {
		p[0], p[1] = typ, byte(len(v))
		copy(p[4:], v)
		p = p[4+len(v):]
	}
	if n.EUI64 != (EUI64{}) {
		put(nidtEUI64, n.EUI64[:])
	}
	if n.NGUID != (NGUID{}) {
		put(nidtNGUID, n.NGUID[:])
	}
	if n.UUID != (UUID{}) {
		put(nidtUUID, n.UUID[:])
	}
	if n.HasCSI {
		put(nidtCSI, []byte{n.CSI})
	}
	return b
}
