package nvme

// IdentifyController is the Identify Controller data structure, CNS 01h (Base
// 5.17.2.1). Names are the specification's; the offsets stand in layout.
type IdentifyController struct {
	VID       uint16 // PCI vendor
	SSVID     uint16
	SN        string // serial number, up to 20 characters
	MN        string // model number, up to 40 characters
	FR        string // firmware revision, up to 8 characters
	RAB       uint8
	IEEE      [3]byte
	CMIC      uint8 // bit 3: ANA reporting
	MDTS      uint8 // power of two in units of CAP.MPSMIN; 0: no limit
	CNTLID    uint16
	VER       Version
	RTD3R     uint32
	RTD3E     uint32
	OAES      uint32 // optional asynchronous events: bit 8 namespaces, 11 ANA, 31 discovery
	CTRATT    uint32 // bit 0: 128-bit host identifier
	RRLS      uint16
	CNTRLTYPE uint8 // 1 I/O, 2 discovery, 3 administrative
	FGUID     [16]byte
	CRDT      [3]uint16 // command retry delays, 100 ms
	NVMSR     uint8
	VWCI      uint8
	MEC       uint8
	OACS      uint16 // optional admin commands
	ACL       uint8  // abort limit, 0-based
	AERL      uint8  // asynchronous event request limit, 0-based
	FRMW      uint8
	LPA       uint8 // log page attributes
	ELPE      uint8 // error log entries, 0-based
	NPSS      uint8 // power states, 0-based
	AVSCC     uint8
	APSTA     uint8
	WCTEMP    uint16 // K
	CCTEMP    uint16 // K
	MTFA      uint16
	HMPRE     uint32
	HMMIN     uint32
	TNVMCAP   Uint128 // bytes
	UNVMCAP   Uint128 // bytes
	RPMBS     uint32
	EDSTT     uint16
	DSTO      uint8
	FWUG      uint8
	KAS       uint16 // keep-alive granularity, 100 ms; 0: no keep-alive
	HCTMA     uint16
	MNTMT     uint16
	MXTMT     uint16
	SANICAP   uint32
	HMMINDS   uint32
	HMMAXD    uint16
	NSETIDMAX uint16
	ENDGIDMAX uint16
	ANATT     uint8 // seconds
	ANACAP    uint8
	ANAGRPMAX uint32
	NANAGRPID uint32
	PELS      uint32
	DOMAINID  uint16
	MEGCAP    Uint128
	CQT       uint16 // command quiesce time after a lost connection, ms
	SQES      uint8  // minimum in 3:0, maximum in 7:4, powers of two
	CQES      uint8
	MAXCMD    uint16 // 1-based; 0: not reported
	NN        uint32 // highest valid namespace ID
	ONCS      uint16 // optional NVM commands
	FUSES     uint16
	FNA       uint8
	VWC       uint8  // bit 0: volatile write cache present
	AWUN      uint16 // blocks, 0-based
	AWUPF     uint16 // blocks, 0-based
	ICSVSCC   uint8
	NWPC      uint8
	ACWU      uint16
	CDFS      uint16
	SGLS      uint32
	MNAN      uint32 // most namespaces that can be attached
	MAXDNA    Uint128
	MAXCNA    uint32
	SubNQN    string
	IOCCSZ    uint32 // I/O command capsule, 16 bytes
	IORCSZ    uint32 // I/O response capsule, 16 bytes
	ICDOFF    uint16 // in-capsule data offset, 16 bytes
	FCATT     uint8  // bit 0: static controller
	MSDBD     uint8  // SGL descriptors in a capsule
	OFCS      uint16 // bit 0: Disconnect
	DCTYPE    uint8
	PSD       [32]PowerState
}

// Bits of ONCS (NVM 4.1.5.2; Base figure "Identify Controller").
const (
	ONCSCompare            = 1 << 0
	ONCSWriteUncorrectable = 1 << 1
	ONCSDatasetManagement  = 1 << 2
	ONCSWriteZeroes        = 1 << 3
	ONCSSaveSelect         = 1 << 4
	ONCSReservations       = 1 << 5
	ONCSTimestamp          = 1 << 6
	ONCSVerify             = 1 << 7
	ONCSCopy               = 1 << 8
)

