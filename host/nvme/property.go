package nvme

import (
	"fmt"
	"time"
)

// Property is the offset of a controller property (Base 3.1.3).
type Property uint32

// Controller properties that exist on fabrics.
const (
	PropertyCAP  Property = 0x00 // 8 bytes
	PropertyVS   Property = 0x08
	PropertyCC   Property = 0x14
	PropertyCSTS Property = 0x1C
	PropertyNSSR Property = 0x20
	PropertyCRTO Property = 0x68
)

// Wide says whether the property is 8 bytes long; the others are 4.
func (p Property) Wide() bool { return p == PropertyCAP }

func (p Property) attrib() byte {
	if p.Wide() {
		return 1
	}
	return 0
}

func (p Property) String() string {
	switch p {
	case PropertyCAP:
		return "CAP"
	case PropertyVS:
		return "VS"
	case PropertyCC:
		return "CC"
	case PropertyCSTS:
		return "CSTS"
	case PropertyNSSR:
		return "NSSR"
	case PropertyCRTO:
		return "CRTO"
	}
	return fmt.Sprintf("property %#x", uint32(p))
}

// Capabilities is the CAP property (Base 3.1.3.1).
type Capabilities uint64

// MaxEntries returns the most entries of a queue: MQES, made 1-based.
func (c Capabilities) MaxEntries() int { return int(c&0xFFFF) + 1 }

// Timeout returns TO, the longest wait for CSTS.RDY to change.
func (c Capabilities) Timeout() time.Duration {
	return time.Duration(c>>24&0xFF) * 500 * time.Millisecond
}

// CommandSets returns CSS; bit 0 is the NVM command set, bit 6 means that
// Identify tells, bit 7 that there is none.
func (c Capabilities) CommandSets() uint8 { return uint8(c >> 37) }

// MinPageSize returns the bytes of the smallest memory page (MPSMIN), the unit
// of MDTS.
func (c Capabilities) MinPageSize() int { return 1 << (12 + c>>48&0xF) }

// MaxPageSize returns the bytes of the largest memory page (MPSMAX).
func (c Capabilities) MaxPageSize() int { return 1 << (12 + c>>52&0xF) }

// MakeCapabilities builds CAP as a fabrics controller shows it: contiguous
// queues, the NVM command set, and pages of 4 KiB only.
func MakeCapabilities(maxEntries int, timeout time.Duration) Capabilities {
	to := min((timeout+499*time.Millisecond)/(500*time.Millisecond), 255)
	return Capabilities(uint16(maxEntries-1)) | 1<<16 | Capabilities(to)<<24 | 1<<37
}

// Configuration is the CC property (Base 3.1.3.5).
type Configuration uint32

// Bits of CC. An orderly shutdown sets ConfigShutdown.
const (
	ConfigEnable       Configuration = 1 << 0
	ConfigShutdown     Configuration = 1 << 14 // SHN 01b, normal
	ConfigAbrupt       Configuration = 2 << 14 // SHN 10b, abrupt
	configShutdownMask Configuration = 3 << 14
)

// EnableConfiguration is CC with the controller enabled, the NVM command set,
// 4 KiB pages, and entries of 64 and 16 bytes.
const EnableConfiguration = ConfigEnable | 6<<16 | 4<<20

// Enabled returns EN.
func (c Configuration) Enabled() bool { return c&ConfigEnable != 0 }

// ShutdownRequested says whether SHN asks for a shutdown of either kind.
func (c Configuration) ShutdownRequested() bool { return c&configShutdownMask != 0 }

// CommandSet returns CSS.
func (c Configuration) CommandSet() uint8 { return uint8(c >> 4 & 7) }

// PageShift returns the memory page size in use as a power of two (MPS + 12).
func (c Configuration) PageShift() int { return int(c>>7&0xF) + 12 }

// EntryShifts returns the sizes of submission and completion queue entries as
// powers of two (IOSQES, IOCQES).
func (c Configuration) EntryShifts() (sq, cq int) { return int(c >> 16 & 0xF), int(c >> 20 & 0xF) }

// ControllerStatus is the CSTS property (Base 3.1.3.6).
type ControllerStatus uint32

// Bits of CSTS.
const (
	StatusReady            ControllerStatus = 1 << 0
	StatusFatal            ControllerStatus = 1 << 1
	StatusShutdownOngoing  ControllerStatus = 1 << 2
	StatusShutdownComplete ControllerStatus = 2 << 2
	statusShutdownMask     ControllerStatus = 3 << 2
	StatusPaused           ControllerStatus = 1 << 5
)

// Ready returns RDY.
func (s ControllerStatus) Ready() bool { return s&StatusReady != 0 }

// Fatal returns CFS.
func (s ControllerStatus) Fatal() bool { return s&StatusFatal != 0 }

// ShutdownComplete says whether SHST is 10b.
func (s ControllerStatus) ShutdownComplete() bool {
	return s&statusShutdownMask == StatusShutdownComplete
}

// Version is the VS property and Identify's VER: major, minor, tertiary.
type Version uint32

// MakeVersion builds a version number.
func MakeVersion(major uint16, minor, tertiary uint8) Version {
	return Version(major)<<16 | Version(minor)<<8 | Version(tertiary)
}

func (v Version) String() string {
	if v&0xFF != 0 {
		return fmt.Sprintf("%d.%d.%d", v>>16, v>>8&0xFF, v&0xFF)
	}
	return fmt.Sprintf("%d.%d", v>>16, v>>8&0xFF)
}
