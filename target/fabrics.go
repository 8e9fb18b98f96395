package target

import (
	"time"

	"farblk/host/nvme"
)

// startFabrics begins a Fabrics command (Base 6).
func (q *queue) startFabrics(cmd *command, c *nvme.Command) bool {
	t := c.FabricsType()
	if t == nvme.FabricsConnect {
		if q.ctrl.Load() != nil {
			return q.fail(cmd, nvme.StatusSequenceError.WithDNR())
		}
		return q.pull(cmd, c, nvme.ConnectDataSize, false, (*queue).connect)
	}
	ctrl := q.ctrl.Load()
	if ctrl == nil {
		return q.fail(cmd, nvme.StatusSequenceError.WithDNR())
	}
	switch {
	case t == nvme.FabricsPropertyGet && q.qid == 0:
		return q.propertyGet(cmd, c, ctrl)
	case t == nvme.FabricsPropertySet && q.qid == 0:
		return q.propertySet(cmd, c, ctrl)
	case t == nvme.FabricsDisconnect && q.qid != 0:
		// The host ends the connection after it has seen the response.
		return q.complete(cmd, 0, nvme.StatusSuccess)
	}
	return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
}

// Offsets that a refused Connect names as the offending parameter, in the
// command or in its data.
const (
	badQID     = 42
	badSQSize  = 44
	inData     = 1 << 16
	badCNTLID  = inData | 16
	badSubNQN  = inData | 256
	badHostNQN = inData | 512
)

// connect ends a Connect (Base 6.3).
func (q *queue) connect(cmd *command, b []byte) {
	c := q.capsule(cmd)
	if q.ctrl.Load() != nil { // another came first, while this one's data was fetched
		q.respond(cmd, 0, nvme.StatusSequenceError.WithDNR())
		return
	}
	result, s := q.tryConnect(c, b)
	if s != 0 {
		q.log.Info("Connect refused", "status", s.String(), "parameter", nvme.ConnectParameter(result).String())
		q.respond(cmd, uint64(result), s.WithDNR())
		return
	}
	q.deadline.Stop()
	if c.ConnectAttributes()&nvme.ConnectNoFlowControl != 0 {
		q.noFlow = true
	}
	q.respond(cmd, uint64(result), nvme.StatusSuccess)
	if q.noFlow { // agreed to by a head of all ones in this one response
		r := q.wrs[len(q.wrs)-1].SGEs[0].Data
		(*nvme.Completion)(r).SetSQHD(0xFFFF)
	}
	q.refresh()
}

func (q *queue) tryConnect(c *nvme.Command, b []byte) (result uint32, s nvme.StatusCode) {
	d, err := nvme.ParseConnectData(b)
	switch {
	case err != nil || c.ConnectFormat() != 0:
		return 0, nvme.StatusConnectFormat
	case c.ConnectQueue() != q.qid:
		return badQID, nvme.StatusConnectInvalidParameters
	case c.ConnectSQSize() != q.sqsize:
		return badSQSize, nvme.StatusConnectInvalidParameters
	case nvme.ValidateNQN(d.HostNQN) != nil:
		return badHostNQN, nvme.StatusConnectInvalidParameters
	}
	sub := q.t.Subsystem(d.SubNQN)
	if d.SubNQN == nvme.DiscoveryNQN {
		sub = q.t.discovery
	}
	if sub == nil {
		return badSubNQN, nvme.StatusConnectInvalidParameters
	}
	if !sub.allows(d.HostNQN) {
		return badHostNQN, nvme.StatusConnectInvalidHost
	}
	if q.qid != 0 {
		return q.joinController(sub, &d)
	}
	if d.CNTLID != nvme.AnyController {
		return badCNTLID, nvme.StatusConnectInvalidParameters
	}
	ctrl, err := q.t.newController(q, sub, &d, time.Duration(c.ConnectKATO())*time.Millisecond)
	if err != nil {
		return 0, nvme.StatusConnectControllerBusy
	}
	q.log = q.log.With("cntlid", ctrl.id)
	q.log.Info("host connected", "host", d.HostNQN, "subsystem", sub.cfg.NQN)
	return uint32(ctrl.id), 0
}

// joinController makes q an I/O queue of the controller that d names.
func (q *queue) joinController(s *Subsystem, d *nvme.ConnectData) (uint32, nvme.StatusCode) {
	t := q.t
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.controllers[d.CNTLID]
	switch {
	case c == nil || c.s != s || c.port != q.port || s.isDiscovery:
		return badCNTLID, nvme.StatusConnectInvalidParameters
	case c.hostNQN != d.HostNQN:
		return badHostNQN, nvme.StatusConnectInvalidParameters
	case c.hostID != d.HostID:
		return inData, nvme.StatusConnectInvalidParameters
	case int32(q.qid) > c.granted.Load():
		return badQID, nvme.StatusConnectInvalidParameters
	case !c.ready.Load() || c.queues[q.qid] != nil:
		return 0, nvme.StatusSequenceError
	}
	c.queues[q.qid] = q
	q.subsystem.Store(s)
	q.ctrl.Store(c)
	return uint32(c.id), 0
}

func (q *queue) capabilities() nvme.Capabilities {
	return nvme.MakeCapabilities(q.t.cfg.QueueDepth, 15*time.Second)
}

func (q *queue) propertyGet(cmd *command, c *nvme.Command, ctrl *controller) bool {
	p := c.PropertyOffset()
	if c.PropertyWide() != p.Wide() {
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	}
	var v uint64
	switch p {
	case nvme.PropertyCAP:
		v = uint64(q.capabilities())
	case nvme.PropertyVS:
		v = uint64(version)
	case nvme.PropertyCC:
		v = uint64(ctrl.cc)
	case nvme.PropertyCSTS:
		v = uint64(ctrl.csts)
	default:
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	}
	return q.complete(cmd, v, nvme.StatusSuccess)
}

func (q *queue) propertySet(cmd *command, c *nvme.Command, ctrl *controller) bool {
	if c.PropertyOffset() != nvme.PropertyCC || c.PropertyWide() {
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	}
	ctrl.configure(nvme.Configuration(c.PropertyValue()))
	return q.complete(cmd, 0, nvme.StatusSuccess)
}
