package nvme

// NVMController is the NVM command set's Identify Controller data structure,
// CNS 06h with CSI 0 (NVM 4.1.5.4). A limit of 0 is none.
type NVMController struct {
	VSL   uint8  // Verify, as MDTS counts
	WZSL  uint8  // Write Zeroes, as MDTS counts
	WUSL  uint8  // Write Uncorrectable, as MDTS counts
	DMRL  uint8  // Dataset Management: ranges a command
	DMRSL uint32 // Dataset Management: blocks a range
	DMSL  uint64 // Dataset Management: blocks a command
}

func (c *NVMController) layout(l layout) {
	l.u8(0, &c.VSL)
	l.u8(1, &c.WZSL)
	l.u8(2, &c.WUSL)
	l.u8(3, &c.DMRL)
	l.u32(4, &c.DMRSL)
	l.u64(8, &c.DMSL)
}

// Append appends the 4096 bytes.
func (c NVMController) Append(b []byte) []byte {
	b, p := grow(b, IdentifySize)
	c.layout(layout{p, true})
	return b
}

// ParseNVMController decodes the first 4096 bytes of b.
func ParseNVMController(b []byte) (c NVMController, err error) {
	if err := need("NVM command set Identify Controller data", b, IdentifySize); err != nil {
		return c, err
	}
	c.layout(layout{b, false})
	return c, nil
}

// NVMNamespace is the NVM command set's Identify Namespace data structure, CNS
// 05h with CSI 0 (NVM 4.1.5.3), as far as protection information goes.
type NVMNamespace struct {
	LBSTM uint64 // logical block storage tag mask
	PIC   uint8  // protection information capabilities
	ELBAF [64]uint32
}

func (n *NVMNamespace) layout(l layout) {
	l.u64(0, &n.LBSTM)
	l.u8(8, &n.PIC)
	for i := range n.ELBAF {
		l.u32(12+4*i, &n.ELBAF[i])
	}
}

// Append appends the 4096 bytes.
func (n NVMNamespace) Append(b []byte) []byte {
	b, p := grow(b, IdentifySize)
	n.layout(layout{p, true})
	return b
}

// ParseNVMNamespace decodes the first 4096 bytes of b.
func ParseNVMNamespace(b []byte) (n NVMNamespace, err error) {
	if err := need("NVM command set Identify Namespace data", b, IdentifySize); err != nil {
		return n, err
	}
	n.layout(layout{b, false})
	return n, nil
}
