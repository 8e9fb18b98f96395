package nvme

// LogSMARTSize is the size in bytes of the SMART / Health Information log.
const LogSMARTSize = 512

// SMARTLog is log page 02h (Base 5.16.1.3). Temperatures are in kelvin; data
// units are 1,000 times 512 bytes; times are in minutes or hours as named.
type SMARTLog struct {
	CriticalWarning         uint8
	Temperature             uint16
	AvailableSpare          uint8 // %
	AvailableSpareThreshold uint8 // %
	PercentageUsed          uint8
	EnduranceGroupWarning   uint8
	DataUnitsRead           Uint128
	DataUnitsWritten        Uint128
	HostReads               Uint128
	HostWrites              Uint128
	ControllerBusyMinutes   Uint128
	PowerCycles             Uint128
	PowerOnHours            Uint128
	UnsafeShutdowns         Uint128
	MediaErrors             Uint128
	ErrorLogEntries         Uint128
	WarningTempMinutes      uint32
	CriticalTempMinutes     uint32
	Sensors                 [8]uint16 // 0: not there
	ThermalTransitions      [2]uint32
	ThermalSeconds          [2]uint32
}

func (s *SMARTLog) layout(l layout) {
	l.u8(0, &s.CriticalWarning)
	l.u16(1, &s.Temperature)
	l.u8(3, &s.AvailableSpare)
	l.u8(4, &s.AvailableSpareThreshold)
	l.u8(5, &s.PercentageUsed)
	l.u8(6, &s.EnduranceGroupWarning)
	for i, v := range []*Uint128{
		&s.DataUnitsRead, &s.DataUnitsWritten, &s.HostReads, &s.HostWrites, &s.ControllerBusyMinutes,
		&s.PowerCycles, &s.PowerOnHours, &s.UnsafeShutdowns, &s.MediaErrors, &s.ErrorLogEntries,
	} {
		l.u128(32+16*i, v)
	}
	l.u32(192, &s.WarningTempMinutes)
	l.u32(196, &s.CriticalTempMinutes)
	for i := range s.Sensors {
		l.u16(200+2*i, &s.Sensors[i])
	}
	for i := range 2 {
		l.u32(216+4*i, &s.ThermalTransitions[i])
		l.u32(224+4*i, &s.ThermalSeconds[i])
	}
}

// Append appends the 512 bytes.
func (s SMARTLog) Append(b []byte) []byte {
	b, p := grow(b, LogSMARTSize)
	s.layout(layout{p, true})
	return b
}

// ParseSMARTLog decodes the first 512 bytes of b.
func ParseSMARTLog(b []byte) (s SMARTLog, err error) {
	if err := need("SMART log", b, LogSMARTSize); err != nil {
		return s, err
	}
	s.layout(layout{b, false})
	return s, nil
}
