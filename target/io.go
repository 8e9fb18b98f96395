package target

import (
	"errors"

	"farblk/host/nvme"
	"farblk/transport/verbs"

	"golang.org/x/sys/unix"
)

// maxTransfer is the most bytes of one command's data.
const maxTransfer = pageSize << maxMDTS

// startIO begins a command of the NVM command set.
func (q *queue) startIO(cmd *command, c *nvme.Command) bool {
	switch c.Opcode() {
	case nvme.IORead:
		return q.startRead(cmd, c)
	case nvme.IOWrite:
		return q.startWrite(cmd, c)
	case nvme.IOFlush:
		return q.flushNamespaces(cmd, c)
	case nvme.IOWriteZeroes:
		return q.writeZeroes(cmd, c)
	case nvme.IODatasetManagement:
		return q.startDataset(cmd, c)
	}
	return q.fail(cmd, nvme.StatusInvalidOpcode.WithDNR())
}

// locate checks a command's namespace and block range, which it returns in bytes.
func (q *queue) locate(cmd *command, c *nvme.Command, write bool) (off, n uint64, s nvme.StatusCode) {
	v, s := q.view(c.NSID())
	if s != 0 {
		return 0, 0, s
	}
	slba, blocks := c.SLBA(), uint64(c.Blocks())
	switch {
	case slba > v.blocks || blocks > v.blocks-slba:
		return 0, 0, nvme.StatusLBAOutOfRange.WithDNR()
	case c.ProtectionInfo() != 0:
		return 0, 0, nvme.StatusInvalidField.WithDNR()
	case write && v.readOnly:
		return 0, 0, nvme.StatusNamespaceWriteProtected.WithDNR()
	}
	cmd.view = v
	return slba << v.blockShift, blocks << v.blockShift, 0
}

// locateData is locate for a command that moves the data.
func (q *queue) locateData(cmd *command, c *nvme.Command, write bool) (off, n uint64, s nvme.StatusCode) {
	off, n, s = q.locate(cmd, c, write)
	if s == 0 && n > maxTransfer {
		s = nvme.StatusInvalidField.WithDNR()
	}
	return off, n, s
}

func (q *queue) startRead(cmd *command, c *nvme.Command) bool {
	off, n, s := q.locateData(cmd, c, false)
	if s != 0 {
		return q.fail(cmd, s)
	}
	v := cmd.view
	want := v.countPieces(off, n) + 1
	// Software's checksums: another command may write these blocks meanwhile. And many small pieces could never be sent.
	if v.pieces == nil || !q.dom.hardware || want > q.capacity {
		return q.push(cmd, c, int(n), true, (*queue).loadRead)
	}
	sgl := c.SGL()
	if s := checkKeyed(sgl, int(n), true); s != 0 {
		return q.fail(cmd, s)
	}
	if !q.room(want) {
		return false
	}
	q.reserved += want
	i := len(q.wrs)
	q.wrs = v.appendPieces(q.wrs, off, n, verbs.SendWR{Op: verbs.OpRDMAWrite, RemoteAddr: sgl.Address, RKey: sgl.Key})
	q.number(i, kindSend, 0)
	q.countRead(n)
	q.respond(cmd, 0, nvme.StatusSuccess)
	return true
}

func (q *queue) countRead(n uint64) {
	q.stats.reads.Add(1)
	q.stats.readBytes.Add(n)
}

// loadRead copies the data of a Read.
func (q *queue) loadRead(cmd *command, b []byte) nvme.StatusCode {
	if err := cmd.view.store.readAt(b, q.capsule(cmd).SLBA()<<cmd.view.blockShift); err != nil {
		return q.storeFailed(err, nvme.StatusUnrecoveredRead)
	}
	q.countRead(uint64(len(b)))
	return 0
}

func (q *queue) startWrite(cmd *command, c *nvme.Command) bool {
	off, n, s := q.locateData(cmd, c, true)
	if s != 0 {
		return q.fail(cmd, s)
	}
	v, sgl := cmd.view, c.SGL()
	reads := v.countPieces(off, n)
	if sgl.Type == nvme.SGLOffset || v.pieces == nil || !q.dom.inPlace || reads+1 > q.capacity {
		return q.pull(cmd, c, int(n), true, (*queue).storeWrite)
	}
	if s := checkKeyed(sgl, int(n), true); s != 0 {
		return q.fail(cmd, s)
	}
	if !q.room(reads+1) || q.reads > 0 && q.reads+reads > q.maxReads {
		return false
	}
	q.reserved += reads + 1
	q.reads += reads
	cmd.reads, cmd.size, cmd.then = reads, int(n), (*queue).wroteMemory
	i := len(q.wrs)
	q.wrs = v.appendPieces(q.wrs, off, n, verbs.SendWR{
		Op: verbs.OpRDMARead, Flags: verbs.Signaled, RemoteAddr: sgl.Address, RKey: sgl.Key,
	})
	q.number(i, kindRead, cmd.slot)
	return true
}

