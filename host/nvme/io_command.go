package nvme

import "math"

// MaxBlocks is the most logical blocks that one Read, Write or Write Zeroes
// names: its 16-bit count is 0-based.
const MaxBlocks = 1 << 16

// Bits of CDW12 in Read, Write and Write Zeroes (NVM 3.2.4, 3.2.6, 3.2.8).
const (
	cdw12DEAC = 1 << 25
	cdw12FUA  = 1 << 30
)

// FillRead fills a Read of blocks logical blocks (1 to [MaxBlocks]) from slba.
func (c *Command) FillRead(nsid uint32, slba uint64, blocks uint32) {
	c.fill(IORead, nsid)
	c.setRange(slba, blocks)
}

// FillWrite fills a Write of blocks logical blocks (1 to [MaxBlocks]) at slba.
// With fua the data are on stable media when the command completes.
func (c *Command) FillWrite(nsid uint32, slba uint64, blocks uint32, fua bool) {
	c.fill(IOWrite, nsid)
	c.setRange(slba, blocks)
	c.orDW(12, cdw12FUA, fua)
}

// FillWriteZeroes fills a Write Zeroes of blocks logical blocks (1 to
// [MaxBlocks]) at slba. With deallocate the controller may free them, as long as
// they then read as zeros.
func (c *Command) FillWriteZeroes(nsid uint32, slba uint64, blocks uint32, deallocate, fua bool) {
	c.fill(IOWriteZeroes, nsid)
	c.setRange(slba, blocks)
	c.orDW(12, cdw12DEAC, deallocate)
	c.orDW(12, cdw12FUA, fua)
}

// FillFlush fills a Flush; nsid may be [AllNamespaces] (Base 7.1).
func (c *Command) FillFlush(nsid uint32) { c.fill(IOFlush, nsid) }

// FillDatasetManagement fills a Dataset Management with AD (deallocate) for
// 1 to [MaxRanges] ranges, which are the command's data (NVM 3.2.3).
func (c *Command) FillDatasetManagement(nsid uint32, ranges int) {
	c.fill(IODatasetManagement, nsid)
	c.SetDW(10, uint32(ranges-1)&0xFF)
	c.SetDW(11, 1<<2)
}

func (c *Command) setRange(slba uint64, blocks uint32) {
	c.setU64(40, slba)
	c.SetDW(12, (blocks-1)&0xFFFF)
}

func (c *Command) orDW(n int, bits uint32, on bool) {
	if on {
		c.SetDW(n, c.DW(n)|bits)
	}
}

// SLBA returns the first logical block of a Read, Write, Compare, Verify or
// Write Zeroes.
func (c *Command) SLBA() uint64 { return c.u64(40) }

// Blocks returns the number of logical blocks, 1-based.
func (c *Command) Blocks() uint32 { return c.DW(12)&0xFFFF + 1 }

// FUA says whether the command asks for stable media.
func (c *Command) FUA() bool { return c.DW(12)&cdw12FUA != 0 }

// Deallocate says whether a Write Zeroes may deallocate.
func (c *Command) Deallocate() bool { return c.DW(12)&cdw12DEAC != 0 }

// ProtectionInfo returns PRINFO, bits 29:26 of CDW12.
func (c *Command) ProtectionInfo() uint8 { return uint8(c.DW(12) >> 26 & 0xF) }

// Ranges returns the number of ranges of a Dataset Management, 1-based.
func (c *Command) Ranges() int { return int(c.DW(10)&0xFF) + 1 }

// DatasetDeallocate says whether a Dataset Management has AD set.
func (c *Command) DatasetDeallocate() bool { return c.DW(11)&(1<<2) != 0 }

// AllNamespaces is the broadcast namespace ID (Base 3.2.1).
const AllNamespaces uint32 = math.MaxUint32
