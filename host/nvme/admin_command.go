package nvme

// CNS says which data structure an Identify command asks for (Base 5.17.1).
type CNS uint8

// Identify data structures.
const (
	CNSNamespace            CNS = 0x00
	CNSController           CNS = 0x01
	CNSActiveNamespaces     CNS = 0x02
	CNSNamespaceDescriptors CNS = 0x03
	CNSNVMSetList           CNS = 0x04
	CNSCommandSetNamespace  CNS = 0x05
	CNSCommandSetController CNS = 0x06
	CNSCommandSetActive     CNS = 0x07
	CNSIndependentNamespace CNS = 0x08
	CNSAllocatedNamespaces  CNS = 0x10
	CNSAllocatedNamespace   CNS = 0x11
	CNSNamespaceControllers CNS = 0x12
	CNSControllers          CNS = 0x13
	CNSCommandSets          CNS = 0x1C
)

// IdentifySize is the size in bytes of every Identify data structure.
const IdentifySize = 4096

// FillIdentify fills an Identify command. cntid selects a controller for the
// few structures that need one, else 0.
func (c *Command) FillIdentify(cns CNS, nsid uint32, cntid uint16) {
	c.fill(AdminIdentify, nsid)
	c.SetDW(10, uint32(cns)|uint32(cntid)<<16)
}

// CNS returns what an Identify command asks for.
func (c *Command) CNS() CNS { return CNS(c[40]) }

// IdentifyController returns the controller ID of an Identify command.
func (c *Command) IdentifyController() uint16 { return c.u16(42) }

// CSI returns the command set identifier of an Identify command; 0 is NVM.
func (c *Command) CSI() uint8 { return c[47] }

// LogID names a log page (Base 5.16.1).
type LogID uint8

// Log pages.
const (
	LogSupported         LogID = 0x00
	LogError             LogID = 0x01
	LogSMART             LogID = 0x02
	LogFirmware          LogID = 0x03
	LogChangedNamespaces LogID = 0x04
	LogEffects           LogID = 0x05
	LogSelfTest          LogID = 0x06
	LogTelemetryHost     LogID = 0x07
	LogTelemetryCtrl     LogID = 0x08
	LogANA               LogID = 0x0C
	LogPersistentEvent   LogID = 0x0D
	LogFeatureEffects    LogID = 0x12
	LogDiscovery         LogID = 0x70
	LogReservation       LogID = 0x80
)

// FillGetLogPage fills a Get Log Page (Base 5.16) of length bytes, a multiple
// of 4 and at least 4, from byte offset. retain (RAE) keeps the log's pending
// asynchronous event; a read without it arms the event again.
func (c *Command) FillGetLogPage(id LogID, nsid uint32, offset uint64, length uint32, retain bool) {
	c.fill(AdminGetLogPage, nsid)
	numd := length/4 - 1
	c.SetDW(10, uint32(id)|numd<<16)
	c.orDW(10, 1<<15, retain)
	c.SetDW(11, numd>>16)
	c.setU64(48, offset)
}

// LogID returns the log page of a Get Log Page.
func (c *Command) LogID() LogID { return LogID(c[40]) }

// LogSpecific returns LSP, bits 14:8 of CDW10 (7 bits since Base 2.0).
func (c *Command) LogSpecific() uint8 { return c[41] & 0x7F }

// SetLogSpecific sets LSP.
func (c *Command) SetLogSpecific(v uint8) { c[41] = c[41]&0x80 | v&0x7F }

// RetainEvent returns RAE of a Get Log Page.
func (c *Command) RetainEvent() bool { return c[41]&0x80 != 0 }

// LogLength returns the bytes that a Get Log Page asks for; up to 16 GiB.
func (c *Command) LogLength() uint64 {
	return (uint64(c.u16(42))|uint64(c.u16(44))<<16)*4 + 4
}

// LogOffset returns the byte offset of a Get Log Page.
func (c *Command) LogOffset() uint64 { return c.u64(48) }

// FillSetFeatures fills a Set Features (Base 5.27) with its value in CDW11.
// Features with data want the SGL set as well.
func (c *Command) FillSetFeatures(id FeatureID, nsid, value uint32) {
	c.fill(AdminSetFeatures, nsid)
	c.SetDW(10, uint32(id))
	c.SetDW(11, value)
}

// FillGetFeatures fills a Get Features (Base 5.15) for the current value.
func (c *Command) FillGetFeatures(id FeatureID, nsid uint32) {
	c.fill(AdminGetFeatures, nsid)
	c.SetDW(10, uint32(id))
}

// FeatureID returns the feature of a Set or Get Features.
func (c *Command) FeatureID() FeatureID { return FeatureID(c[40]) }

// FeatureSelect returns SEL of a Get Features: 0 current, 1 default, 2 saved,
// 3 supported capabilities.
func (c *Command) FeatureSelect() uint8 { return c[41] & 7 }

// FeatureSave returns SV of a Set Features.
func (c *Command) FeatureSave() bool { return c[43]&0x80 != 0 }

// FillAsyncEventRequest fills an Asynchronous Event Request (Base 5.2). It
// completes when something happens, which may be never.
func (c *Command) FillAsyncEventRequest() { c.fill(AdminAsyncEvent, 0) }

// FillKeepAlive fills a Keep Alive (Base 5.18).
func (c *Command) FillKeepAlive() { c.fill(AdminKeepAlive, 0) }

// FillAbort fills an Abort (Base 5.1) of command cid on queue sqid. Bit 0 of
// the result is clear when the command was aborted.
func (c *Command) FillAbort(sqid, cid uint16) {
	c.fill(AdminAbort, 0)
	c.setU16(40, sqid)
	c.setU16(42, cid)
}

// AbortTarget returns which command an Abort names.
func (c *Command) AbortTarget() (sqid, cid uint16) { return c.u16(40), c.u16(42) }