// Bits of OAES, which are also those of the Asynchronous Event Configuration
// feature.
const (
	EventsNamespace uint32 = 1 << 8
	EventsFirmware  uint32 = 1 << 9
	EventsANA       uint32 = 1 << 11
	EventsDiscovery uint32 = 1 << 31
)

// Bits of SGLS (Base figure "Identify Controller", bytes 539:536).
const (
	SGLSSupported uint32 = 1 << 0  // with no alignment rule; bits 1:0 are 10b with dword alignment
	SGLSKeyed     uint32 = 1 << 2  // keyed data block descriptors
	SGLSInCapsule uint32 = 1 << 20 // address field as an offset: in-capsule data
	SGLSTransport uint32 = 1 << 21
	sglsMask      uint32 = 3
)

// Bits of other fields, and the values of CNTRLTYPE.
const (
	CMICMultiPort       uint8  = 1 << 0
	CMICMultiController uint8  = 1 << 1
	CMICANA             uint8  = 1 << 3
	VWCPresent          uint8  = 1 << 0
	VWCFlushAll         uint8  = 3 << 1 // Flush takes the broadcast namespace ID
	CTRATTHostID128     uint32 = 1 << 0
	CTRATTTrafficKeep   uint32 = 1 << 6 // traffic based keep alive
	ControllerIO        uint8  = 1
	ControllerDiscovery uint8  = 2
	ControllerAdmin     uint8  = 3
)

// SupportsSGL says whether the controller takes SGLs for NVM commands at all.
func (c *IdentifyController) SupportsSGL() bool { return c.SGLS&sglsMask != 0 }

// SupportsKeyedSGL says whether keyed descriptors may be used.
func (c *IdentifyController) SupportsKeyedSGL() bool { return c.SGLS&SGLSKeyed != 0 }

// SupportsANA says whether asymmetric namespace access is reported (CMIC bit 3).
func (c *IdentifyController) SupportsANA() bool { return c.CMIC&CMICANA != 0 }

// VolatileWriteCache says whether a write needs a Flush to be durable.
func (c *IdentifyController) VolatileWriteCache() bool { return c.VWC&VWCPresent != 0 }

// InCapsuleBytes returns the bytes of data that an I/O command capsule has room
// for; 0 if the controller takes none.
func (c *IdentifyController) InCapsuleBytes() int {
	if c.SGLS&SGLSInCapsule == 0 || c.IOCCSZ <= 4 {
		return 0
	}
	return int(min(c.IOCCSZ, 1<<20))*16 - CommandSize
}

// MaxTransfer returns the most bytes of one command's data, 0 if there is no
// limit. pageSize is [Capabilities.MinPageSize].
func (c *IdentifyController) MaxTransfer(pageSize int) uint64 {
	if c.MDTS == 0 || c.MDTS > 32 {
		return 0
	}
	return uint64(pageSize) << c.MDTS
}

