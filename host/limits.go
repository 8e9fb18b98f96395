package host

import (
	"fmt"

	"farblk/host/nvme"
)

// RefusedError is a controller or namespace that works but that this host cannot drive safely.
type RefusedError struct{ Reason string }

// Error is the reason.
func (e *RefusedError) Error() string { return "refused: " + e.Reason }

func refusedf(format string, a ...any) error { return &RefusedError{fmt.Sprintf(format, a...)} }

// limits is what a controller allows.
type limits struct {
	maxTransfer int64 // bytes
	maxCommands int   // entries a queue
	inCapsule   int   // bytes of data in a command capsule
	writeCache  bool
	discard     bool
	writeZeroes bool
	maxZeroes   int64 // bytes a Write Zeroes, 0: no limit
	ranges      uint8 // Dataset Management, 0: no limit for each
	rangeBlocks uint32
	rangesTotal uint64
}

// checkCapabilities refuses a controller by its CAP (Base 3.1.3.1). We run with 4 KiB memory pages and the
// NVM command set.
func checkCapabilities(c nvme.Capabilities, discovery bool) error {
	switch {
	case c.MinPageSize() > 4096:
		return refusedf("the controller needs memory pages of %d bytes; 4096 are used here", c.MinPageSize())
	case c.MaxEntries() < 2:
		return refusedf("the controller allows queues of %d entry, at least 2 are needed", c.MaxEntries())
	case !discovery && c.CommandSets()&1 == 0:
		return refusedf("the controller does not have the NVM command set (CSS %#02x)", c.CommandSets())
	}
	return nil
}

// checkController refuses an NVM controller by its Identify data, and says what it allows.
func checkController(c nvme.Capabilities, id *nvme.IdentifyController) (*limits, error) {
	switch {
	case id.CNTRLTYPE == nvme.ControllerAdmin:
		return nil, refusedf("it is an administrative controller, without I/O")
	case !id.SupportsSGL() || !id.SupportsKeyedSGL():
		return nil, refusedf("the controller does not take keyed SGLs (SGLS %#x)", id.SGLS)
	case id.IOCCSZ < 4:
		return nil, refusedf("its I/O command capsules of %d bytes do not hold a command of 64", id.IOCCSZ*16)
	case id.IORCSZ < 1:
		return nil, refusedf("its I/O response capsules do not hold a completion")
	case id.ICDOFF != 0:
		return nil, refusedf("it wants in-capsule data at an offset (ICDOFF %d)", id.ICDOFF)
	case id.SQES&0xF > 6 || id.SQES>>4 < 6 || id.CQES&0xF > 4 || id.CQES>>4 < 4:
		return nil, refusedf("its queue entries are not 64 and 16 bytes (SQES %#x, CQES %#x)", id.SQES, id.CQES)
	}
	l := &limits{
		maxTransfer: maxUnlimited,
		maxCommands: c.MaxEntries(),
		inCapsule:   id.InCapsuleBytes(),
		writeCache:  id.VolatileWriteCache(),
		discard:     id.ONCS&nvme.ONCSDatasetManagement != 0,
		writeZeroes: id.ONCS&nvme.ONCSWriteZeroes != 0,
	}
	if n := id.MaxTransfer(c.MinPageSize()); n > 0 {
		l.maxTransfer = int64(min(n, maxUnlimited))
	}
	if id.MAXCMD > 0 { // Linux's host, too, takes it as a number of entries
		l.maxCommands = min(l.maxCommands, max(int(id.MAXCMD), 2))
	}
	return l, nil
}

// refine adds the limits of the NVM command set's own Identify Controller data.
func (l *limits) refine(c nvme.Capabilities, n nvme.NVMController) {
	if n.WZSL > 0 && n.WZSL < 32 {
		l.maxZeroes = int64(c.MinPageSize()) << n.WZSL
	}
	l.ranges, l.rangeBlocks, l.rangesTotal = n.DMRL, n.DMRSL, n.DMSL
}
