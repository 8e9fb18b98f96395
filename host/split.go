package host

import (
	"math"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// writes says whether an operation changes data. A Flush does not: it may run twice, and at any time.
func writes(op blockdev.Op) bool {
	return op == blockdev.Write || op == blockdev.Discard || op == blockdev.WriteZeroes
}

// geometry is how to drive a namespace: immutable, replaced as a whole.
type geometry struct {
	info blockdev.Info
	err  error // no I/O, for this reason
	// paused, if set, is why I/O waits, until then, if that is not zero, and fails from then on. Never together with err.
	paused error
	until  time.Time
	nsid   uint32
	// shift is the block size as a power of two; boundary, in bytes, is where reads and writes are better not
	// crossed, 0 if nowhere.
	shift      uint8
	boundary   int64
	zeroBlocks uint32 // most blocks of a Write Zeroes
	// Limits of a Dataset Management: ranges, blocks a range, blocks in all.
	ranges      int
	rangeBlocks uint32
	rangesTotal uint64
	zeroUnmaps  bool // Write Zeroes may deallocate
}

// check says whether r ends without a command, and with which error.
func (g *geometry) check(r *blockdev.Request) (end bool, err error) {
	if g.err != nil {
		return true, g.err
	}
	if err := g.info.Check(r); err != nil {
		return true, err
	}
	return r.Op == blockdev.Flush && !g.info.WriteCache, nil // nothing is volatile
}

// fill makes c the next part of r: n bytes of it (1 for a Flush). more says that something is left then. discard, if
// not 0, is the most bytes to deallocate at once.
func (g *geometry) fill(c *command, r *blockdev.Request, discard int64) (n int64, more bool) {
	cmd := (*nvme.Command)(&c.tr.Command)
	at := r.Private.Progress
	lba := uint64(r.Off+at) >> g.shift
	c.tr.Data, c.tr.Direction, c.writes = nil, transport.None, writes(r.Op)
	switch r.Op {
	case blockdev.Read, blockdev.Write:
		n = min(int64(len(r.Data))-at, int64(g.info.MaxTransfer))
		if g.boundary > 0 {
			n = min(n, g.boundary-(r.Off+at)%g.boundary)
		}
		c.tr.Data = r.Data[at : at+n]
		if r.Op == blockdev.Read {
			c.tr.Direction = transport.ToHost
			cmd.FillRead(g.nsid, lba, uint32(n>>g.shift))
		} else {
			c.tr.Direction = transport.ToController
			cmd.FillWrite(g.nsid, lba, uint32(n>>g.shift), r.Flags&blockdev.FUA != 0)
		}
		return n, at+n < int64(len(r.Data))
	case blockdev.WriteZeroes:
		n = min(r.Len-at, int64(g.zeroBlocks)<<g.shift)
		cmd.FillWriteZeroes(g.nsid, lba, uint32(n>>g.shift), g.zeroUnmaps && r.Flags&blockdev.NoUnmap == 0, r.Flags&blockdev.FUA != 0)
	case blockdev.Discard:
		c.off, c.left = r.Off+at, r.Len-at
		g.fillRanges(c, discard)
		n, c.left = c.piece, c.piece
	default:
		cmd.FillFlush(g.nsid)
		return 1, false
	}
	return n, at+n < r.Len
}

// fillRanges makes c a deallocation of as much of what it has left as one command can name and most, in bytes, if not
// 0, allows: c.piece, at least a block.
func (g *geometry) fillRanges(c *command, most int64) {
	left := min(uint64(c.left)>>g.shift, g.rangesTotal)
	if most > 0 {
		left = min(left, max(uint64(most)>>g.shift, 1))
	}
	lba := uint64(c.off) >> g.shift
	var count int
	c.piece = 0
	for left > 0 && count < g.ranges {
		blocks := min(left, uint64(g.rangeBlocks))
		nvme.Range{Blocks: uint32(blocks), SLBA: lba}.Put(c.ranges[count*nvme.RangeSize:])
		count++
		lba, left, c.piece = lba+blocks, left-blocks, c.piece+int64(blocks)<<g.shift
	}
	(*nvme.Command)(&c.tr.Command).FillDatasetManagement(g.nsid, count)
	c.tr.Data, c.tr.Direction = c.ranges[:count*nvme.RangeSize], transport.ToController
}

// maxUnlimited bounds a transfer when the controller does not: well inside a keyed SGL's 24-bit length.
const maxUnlimited = 8 << 20

// maxDiscard bounds what one Dataset Management covers when the controller does not, in bytes: a command
// that takes longer than the I/O timeout would end the connection.
const maxDiscard = 64 << 30

// newGeometry says how to drive namespace nsid, as it identified itself, on a controller with limits l.
// Errors: a namespace that cannot be driven safely.
func newGeometry(l *limits, nsid uint32, id *nvme.IdentifyNamespace) (*geometry, error) {
	format := id.Format()
	size, ok := id.Bytes()
	switch {
	case format.LBADS < 9 || format.LBADS > 16:
		return nil, refusedf("namespace %d has blocks of 2^%d bytes; from 512 to 65536 can be used", nsid, format.LBADS)
	case format.MS != 0:
		return nil, refusedf("namespace %d has %d bytes of metadata a block, which is not supported", nsid, format.MS)
	case id.DPS&7 != 0:
		return nil, refusedf("namespace %d has end-to-end protection, which is not supported", nsid)
	case !ok:
		return nil, refusedf("namespace %d claims %d blocks, more than 63 bits of bytes", nsid, id.NSZE)
	}
	g := &geometry{nsid: nsid, shift: format.LBADS}
	bs := int64(1) << g.shift
	maxTransfer := min(l.maxTransfer, nvme.MaxBlocks*bs)
	if maxTransfer < bs {
		return nil, refusedf("namespace %d has blocks of %d bytes, the controller takes only %d at once", nsid, bs, l.maxTransfer)
	}
	g.info = blockdev.Info{
		Size:        int64(size),
		BlockSize:   int(bs),
		MaxTransfer: int(maxTransfer &^ (bs - 1)),
		ReadOnly:    id.WriteProtected(),
		WriteCache:  l.writeCache,
		Discard:     l.discard,
		WriteZeroes: l.writeZeroes,
		// DLFEAT 2:0 (NVM 4.1.5.1)
		DiscardZeroes: id.DLFEAT&7 == 1,
	}
	if id.NSFEAT&(1<<4) != 0 { // NPWG is valid with others; 0-based
		g.info.OptimalIO = int((int64(id.NPWG) + 1) << g.shift)
	}
	if b := int64(id.NOIOB) << g.shift; id.NOIOB != 0 {
		g.boundary = b
		g.info.OptimalIO = max(g.info.OptimalIO, int(b))
	}
	g.zeroUnmaps = id.DLFEAT&(1<<3) != 0
	g.zeroBlocks = nvme.MaxBlocks
	if l.maxZeroes > 0 {
		g.zeroBlocks = uint32(min(nvme.MaxBlocks, max(l.maxZeroes>>g.shift, 1)))
	}
	g.ranges = nvme.MaxRanges
	if l.ranges > 0 {
		g.ranges = min(g.ranges, int(l.ranges))
	}
	g.rangeBlocks, g.rangesTotal = l.rangeBlocks, l.rangesTotal
	if g.rangeBlocks == 0 {
		g.rangeBlocks = math.MaxUint32
	}
	if soft := uint64(maxDiscard) >> g.shift; g.rangesTotal == 0 || g.rangesTotal > soft {
		g.rangesTotal = soft
	}
	return g, nil
}