func (c *IdentifyController) layout(l layout) {
	l.u16(0, &c.VID)
	l.u16(2, &c.SSVID)
	l.ascii(4, 20, &c.SN)
	l.ascii(24, 40, &c.MN)
	l.ascii(64, 8, &c.FR)
	l.u8(72, &c.RAB)
	l.bytes(73, c.IEEE[:])
	l.u8(76, &c.CMIC)
	l.u8(77, &c.MDTS)
	l.u16(78, &c.CNTLID)
	l.u32(80, (*uint32)(&c.VER))
	l.u32(84, &c.RTD3R)
	l.u32(88, &c.RTD3E)
	l.u32(92, &c.OAES)
	l.u32(96, &c.CTRATT)
	l.u16(100, &c.RRLS)
	l.u8(111, &c.CNTRLTYPE)
	l.bytes(112, c.FGUID[:])
	for i := range c.CRDT {
		l.u16(128+2*i, &c.CRDT[i])
	}
	l.u8(253, &c.NVMSR)
	l.u8(254, &c.VWCI)
	l.u8(255, &c.MEC)
	l.u16(256, &c.OACS)
	l.u8(258, &c.ACL)
	l.u8(259, &c.AERL)
	l.u8(260, &c.FRMW)
	l.u8(261, &c.LPA)
	l.u8(262, &c.ELPE)
	l.u8(263, &c.NPSS)
	l.u8(264, &c.AVSCC)
	l.u8(265, &c.APSTA)
	l.u16(266, &c.WCTEMP)
	l.u16(268, &c.CCTEMP)
	l.u16(270, &c.MTFA)
	l.u32(272, &c.HMPRE)
	l.u32(276, &c.HMMIN)
	l.u128(280, &c.TNVMCAP)
	l.u128(296, &c.UNVMCAP)
	l.u32(312, &c.RPMBS)
	l.u16(316, &c.EDSTT)
	l.u8(318, &c.DSTO)
	l.u8(319, &c.FWUG)
	l.u16(320, &c.KAS)
	l.u16(322, &c.HCTMA)
	l.u16(324, &c.MNTMT)
	l.u16(326, &c.MXTMT)
	l.u32(328, &c.SANICAP)
	l.u32(332, &c.HMMINDS)
	l.u16(336, &c.HMMAXD)
	l.u16(338, &c.NSETIDMAX)
	l.u16(340, &c.ENDGIDMAX)
	l.u8(342, &c.ANATT)
	l.u8(343, &c.ANACAP)
	l.u32(344, &c.ANAGRPMAX)
	l.u32(348, &c.NANAGRPID)
	l.u32(352, &c.PELS)
	l.u16(356, &c.DOMAINID)
	l.u128(368, &c.MEGCAP)
	l.u16(386, &c.CQT)
	l.u8(512, &c.SQES)
	l.u8(513, &c.CQES)
	l.u16(514, &c.MAXCMD)
	l.u32(516, &c.NN)
	l.u16(520, &c.ONCS)
	l.u16(522, &c.FUSES)
	l.u8(524, &c.FNA)
	l.u8(525, &c.VWC)
	l.u16(526, &c.AWUN)
	l.u16(528, &c.AWUPF)
	l.u8(530, &c.ICSVSCC)
	l.u8(531, &c.NWPC)
	l.u16(532, &c.ACWU)
	l.u16(534, &c.CDFS)
	l.u32(536, &c.SGLS)
	l.u32(540, &c.MNAN)
	l.u128(544, &c.MAXDNA)
	l.u32(560, &c.MAXCNA)
	l.nul(768, 256, &c.SubNQN)
	l.u32(1792, &c.IOCCSZ)
	l.u32(1796, &c.IORCSZ)
	l.u16(1800, &c.ICDOFF)
	l.u8(1802, &c.FCATT)
	l.u8(1803, &c.MSDBD)
	l.u16(1804, &c.OFCS)
	l.u8(1806, &c.DCTYPE)
	for i := range c.PSD {
		c.PSD[i].layout(layout{l.b[2048+32*i:], l.write})
	}
}

// Append appends the 4096 bytes.
func (c *IdentifyController) Append(b []byte) []byte {
	b, p := grow(b, IdentifySize)
	c.layout(layout{p, true})
	return b
}

// ParseIdentifyController decodes the first 4096 bytes of b.
func ParseIdentifyController(b []byte) (*IdentifyController, error) {
	if err := need("Identify Controller data", b, IdentifySize); err != nil {
		return nil, err
	}
	c := new(IdentifyController)
	c.layout(layout{b, false})
	return c, nil
}

// PowerState is a power state descriptor of 32 bytes (Base figure "Identify –
// Power State Descriptor").
type PowerState struct {
	MP    uint16 // maximum power, 0.01 W, or 0.0001 W when Flags bit 0 is set
	Flags uint8  // bit 0 MXPS, bit 1 non-operational
	ENLAT uint32 // us
	EXLAT uint32 // us
	RRT   uint8
	RRL   uint8
	RWT   uint8
	RWL   uint8
	IDLP  uint16
	IPS   uint8
	ACTP  uint16
	APS   uint8
}

func (p *PowerState) layout(l layout) {
	l.u16(0, &p.MP)
	l.u8(3, &p.Flags)
	l.u32(4, &p.ENLAT)
	l.u32(8, &p.EXLAT)
	l.u8(12, &p.RRT)
	l.u8(13, &p.RRL)
	l.u8(14, &p.RWT)
	l.u8(15, &p.RWL)
	l.u16(16, &p.IDLP)
	l.u8(18, &p.IPS)
	l.u16(20, &p.ACTP)
	l.u8(22, &p.APS)
}
