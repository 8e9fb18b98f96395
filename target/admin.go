package target

import (
	"time"

	"farblk/host/nvme"
)

// startAdmin begins an admin command. Handlers may change state only once
// nothing can make them start over, hence the check of room first.
func (q *queue) startAdmin(cmd *command, c *nvme.Command) bool {
	ctrl := q.ctrl.Load()
	if !q.room(4) || len(q.lent) == cap(q.lent) {
		return false
	}
	switch op := c.Opcode(); {
	case op == nvme.AdminKeepAlive:
		if ctrl.kato == 0 {
			return q.fail(cmd, nvme.StatusKeepAliveInvalid.WithDNR())
		}
		ctrl.keepAlive()
		return q.complete(cmd, 0, nvme.StatusSuccess)
	case op == nvme.AdminIdentify:
		return q.identify(cmd, c, ctrl)
	case op == nvme.AdminGetLogPage:
		return q.getLogPage(cmd, c, ctrl)
	case op == nvme.AdminSetFeatures:
		return q.setFeatures(cmd, c, ctrl)
	case op == nvme.AdminGetFeatures:
		return q.getFeatures(cmd, c, ctrl)
	case op == nvme.AdminAsyncEvent:
		return q.startAER(cmd, ctrl)
	case op == nvme.AdminAbort:
		return q.abort(cmd, c, ctrl)
	}
	return q.fail(cmd, nvme.StatusInvalidOpcode.WithDNR())
}

// abort completes a waiting event request; other commands are past aborting,
// which bit 0 of the result says.
func (q *queue) abort(cmd *command, c *nvme.Command, ctrl *controller) bool {
	result := uint64(1)
	if sqid, cid := c.AbortTarget(); sqid == 0 && q.abortAER(ctrl, cid) {
		result = 0
	}
	return q.complete(cmd, result, nvme.StatusSuccess)
}

func (q *queue) setFeatures(cmd *command, c *nvme.Command, ctrl *controller) bool {
	if c.FeatureSave() {
		return q.fail(cmd, nvme.StatusFeatureNotSaveable.WithDNR())
	}
	v := c.DW(11)
	switch c.FeatureID() {
	case nvme.FeatureNumberOfQueues:
		if ctrl.s.isDiscovery || v&0xFFFF == 0xFFFF || v>>16 == 0xFFFF {
			return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
		}
		n := min(nvme.QueueCount(v).Queues(), q.t.cfg.IOQueues)
		ctrl.granted.Store(int32(n))
		return q.complete(cmd, uint64(nvme.MakeQueueCount(n)), nvme.StatusSuccess)
	case nvme.FeatureAsyncEvents:
		if v&^ctrl.s.supportedEvents() != 0 {
			return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
		}
		ctrl.events.enabled = v
		return q.complete(cmd, 0, nvme.StatusSuccess)
	case nvme.FeatureKeepAlive:
		ctrl.setKeepAlive(time.Duration(v) * time.Millisecond)
		return q.complete(cmd, 0, nvme.StatusSuccess)
	case nvme.FeatureVolatileWriteCache:
		if v&1 == 0 { // the cache is the kernel's and cannot be switched off
			return q.fail(cmd, nvme.StatusFeatureNotChangeable.WithDNR())
		}
		return q.complete(cmd, 0, nvme.StatusSuccess)
	case nvme.FeatureHostBehavior:
		return q.pull(cmd, c, 512, false, func(q *queue, cmd *command, _ []byte) {
			q.respond(cmd, 0, nvme.StatusSuccess)
		})
	}
	return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
}

func (q *queue) getFeatures(cmd *command, c *nvme.Command, ctrl *controller) bool {
	if c.FeatureSelect() == 3 { // supported capabilities: changeable, not saveable
		return q.complete(cmd, 1<<2, nvme.StatusSuccess)
	}
	var v uint64
	switch c.FeatureID() {
	case nvme.FeatureArbitration, nvme.FeaturePowerManagement, nvme.FeatureErrorRecovery,
		nvme.FeatureInterruptCoalesce, nvme.FeatureWriteAtomicity, nvme.FeatureTemperature:
	case nvme.FeatureNumberOfQueues:
		v = uint64(nvme.MakeQueueCount(int(ctrl.granted.Load())))
	case nvme.FeatureAsyncEvents:
		v = uint64(ctrl.events.enabled)
	case nvme.FeatureKeepAlive:
		v = uint64(ctrl.kato.Milliseconds())
	case nvme.FeatureVolatileWriteCache:
		if ctrl.s.cfg.NoWriteCache {
			return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
		}
		v = 1
	case nvme.FeatureHostID:
		if c.DW(11)&1 == 0 {
			return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
		}
		return q.reply(cmd, c, ctrl.hostID[:])
	case nvme.FeatureWriteProtection:
		if !ctrl.s.with(c.NSID(), func(n *namespace) {
			if n.readOnly {
				v = 1
			}
		}) {
			return q.fail(cmd, nvme.StatusInvalidNamespace.WithDNR())
		}
	default:
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	}
	return q.complete(cmd, v, nvme.StatusSuccess)
}

// supportedEvents returns OAES.
func (s *Subsystem) supportedEvents() uint32 {
	if s.isDiscovery {
		return nvme.EventsDiscovery
	}
	return nvme.EventsNamespace | nvme.EventsANA
}
