package target

import (
	"slices"

	"farblk/host/nvme"
)

// getLogPage begins a Get Log Page. What lies past the end of a log is zeros.
func (q *queue) getLogPage(cmd *command, c *nvme.Command, ctrl *controller) bool {
	n, off := c.LogLength(), c.LogOffset()
	if n > maxTransfer || off&3 != 0 {
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	}
	log, ok := q.logPage(c, ctrl)
	if !ok {
		return q.fail(cmd, nvme.StatusInvalidLogPage.WithDNR())
	}
	if off > uint64(len(log)) {
		return q.fail(cmd, nvme.StatusInvalidField.WithDNR())
	}
	id, retain := c.LogID(), c.RetainEvent()
	return q.push(cmd, c, int(n), false, func(q *queue, _ *command, b []byte) nvme.StatusCode {
		clear(b[copy(b, log[off:]):])
		if !retain {
			if id == nvme.LogChangedNamespaces {
				ctrl.events.changed = nvme.ChangedNamespaces{}
			}
			q.unmask(ctrl, id)
		}
		return 0
	})
}

// logPage builds the log; ok is false if there is none of that kind.
func (q *queue) logPage(c *nvme.Command, ctrl *controller) (b []byte, ok bool) {
	id := c.LogID()
	if id == nvme.LogSupported {
		var s nvme.SupportedLogs
		for _, id := range ctrl.s.logs() {
			s[id] = 1
		}
		return s.Append(nil), true
	}
	if !slices.Contains(ctrl.s.logs(), id) {
		return nil, false
	}
	switch id {
	case nvme.LogError:
		return ctrl.errorLog(), true
	case nvme.LogSMART:
		return ctrl.smartLog().Append(nil), true
	case nvme.LogFirmware:
		return nvme.FirmwareLog{Active: 1, Revisions: [7]string{ctrl.s.cfg.Firmware}}.Append(nil), true
	case nvme.LogChangedNamespaces:
		return ctrl.events.changed.Append(nil), true
	case nvme.LogEffects:
		return effectsLog().Append(nil), true
	case nvme.LogANA:
		return ctrl.s.anaLog(ctrl.port.id, c.LogSpecific()&nvme.ANAGroupsOnly != 0).Append(nil), true
	case nvme.LogDiscovery:
		return q.t.discoveryLog(ctrl, q.conn.LocalAddr()), true
	}
	return nil, false
}

// logs lists the log pages that the subsystem's controllers have.
func (s *Subsystem) logs() []nvme.LogID {
	if s.isDiscovery {
		return []nvme.LogID{nvme.LogSupported, nvme.LogError, nvme.LogDiscovery}
	}
	return []nvme.LogID{
		nvme.LogSupported, nvme.LogError, nvme.LogSMART, nvme.LogFirmware,
		nvme.LogChangedNamespaces, nvme.LogEffects, nvme.LogANA,
	}
}

// smartLog reports a healthy device and what the subsystem counted.
func (ctrl *controller) smartLog() nvme.SMARTLog {
	st := ctrl.s.Stats()
	units := func(bytes uint64) nvme.Uint128 { return nvme.Uint128{Lo: (bytes + 511999) / 512000} }
	ctrl.errMu.Lock()
	errors := ctrl.errCount
	ctrl.errMu.Unlock()
	return nvme.SMARTLog{
		Temperature: 293, AvailableSpare: 100, AvailableSpareThreshold: 10,
		DataUnitsRead: units(st.ReadBytes), DataUnitsWritten: units(st.WriteBytes),
		HostReads: nvme.Uint128{Lo: st.Reads}, HostWrites: nvme.Uint128{Lo: st.Writes},
		ErrorLogEntries: nvme.Uint128{Lo: errors},
	}
}

func effectsLog() *nvme.EffectsLog {
	e := new(nvme.EffectsLog)
	for _, op := range []nvme.Opcode{
		nvme.AdminGetLogPage, nvme.AdminIdentify, nvme.AdminAbort, nvme.AdminSetFeatures,
		nvme.AdminGetFeatures, nvme.AdminAsyncEvent, nvme.AdminKeepAlive,
	} {
		e.Admin[op] = nvme.EffectSupported
	}
	for _, op := range []nvme.Opcode{nvme.IOFlush, nvme.IORead} {
		e.IO[op] = nvme.EffectSupported
	}
	for _, op := range []nvme.Opcode{nvme.IOWrite, nvme.IOWriteZeroes, nvme.IODatasetManagement} {
		e.IO[op] = nvme.EffectSupported | nvme.EffectContentChange
	}
	return e
}
