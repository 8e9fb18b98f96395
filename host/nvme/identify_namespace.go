package nvme

// IdentifyNamespace is the Identify Namespace data structure of the NVM command
// set, CNS 00h (NVM 4.1.5.1). Sizes are in logical blocks unless said otherwise.
type IdentifyNamespace struct {
	NSZE     uint64
	NCAP     uint64
	NUSE     uint64
	NSFEAT   uint8 // bit 0 thin, 2 deallocated error, 3 IDs never reused, 4 NPWG and so on are valid
	NLBAF    uint8 // LBA formats, 0-based
	FLBAS    uint8 // format in use: 3:0 and 6:5; bit 4 metadata at the end of the data
	MC       uint8
	DPC      uint8
	DPS      uint8
	NMIC     uint8 // bit 0: may be attached to several controllers
	RESCAP   uint8
	FPI      uint8
	DLFEAT   uint8 // what deallocated blocks read as in 2:0 (1: zeros), bit 3: Write Zeroes deallocates
	NAWUN    uint16
	NAWUPF   uint16
	NACWU    uint16
	NABSN    uint16
	NABO     uint16
	NABSPF   uint16
	NOIOB    uint16
	NVMCAP   Uint128 // bytes
	NPWG     uint16  // 0-based, as are the three that follow
	NPWA     uint16
	NPDG     uint16
	NPDA     uint16
	NOWS     uint16
	MSSRL    uint16
	MCL      uint32
	MSRC     uint8
	NULBAF   uint8
	ANAGRPID uint32
	NSATTR   uint8 // bit 0: write protected
	NVMSETID uint16
	ENDGID   uint16
	NGUID    NGUID
	EUI64    EUI64
	LBAF     [64]LBAFormat
}

// LBAFormat is one LBA format, 4 bytes (NVM figure "LBA Format Data Structure").
type LBAFormat struct {
	MS    uint16 // metadata bytes a block
	LBADS uint8  // block size as a power of two; 0: not available
	RP    uint8  // relative performance, 0 best to 3
}

func (f *LBAFormat) layout(l layout) {
	l.u16(0, &f.MS)
	l.u8(2, &f.LBADS)
	l.u8(3, &f.RP)
}

// NSAttrWriteProtected is the bit of NSATTR of a write protected namespace.
const NSAttrWriteProtected uint8 = 1 << 0

// FormatIndex returns which LBA format is in use. Its upper two bits count
// only where there are more than 16 formats.
func (n *IdentifyNamespace) FormatIndex() int {
	i := int(n.FLBAS & 0xF)
	if int(n.NLBAF)+int(n.NULBAF)+1 > 16 {
		i |= int(n.FLBAS>>5&3) << 4
	}
	return i
}

// Format returns the LBA format in use.
func (n *IdentifyNamespace) Format() LBAFormat { return n.LBAF[n.FormatIndex()] }

// BlockSize returns the bytes of data in a logical block, 0 if the format is
// not one that can be used.
func (n *IdentifyNamespace) BlockSize() uint32 {
	if s := n.Format().LBADS; s >= 9 && s < 32 {
		return 1 << s
	}
	return 0
}

// Bytes returns the namespace's size in bytes, and false if that is no number
// of 63 bits or the block size is unusable.
func (n *IdentifyNamespace) Bytes() (uint64, bool) {
	bs := n.BlockSize()
	if bs == 0 || n.NSZE > (1<<63-1)/uint64(bs) {
		return 0, false
	}
	return n.NSZE * uint64(bs), true
}

// WriteProtected returns bit 0 of NSATTR.
func (n *IdentifyNamespace) WriteProtected() bool { return n.NSATTR&NSAttrWriteProtected != 0 }

func (n *IdentifyNamespace) layout(l layout) {
	l.u64(0, &n.NSZE)
	l.u64(8, &n.NCAP)
	l.u64(16, &n.NUSE)
	l.u8(24, &n.NSFEAT)
	l.u8(25, &n.NLBAF)
	l.u8(26, &n.FLBAS)
	l.u8(27, &n.MC)
	l.u8(28, &n.DPC)
	l.u8(29, &n.DPS)
	l.u8(30, &n.NMIC)
	l.u8(31, &n.RESCAP)
	l.u8(32, &n.FPI)
	l.u8(33, &n.DLFEAT)
	l.u16(34, &n.NAWUN)
	l.u16(36, &n.NAWUPF)
	l.u16(38, &n.NACWU)
	l.u16(40, &n.NABSN)
	l.u16(42, &n.NABO)
	l.u16(44, &n.NABSPF)
	l.u16(46, &n.NOIOB)
	l.u128(48, &n.NVMCAP)
	l.u16(64, &n.NPWG)
	l.u16(66, &n.NPWA)
	l.u16(68, &n.NPDG)
	l.u16(70, &n.NPDA)
	l.u16(72, &n.NOWS)
	l.u16(74, &n.MSSRL)
	l.u32(76, &n.MCL)
	l.u8(80, &n.MSRC)
	l.u8(82, &n.NULBAF)
	l.u32(92, &n.ANAGRPID)
	l.u8(99, &n.NSATTR)
	l.u16(100, &n.NVMSETID)
	l.u16(102, &n.ENDGID)
	l.bytes(104, n.NGUID[:])
	l.bytes(120, n.EUI64[:])
	for i := range n.LBAF {
		n.LBAF[i].layout(layout{l.b[128+4*i:], l.write})
	}
}

// Append appends the 4096 bytes.
func (n *IdentifyNamespace) Append(b []byte) []byte {
	b, p := grow(b, IdentifySize)
	n.layout(layout{p, true})
	return b
}

// ParseIdentifyNamespace decodes the first 4096 bytes of b. A structure of
// zeros is what a controller returns for a namespace that is not there.
func ParseIdentifyNamespace(b []byte) (*IdentifyNamespace, error) {
	if err := need("Identify Namespace data", b, IdentifySize); err != nil {
		return nil, err
	}
	n := new(IdentifyNamespace)
	n.layout(layout{b, false})
	return n, nil
}
