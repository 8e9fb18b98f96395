package target

import (
	"encoding/binary"
	"slices"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// command is the record of one command, by the receive slot that it came in.
type command struct {
	slot  uint16
	reads int // RDMA READs that its data still waits for
	data  int // bytes that follow the command in its capsule
	view  *nsView
	run   run // bounce memory of its data
	size  int // bytes of data
	then  func(*queue, *command, []byte)

	stores []backend // to be synced before it ends
}

// uses says whether a command that has not ended needs the namespace.
func (cmd *command) uses(n *namespace) bool {
	return cmd.view != nil && cmd.view.ns == n || slices.Contains(cmd.stores, n.store)
}

// lent is bounce memory that an RDMA WRITE reads from until its number is done.
type lent struct {
	number uint32
	run    run
}

// capsule returns the command as it was received.
func (q *queue) capsule(cmd *command) *nvme.Command {
	at := int(cmd.slot) * q.stride
	return (*nvme.Command)(q.capsules.mem[at:])
}

// inCapsule returns n bytes of the data that came with the command.
func (q *queue) inCapsule(cmd *command, n int) []byte {
	at := int(cmd.slot)*q.stride + nvme.CommandSize
	return q.capsules.mem[at : at+n : at+n]
}

// received takes a command that arrived in slot.
func (q *queue) received(slot uint16, bytes int) {
	cmd := &q.cmds[slot]
	*cmd = command{slot: slot, data: bytes - nvme.CommandSize, stores: cmd.stores[:0]}
	if cmd.data < 0 {
		clear(q.capsules.mem[int(slot)*q.stride+bytes : int(slot)*q.stride+nvme.CommandSize])
		cmd.data = 0
	}
	if q.sqhd++; q.sqhd > q.sqsize {
		q.sqhd = 0
	}
	if len(q.waiting) > 0 || !q.start(cmd) {
		q.waiting = append(q.waiting, slot)
	}
}

// retry starts commands that waited for room, in order.
func (q *queue) retry() {
	for n, slot := range q.waiting {
		if !q.start(&q.cmds[slot]) {
			q.waiting = append(q.waiting[:0], q.waiting[n:]...)
			return
		}
	}
	q.waiting = q.waiting[:0]
}

// start begins a command. It returns false, having done nothing, if there is no
// room for it until others have ended.
func (q *queue) start(cmd *command) bool {
	if !q.room(1) || q.dead != nil {
		return false
	}
	c := q.capsule(cmd)
	op, ctrl := c.Opcode(), q.ctrl.Load()
	switch {
	case c.PSDT() != 1 || c.Fused() != 0:
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	case op == nvme.OpcodeFabrics:
		return q.startFabrics(cmd, c)
	case ctrl == nil || !ctrl.ready.Load() && op != nvme.AdminKeepAlive:
		return q.fail(cmd, nvme.StatusSequenceError.WithDNR())
	case q.qid == 0:
		return q.startAdmin(cmd, c)
	}
	return q.startIO(cmd, c)
}

// room says whether n more work requests can be reserved.
func (q *queue) room(n int) bool { return q.used+q.reserved+n <= q.capacity }

// fail completes a command that has begun nothing.
func (q *queue) fail(cmd *command, s nvme.StatusCode) bool {
	return q.complete(cmd, 0, s)
}

// complete is fail with a result; the status may be success.
func (q *queue) complete(cmd *command, result uint64, s nvme.StatusCode) bool {
	q.reserved++
	q.respond(cmd, result, s)
	return true
}

// respond queues the response of a command that has a work request reserved for
// it, and gives its slot back.
func (q *queue) respond(cmd *command, result uint64, s nvme.StatusCode) {
	c := q.capsule(cmd)
	head := q.sqhd
	if q.noFlow {
		head = 0
	}
	at := int(q.respHead) * respSlot
	if q.respHead++; int(q.respHead) == q.capacity {
		q.respHead = 0
	}
	cqe := q.responses.mem[at : at+nvme.CompletionSize : at+nvme.CompletionSize]
	(*nvme.Completion)(cqe).Fill(result, head, q.qid, c.CID(), s)
	if !s.OK() {
		q.failed(c, s)
	}
	i := len(q.wrs)
	q.wrs = append(q.wrs, verbs.SendWR{Op: verbs.OpSend, NumSGE: 1})
	wr := &q.wrs[i]
	wr.SGEs[0] = verbs.SGE{Data: cqe, LKey: q.responses.mr.LKey()}
	if c[39] == byte(nvme.SGLKeyedInvalidate) {
		wr.Op, wr.RKey = verbs.OpSendInvalidate, binary.LittleEndian.Uint32(c[35:])
	}
	q.lastSend = i
	q.number(i, kindSend, 0)
	cmd.view, cmd.stores = nil, cmd.stores[:0]
	q.repost(cmd.slot)
}

// pull gets n bytes of data from the host and hands them to then, which
// completes the command by respond. exact refuses a descriptor that is longer.
func (q *queue) pull(cmd *command, c *nvme.Command, n int, exact bool, then func(*queue, *command, []byte)) bool {
	sgl := c.SGL()
	cmd.then, cmd.size = then, n
	switch sgl.Type {
	case nvme.SGLOffset:
		if sgl.CheckInCapsule(cmd.data) != nil {
			return q.fail(cmd, nvme.StatusSGLInvalidOffset.WithDNR())
		}
		if s := checkLength(sgl.Length, n, exact); s != 0 {
			return q.fail(cmd, s)
		}
		q.reserved++
		then(q, cmd, q.inCapsule(cmd, n))
		return true
	case nvme.SGLKeyed, nvme.SGLKeyedInvalidate:
	default:
		return q.fail(cmd, nvme.StatusSGLInvalidType.WithDNR())
	}
	if s := checkLength(sgl.Length, n, exact); s != 0 {
		return q.fail(cmd, s)
	}
	if !q.room(2) || q.reads >= q.maxReads {
		return false
	}
	r, ok, err := q.bounce.take(n)
	if err != nil {
		return q.fail(cmd, nvme.StatusInternalError)
	}
	if !ok {
		return false
	}
	cmd.run, cmd.reads = r, 1
	q.reserved += 2
	q.reads++
	i := len(q.wrs)
	q.wrs = append(q.wrs, verbs.SendWR{
		Op: verbs.OpRDMARead, Flags: verbs.Signaled, RemoteAddr: sgl.Address, RKey: sgl.Key, NumSGE: 1,
		SGEs: [verbs.MaxSGE]verbs.SGE{{Data: q.bounce.bytes(r, n), LKey: q.bounce.region.mr.LKey()}},
	})
	q.number(i, kindRead, cmd.slot)
	return true
}

// fetched goes on with a command whose data has come by RDMA READ.
func (q *queue) fetched(cmd *command) {
	if cmd.run.pages == 0 { // straight into the namespace
		cmd.then(q, cmd, nil)
		return
	}
	cmd.then(q, cmd, q.bounce.bytes(cmd.run, cmd.size))
	q.bounce.give(cmd.run)
}

// push sends n bytes of data to the host, which fill puts in place, and then the
// response. A status from fill is sent instead of the data.
func (q *queue) push(cmd *command, c *nvme.Command, n int, exact bool, fill func(*queue, *command, []byte) nvme.StatusCode) bool {
	sgl := c.SGL()
	if s := checkKeyed(sgl, n, exact); s != 0 {
		return q.fail(cmd, s)
	}
	if !q.room(2) || len(q.lent) == cap(q.lent) {
		return false
	}
	r, ok, err := q.bounce.take(n)
	if err != nil {
		return q.fail(cmd, nvme.StatusInternalError)
	}
	if !ok {
		return false
	}
	b := q.bounce.bytes(r, n)
	if s := fill(q, cmd, b); !s.OK() {
		q.bounce.give(r)
		return q.fail(cmd, s)
	}
	q.reserved += 2
	i := len(q.wrs)
	q.wrs = append(q.wrs, verbs.SendWR{
		Op: verbs.OpRDMAWrite, RemoteAddr: sgl.Address, RKey: sgl.Key, NumSGE: 1,
		SGEs: [verbs.MaxSGE]verbs.SGE{{Data: b, LKey: q.bounce.region.mr.LKey()}},
	})
	q.number(i, kindSend, 0)
	q.lent = append(q.lent, lent{q.posted, r})
	q.respond(cmd, 0, nvme.StatusSuccess)
	return true
}

// reclaim takes back the bounce memory of RDMA WRITEs that are done.
func (q *queue) reclaim() {
	n := 0
	for n < len(q.lent) && int32(q.done-q.lent[n].number) >= 0 {
		q.bounce.give(q.lent[n].run)
		n++
	}
	if n > 0 {
		q.lent = append(q.lent[:0], q.lent[n:]...)
	}
}

// reply sends the bytes of an admin command's answer.
func (q *queue) reply(cmd *command, c *nvme.Command, data []byte) bool {
	return q.push(cmd, c, len(data), false, func(_ *queue, _ *command, b []byte) nvme.StatusCode {
		copy(b, data)
		return 0
	})
}

// checkKeyed checks the descriptor of data that goes to the host.
func checkKeyed(s nvme.SGL, n int, exact bool) nvme.StatusCode {
	if s.Type != nvme.SGLKeyed && s.Type != nvme.SGLKeyedInvalidate {
		return nvme.StatusSGLInvalidType.WithDNR()
	}
	return checkLength(s.Length, n, exact)
}

func checkLength(have uint32, want int, exact bool) nvme.StatusCode {
	if int(have) < want || exact && int(have) != want {
		return nvme.StatusSGLInvalidLength.WithDNR()
	}
	return 0
}
