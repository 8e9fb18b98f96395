package nvme

import "fmt"

// FeatureID names a feature of Set and Get Features (Base 5.27.1).
type FeatureID uint8

// Features.
const (
	FeatureArbitration        FeatureID = 0x01
	FeaturePowerManagement    FeatureID = 0x02
	FeatureTemperature        FeatureID = 0x04
	FeatureErrorRecovery      FeatureID = 0x05
	FeatureVolatileWriteCache FeatureID = 0x06
	FeatureNumberOfQueues     FeatureID = 0x07
	FeatureInterruptCoalesce  FeatureID = 0x08
	FeatureInterruptVector    FeatureID = 0x09
	FeatureWriteAtomicity     FeatureID = 0x0A
	FeatureAsyncEvents        FeatureID = 0x0B
	FeatureTimestamp          FeatureID = 0x0E
	FeatureKeepAlive          FeatureID = 0x0F // CDW11 and result: milliseconds
	FeatureHostBehavior       FeatureID = 0x16
	FeatureHostID             FeatureID = 0x81
	FeatureReservationMask    FeatureID = 0x82
	FeatureReservationPersist FeatureID = 0x83
	FeatureWriteProtection    FeatureID = 0x84
)

func (f FeatureID) String() string {
	switch f {
	case FeatureVolatileWriteCache:
		return "Volatile Write Cache"
	case FeatureNumberOfQueues:
		return "Number of Queues"
	case FeatureAsyncEvents:
		return "Asynchronous Event Configuration"
	case FeatureKeepAlive:
		return "Keep Alive Timer"
	case FeatureHostBehavior:
		return "Host Behavior Support"
	case FeatureHostID:
		return "Host Identifier"
	}
	return fmt.Sprintf("feature %#02x", uint8(f))
}

// QueueCount is CDW11 and the result of the Number of Queues feature (Base
// 5.27.1.5): submission queues in 15:0, completion queues in 31:16, 0-based.
type QueueCount uint32

// MakeQueueCount asks for, or grants, n I/O queues of each kind, n >= 1.
func MakeQueueCount(n int) QueueCount {
	v := uint32(min(max(n, 1), 0xFFFF) - 1)
	return QueueCount(v | v<<16)
}

// Queues returns the pairs of queues that this makes, 1-based.
func (q QueueCount) Queues() int { return int(min(q&0xFFFF, q>>16)) + 1 }
