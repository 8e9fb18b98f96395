package nvme

// LogFirmwareSize is the size in bytes of the Firmware Slot Information log.
const LogFirmwareSize = 512

// FirmwareLog is log page 03h (Base 5.16.1.4).
type FirmwareLog struct {
	Active    uint8     // slot in use in 2:0, slot after the next reset in 6:4
	Revisions [7]string // of slots 1 to 7, up to 8 characters each; empty: none
}

func (f *FirmwareLog) layout(l layout) {
	l.u8(0, &f.Active)
	for i := range f.Revisions {
		if l.write && f.Revisions[i] == "" {
			continue // an empty slot is zeros, not spaces
		}
		l.ascii(8+8*i, 8, &f.Revisions[i])
	}
}

// Append appends the 512 bytes.
func (f FirmwareLog) Append(b []byte) []byte {
	b, p := grow(b, LogFirmwareSize)
	f.layout(layout{p, true})
	return b
}

// ParseFirmwareLog decodes the first 512 bytes of b.
func ParseFirmwareLog(b []byte) (f FirmwareLog, err error) {
	if err := need("firmware slot log", b, LogFirmwareSize); err != nil {
		return f, err
	}
	f.layout(layout{b, false})
	return f, nil
}
