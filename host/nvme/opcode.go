package nvme

import "fmt"

// Opcode is byte 0 of a command. Admin and I/O opcodes overlap, so its name
// depends on the queue.
type Opcode uint8

// Admin commands (Base 5, figure "Opcodes for Admin Commands").
const (
	AdminDeleteSQ       Opcode = 0x00
	AdminCreateSQ       Opcode = 0x01
	AdminGetLogPage     Opcode = 0x02
	AdminDeleteCQ       Opcode = 0x04
	AdminCreateCQ       Opcode = 0x05
	AdminIdentify       Opcode = 0x06
	AdminAbort          Opcode = 0x08
	AdminSetFeatures    Opcode = 0x09
	AdminGetFeatures    Opcode = 0x0A
	AdminAsyncEvent     Opcode = 0x0C
	AdminNamespaceMgmt  Opcode = 0x0D
	AdminFirmwareCommit Opcode = 0x10
	AdminFirmwareLoad   Opcode = 0x11
	AdminDeviceSelfTest Opcode = 0x14
	AdminNamespaceAtt   Opcode = 0x15
	AdminKeepAlive      Opcode = 0x18
	AdminFormatNVM      Opcode = 0x80
	AdminSecuritySend   Opcode = 0x81
	AdminSecurityRecv   Opcode = 0x82
	AdminSanitize       Opcode = 0x84
)

// NVM command set I/O commands (NVM 3, figure "Opcodes for NVM Commands").
const (
	IOFlush              Opcode = 0x00
	IOWrite              Opcode = 0x01
	IORead               Opcode = 0x02
	IOWriteUncorrectable Opcode = 0x04
	IOCompare            Opcode = 0x05
	IOWriteZeroes        Opcode = 0x08
	IODatasetManagement  Opcode = 0x09
	IOVerify             Opcode = 0x0C
	IOCopy               Opcode = 0x19
)

// OpcodeFabrics marks a Fabrics command on either kind of queue (Base 6); what
// it is stands in [Command.FabricsType].
const OpcodeFabrics Opcode = 0x7F

var adminNames = map[Opcode]string{
	AdminDeleteSQ: "Delete I/O Submission Queue", AdminCreateSQ: "Create I/O Submission Queue",
	AdminGetLogPage: "Get Log Page", AdminDeleteCQ: "Delete I/O Completion Queue",
	AdminCreateCQ: "Create I/O Completion Queue", AdminIdentify: "Identify", AdminAbort: "Abort",
	AdminSetFeatures: "Set Features", AdminGetFeatures: "Get Features",
	AdminAsyncEvent: "Asynchronous Event Request", AdminNamespaceMgmt: "Namespace Management",
	AdminFirmwareCommit: "Firmware Commit", AdminFirmwareLoad: "Firmware Image Download",
	AdminDeviceSelfTest: "Device Self-test", AdminNamespaceAtt: "Namespace Attachment",
	AdminKeepAlive: "Keep Alive", AdminFormatNVM: "Format NVM", AdminSecuritySend: "Security Send",
	AdminSecurityRecv: "Security Receive", AdminSanitize: "Sanitize", OpcodeFabrics: "Fabrics",
}

var ioNames = map[Opcode]string{
	IOFlush: "Flush", IOWrite: "Write", IORead: "Read", IOWriteUncorrectable: "Write Uncorrectable",
	IOCompare: "Compare", IOWriteZeroes: "Write Zeroes", IODatasetManagement: "Dataset Management",
	IOVerify: "Verify", IOCopy: "Copy", OpcodeFabrics: "Fabrics",
}

// Name returns the command's name in the specification's words.
func (o Opcode) Name(admin bool) string {
	names := ioNames
	if admin {
		names = adminNames
	}
	if s, ok := names[o]; ok {
		return s
	}
	if admin {
		return fmt.Sprintf("admin command %#02x", uint8(o))
	}
	return fmt.Sprintf("I/O command %#02x", uint8(o))
}

// FabricsType is the Fabrics command type, byte 4 of a Fabrics command (Base 6,
// figure "Fabrics Command Types").
type FabricsType uint8

// Fabrics command types.
const (
	FabricsPropertySet FabricsType = 0x00
	FabricsConnect     FabricsType = 0x01
	FabricsPropertyGet FabricsType = 0x04
	FabricsAuthSend    FabricsType = 0x05
	FabricsAuthRecv    FabricsType = 0x06
	FabricsDisconnect  FabricsType = 0x08
)

func (t FabricsType) String() string {
	switch t {
	case FabricsPropertySet:
		return "Property Set"
	case FabricsConnect:
		return "Connect"
	case FabricsPropertyGet:
		return "Property Get"
	case FabricsAuthSend:
		return "Authentication Send"
	case FabricsAuthRecv:
		return "Authentication Receive"
	case FabricsDisconnect:
		return "Disconnect"
	}
	return fmt.Sprintf("Fabrics command %#02x", uint8(t))
}
