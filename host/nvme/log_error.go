package nvme

// LogErrorEntrySize is the size in bytes of one Error Information log entry.
const LogErrorEntrySize = 64

// ErrorLogEntry is one entry of log page 01h (Base 5.16.1.2), newest first. An
// ErrorCount of 0 marks an entry that is not in use.
type ErrorLogEntry struct {
	ErrorCount        uint64
	SQID              uint16
	CID               uint16
	StatusField       uint16 // with the phase tag in bit 0; see Status
	ParameterError    uint16 // byte in 7:0, bit in 10:8
	LBA               uint64
	NSID              uint32
	VendorLog         uint8
	TransportType     uint8
	CommandSet        uint8
	Opcode            Opcode
	CommandSpecific   uint64
	TransportSpecific uint16
	Version           uint8
}

// Status returns the status that the command completed with.
func (e *ErrorLogEntry) Status() StatusCode { return StatusCode(e.StatusField >> 1) }

func (e *ErrorLogEntry) layout(l layout) {
	l.u64(0, &e.ErrorCount)
	l.u16(8, &e.SQID)
	l.u16(10, &e.CID)
	l.u16(12, &e.StatusField)
	l.u16(14, &e.ParameterError)
	l.u64(16, &e.LBA)
	l.u32(24, &e.NSID)
	l.u8(28, &e.VendorLog)
	l.u8(29, &e.TransportType)
	l.u8(30, &e.CommandSet)
	l.u8(31, (*uint8)(&e.Opcode))
	l.u64(32, &e.CommandSpecific)
	l.u16(40, &e.TransportSpecific)
	l.u8(63, &e.Version)
}

// Append appends the 64 bytes.
func (e ErrorLogEntry) Append(b []byte) []byte {
	b, p := grow(b, LogErrorEntrySize)
	e.layout(layout{p, true})
	return b
}

// ParseErrorLog decodes as many whole entries as b holds, up to the first that
// is not in use.
func ParseErrorLog(b []byte) (log []ErrorLogEntry) {
	for ; len(b) >= LogErrorEntrySize; b = b[LogErrorEntrySize:] {
		var e ErrorLogEntry
		if e.layout(layout{b, false}); e.ErrorCount == 0 {
			break
		}
		log = append(log, e)
	}
	return log
}
