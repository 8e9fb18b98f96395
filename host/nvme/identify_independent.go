package nvme

// IndependentNamespace is the I/O Command Set Independent Identify Namespace
// data structure, CNS 08h (Base 5.17.2.8).
type IndependentNamespace struct {
	NSFEAT   uint8
	NMIC     uint8
	RESCAP   uint8
	FPI      uint8
	ANAGRPID uint32
	NSATTR   uint8
	NVMSETID uint16
	ENDGID   uint16
	NSTAT    uint8 // bit 0: ready
}

func (n *IndependentNamespace) layout(l layout) {
	l.u8(0, &n.NSFEAT)
	l.u8(1, &n.NMIC)
	l.u8(2, &n.RESCAP)
	l.u8(3, &n.FPI)
	l.u32(4, &n.ANAGRPID)
	l.u8(8, &n.NSATTR)
	l.u16(10, &n.NVMSETID)
	l.u16(12, &n.ENDGID)
	l.u8(14, &n.NSTAT)
}

// Append appends the 4096 bytes.
func (n IndependentNamespace) Append(b []byte) []byte {
	b, p := grow(b, IdentifySize)
	n.layout(layout{p, true})
	return b
}

// ParseIndependentNamespace decodes the first 4096 bytes of b.
func ParseIndependentNamespace(b []byte) (n IndependentNamespace, err error) {
	if err := need("Identify Namespace data", b, IdentifySize); err != nil {
		return n, err
	}
	n.layout(layout{b, false})
	return n, nil
}
