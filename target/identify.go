package target

import (
	"farblk/host/nvme"
)

func (q *queue) identify(cmd *command, c *nvme.Command, ctrl *controller) bool {
	b, s := q.identifyData(c, ctrl)
	if s != 0 {
		return q.fail(cmd, s.WithDNR())
	}
	return q.reply(cmd, c, b)
}

func (q *queue) identifyData(c *nvme.Command, ctrl *controller) (b []byte, s nvme.StatusCode) {
	sub, nsid := ctrl.s, c.NSID()
	cns := c.CNS()
	if cns == nvme.CNSController {
		return ctrl.data().Append(nil), 0
	}
	if sub.isDiscovery {
		return nil, nvme.StatusInvalidField
	}
	switch cns {
	case nvme.CNSCommandSetNamespace, nvme.CNSCommandSetController, nvme.CNSCommandSetActive:
		if c.CSI() != 0 {
			return nil, nvme.StatusInvalidField
		}
	}
	switch cns {
	case nvme.CNSCommandSetController:
		return nvme.NVMController{}.Append(nil), 0
	case nvme.CNSCommandSets:
		b = make([]byte, nvme.IdentifySize)
		b[0] = 1 // combination 0 is the NVM command set
		return b, 0
	case nvme.CNSActiveNamespaces, nvme.CNSCommandSetActive, nvme.CNSAllocatedNamespaces:
		if nsid >= nvme.AllNamespaces-1 {
			return nil, nvme.StatusInvalidNamespace
		}
		return nvme.AppendNamespaceList(nil, sub.ids(nsid)), 0
	case nvme.CNSNamespace, nvme.CNSNamespaceDescriptors, nvme.CNSCommandSetNamespace,
		nvme.CNSIndependentNamespace, nvme.CNSAllocatedNamespace:
	default:
		return nil, nvme.StatusInvalidField
	}
	if nsid == 0 || nsid > maxNSID {
		return nil, nvme.StatusInvalidNamespace
	}
	found := sub.with(nsid, func(n *namespace) {
		switch cns {
		case nvme.CNSNamespace, nvme.CNSAllocatedNamespace:
			b = n.data().Append(nil)
		case nvme.CNSNamespaceDescriptors:
			b = nvme.NamespaceIDs{EUI64: n.eui64, NGUID: n.nguid, UUID: n.uuid, HasCSI: true}.Append(nil)
		case nvme.CNSCommandSetNamespace:
			b = nvme.NVMNamespace{}.Append(nil)
		case nvme.CNSIndependentNamespace:
			d := n.data()
			b = nvme.IndependentNamespace{NMIC: d.NMIC, ANAGRPID: n.group, NSATTR: d.NSATTR, NSTAT: 1}.Append(nil)
		}
	})
	if !found {
		if cns == nvme.CNSNamespace {
			return make([]byte, nvme.IdentifySize), 0 // an inactive ID reads as zeros
		}
		return nil, nvme.StatusInvalidNamespace
	}
	return b, 0
}

// data is the Identify Controller data structure.
func (ctrl *controller) data() *nvme.IdentifyController {
	cfg, s := &ctrl.t.cfg, ctrl.s
	d := &nvme.IdentifyController{
		SN: s.cfg.Serial, MN: s.cfg.Model, FR: s.cfg.Firmware,
		CNTLID: ctrl.id, VER: version,
		OAES: s.supportedEvents(), CTRATT: nvme.CTRATTHostID128, CNTRLTYPE: nvme.ControllerIO,
		ACL: 3, AERL: aerLimit - 1, FRMW: 1<<1 | 1, LPA: 1<<2 | 1<<1 | 1, ELPE: errorLogSize - 1,
		KAS:  uint16(keepAliveStep.Milliseconds() / 100),
		SQES: 0x66, CQES: 0x44, MAXCMD: uint16(cfg.QueueDepth),
		SubNQN: s.cfg.NQN,
		SGLS:   nvme.SGLSSupported | nvme.SGLSKeyed,
		IOCCSZ: uint32(nvme.CommandSize+cfg.InCapsule) / 16, IORCSZ: nvme.CompletionSize / 16,
		MSDBD: 1, OFCS: 1,
	}
	d.PSD[0] = nvme.PowerState{MP: 2500}
	if cfg.MDTS > 0 {
		d.MDTS = uint8(cfg.MDTS)
	}
	if cfg.InCapsule > 0 {
		d.SGLS |= nvme.SGLSInCapsule
	}
	if s.isDiscovery {
		d.CNTRLTYPE = nvme.ControllerDiscovery
		return d
	}
	d.CMIC = nvme.CMICMultiPort | nvme.CMICMultiController | nvme.CMICANA
	d.ANATT, d.ANACAP = 10, 0x1F
	d.ANAGRPMAX, d.NANAGRPID = maxGroups, maxGroups
	d.NN, d.MNAN = maxNSID, maxNSID
	d.ONCS = nvme.ONCSDatasetManagement | nvme.ONCSWriteZeroes
	d.NWPC = 1
	if !s.cfg.NoWriteCache {
		d.VWC = nvme.VWCPresent | nvme.VWCFlushAll
	}
	return d
}