// wroteMemory ends a Write whose data the device has put in place.
func (q *queue) wroteMemory(cmd *command, _ []byte) { q.endWrite(cmd, q.capsule(cmd), 0) }

// storeWrite ends a Write whose data is at hand, in the capsule or in bounce memory.
func (q *queue) storeWrite(cmd *command, b []byte) {
	c := q.capsule(cmd)
	if c[39] == byte(nvme.SGLOffset) {
		q.stats.inCapsule.Add(1)
	}
	q.endWrite(cmd, c, q.writeStatus(cmd.view.store.writeAt(b, c.SLBA()<<cmd.view.blockShift)))
}

func (q *queue) endWrite(cmd *command, c *nvme.Command, s nvme.StatusCode) {
	if c.FUA() {
		q.stats.fua.Add(1)
		if s.OK() {
			q.sync(cmd, cmd.view)
			return
		}
	}
	q.settle(cmd, s)
}

func (q *queue) writeStatus(err error) nvme.StatusCode {
	if err == nil {
		return 0
	}
	return q.storeFailed(err, nvme.StatusWriteFault)
}

// storeFailed turns a backend's error into a status.
func (q *queue) storeFailed(err error, s nvme.StatusCode) nvme.StatusCode {
	if !q.faulty { // once for all that follows: a full disk fails every write
		q.faulty = true
		q.log.Error("backend failed", "err", err)
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return nvme.StatusCapacityExceeded.WithDNR()
	}
	return s
}

func (q *queue) flushNamespaces(cmd *command, c *nvme.Command) bool {
	if c.NSID() != nvme.AllNamespaces {
		v, s := q.view(c.NSID())
		if s != 0 {
			return q.fail(cmd, s)
		}
		q.stats.flushes.Add(1)
		q.reserved++
		q.sync(cmd, v)
		return true
	}
	q.stats.flushes.Add(1)
	for _, v := range q.views {
		switch {
		case v == nil:
		case v.status != 0:
			return q.fail(cmd, v.status)
		case v.syncs:
			cmd.stores = append(cmd.stores, v.store)
		}
	}
	q.reserved++
	q.syncStores(cmd)
	return true
}

func (q *queue) writeZeroes(cmd *command, c *nvme.Command) bool {
	off, n, s := q.locate(cmd, c, true)
	if s == 0 {
		s = q.zero(cmd.view, off, n)
	}
	q.reserved++
	if s == 0 && c.FUA() {
		q.sync(cmd, cmd.view)
	} else {
		q.settle(cmd, s)
	}
	return true
}

// zeroStep is how many bytes are cleared before somebody else may have the queue's lock, to end it: one command can
// ask for the whole namespace 256 times.
const zeroStep = 64 << 20

// zero clears a range. It stops in the midst of it when the queue is ended.
func (q *queue) zero(v *nsView, off, n uint64) nvme.StatusCode {
	for {
		step := min(n, zeroStep)
		if err := v.store.zero(off, step); err != nil {
			return q.writeStatus(err)
		}
		if off, n = off+step, n-step; n == 0 {
			return nvme.StatusSuccess
		}
		q.mu.Unlock()
		q.mu.Lock()
		if q.dead != nil {
			return nvme.StatusInternalError // nobody hears it
		}
	}
}

func (q *queue) startDataset(cmd *command, c *nvme.Command) bool {
	v, s := q.view(c.NSID())
	if s == 0 && v.readOnly {
		s = nvme.StatusNamespaceWriteProtected.WithDNR()
	}
	if s != 0 {
		return q.fail(cmd, s)
	}
	cmd.view = v
	return q.pull(cmd, c, c.Ranges()*nvme.RangeSize, false, (*queue).deallocate)
}

// deallocate ends a Dataset Management. Without AD it is a hint, and no more.
func (q *queue) deallocate(cmd *command, b []byte) {
	v := cmd.view
	if !q.capsule(cmd).DatasetDeallocate() {
		q.respond(cmd, 0, nvme.StatusSuccess)
		return
	}
	// All ranges are checked before the first is freed.
	s := nvme.StatusSuccess
	for r := b; len(r) > 0; r = r[nvme.RangeSize:] {
		d, _ := nvme.ParseRange(r)
		if d.SLBA > v.blocks || uint64(d.Blocks) > v.blocks-d.SLBA {
			s = nvme.StatusLBAOutOfRange.WithDNR()
		}
	}
	for r := b; len(r) > 0 && s == 0; r = r[nvme.RangeSize:] {
		if d, _ := nvme.ParseRange(r); d.Blocks > 0 {
			s = q.zero(v, d.SLBA<<v.blockShift, uint64(d.Blocks)<<v.blockShift)
			q.stats.ranges.Add(1)
		}
	}
	if s == 0 {
		q.stats.trims.Add(1)
	}
	q.respond(cmd, 0, s)
}
