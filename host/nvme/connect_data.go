package nvme

// ConnectDataSize is the size in bytes of a Connect command's data.
const ConnectDataSize = 1024

// AnyController is the controller ID of a Connect that lets a dynamic
// controller choose.
const AnyController = 0xFFFF

// ConnectData is the data of a Fabrics Connect (Base 6.3, figure "Connect
// Command – Data"):
//
//	0 host ID (16)  16 controller ID  256 subsystem NQN  512 host NQN
type ConnectData struct {
	HostID  UUID
	CNTLID  uint16
	SubNQN  string
	HostNQN string
}

func (d *ConnectData) layout(l layout) {
	l.bytes(0, d.HostID[:])
	l.u16(16, &d.CNTLID)
	l.nul(256, 256, &d.SubNQN)
	l.nul(512, 256, &d.HostNQN)
}

// Append appends the 1024 bytes.
func (d ConnectData) Append(b []byte) []byte {
	b, p := grow(b, ConnectDataSize)
	d.layout(layout{p, true})
	return b
}

// ParseConnectData decodes the first 1024 bytes of b.
func ParseConnectData(b []byte) (d ConnectData, err error) {
	if err := need("Connect data", b, ConnectDataSize); err != nil {
		return d, err
	}
	d.layout(layout{b, false})
	return d, nil
}

// ConnectResult is dword 0 of a successful Connect's completion.
type ConnectResult uint32

// CNTLID returns the controller ID.
func (r ConnectResult) CNTLID() uint16 { return uint16(r) }

// AuthRequired says whether the controller wants in-band authentication before
// anything else (bits 17 and 18).
func (r ConnectResult) AuthRequired() bool { return r>>16&6 != 0 }

// ConnectParameter is dword 0 of a Connect that failed with
// [StatusConnectInvalidParameters]: where the offending parameter is.
type ConnectParameter uint32

// Offset returns the parameter's byte offset, and whether it lies in the data
// instead of the command.
func (p ConnectParameter) Offset() (offset uint16, inData bool) {
	return uint16(p), p>>16&1 != 0
}

func (p ConnectParameter) String() string {
	off, inData := p.Offset()
	if inData {
		switch off {
		case 0:
			return "host ID"
		case 16:
			return "controller ID"
		case 256:
			return "subsystem NQN"
		case 512:
			return "host NQN"
		}
		return "data byte " + itoa(off)
	}
	switch off {
	case 42:
		return "queue ID"
	case 44:
		return "queue size (SQSIZE)"
	case 46:
		return "attributes (CATTR)"
	case 48:
		return "keep-alive timeout (KATO)"
	}
	return "command byte " + itoa(off)
}
