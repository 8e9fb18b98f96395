package nvme

import "fmt"

// AsyncEvent is dword 0 of a completed Asynchronous Event Request (Base 5.2.1):
// type in 2:0, information in 15:8, log page in 23:16.
type AsyncEvent uint32

// Event types.
const (
	EventError     = 0
	EventSMART     = 1
	EventNotice    = 2
	EventImmediate = 3
	EventIO        = 6
	EventVendor    = 7
)

// The notices that a host acts on.
const (
	EventNamespaceChanged   AsyncEvent = EventNotice | 0x00<<8 | AsyncEvent(LogChangedNamespaces)<<16
	EventFirmwareActivation AsyncEvent = EventNotice | 0x01<<8 | AsyncEvent(LogFirmware)<<16
	EventANAChanged         AsyncEvent = EventNotice | 0x03<<8 | AsyncEvent(LogANA)<<16
	EventDiscoveryChanged   AsyncEvent = EventNotice | 0xF0<<8 | AsyncEvent(LogDiscovery)<<16
)

// Type returns the event type.
func (e AsyncEvent) Type() uint8 { return uint8(e & 7) }

// Info returns the event information, whose meaning depends on the type.
func (e AsyncEvent) Info() uint8 { return uint8(e >> 8) }

// LogID returns the log page to read, which arms the event again.
func (e AsyncEvent) LogID() LogID { return LogID(e >> 16) }

func (e AsyncEvent) String() string {
	switch e & 0xFFFF07 {
	case EventNamespaceChanged:
		return "namespace attributes changed"
	case EventFirmwareActivation:
		return "firmware activation starting"
	case EventANAChanged:
		return "asymmetric namespace access changed"
	case EventDiscoveryChanged:
		return "discovery log changed"
	}
	switch e.Type() {
	case EventError:
		return fmt.Sprintf("error event %#02x", e.Info())
	case EventSMART:
		return fmt.Sprintf("health event %#02x", e.Info())
	}
	return fmt.Sprintf("event type %d info %#02x log page %#02x", e.Type(), e.Info(), uint8(e.LogID()))
}
