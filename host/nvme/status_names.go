package nvme

// Status codes that code here compares with. Names for all others are in the
// table below (Base 3.3.3.2.1 figures "Status Code – Generic Command Status
// Values" to "Path Related Status Values", NVM 3.1.2, Base 6).
const (
	StatusSuccess                  StatusCode = 0x000
	StatusInvalidOpcode            StatusCode = 0x001
	StatusInvalidField             StatusCode = 0x002
	StatusIDConflict               StatusCode = 0x003
	StatusDataTransferError        StatusCode = 0x004
	StatusPowerLoss                StatusCode = 0x005
	StatusInternalError            StatusCode = 0x006
	StatusAbortRequested           StatusCode = 0x007
	StatusAbortSQDeletion          StatusCode = 0x008
	StatusInvalidNamespace         StatusCode = 0x00B
	StatusSequenceError            StatusCode = 0x00C
	StatusSGLInvalidDescriptor     StatusCode = 0x00D
	StatusSGLInvalidCount          StatusCode = 0x00E
	StatusSGLInvalidLength         StatusCode = 0x00F
	StatusSGLInvalidType           StatusCode = 0x011
	StatusSGLInvalidOffset         StatusCode = 0x016
	StatusHostIDInconsistent       StatusCode = 0x018
	StatusKeepAliveExpired         StatusCode = 0x019
	StatusKeepAliveInvalid         StatusCode = 0x01A
	StatusNamespaceWriteProtected  StatusCode = 0x020
	StatusTransientTransport       StatusCode = 0x022
	StatusProhibitedByLockdown     StatusCode = 0x023
	StatusLBAOutOfRange            StatusCode = 0x080
	StatusCapacityExceeded         StatusCode = 0x081
	StatusNamespaceNotReady        StatusCode = 0x082
	StatusReservationConflict      StatusCode = 0x083
	StatusFormatInProgress         StatusCode = 0x084
	StatusCQInvalid                StatusCode = 0x100
	StatusInvalidQueueID           StatusCode = 0x101
	StatusInvalidQueueSize         StatusCode = 0x102
	StatusAbortLimit               StatusCode = 0x103
	StatusAERLimit                 StatusCode = 0x105
	StatusInvalidLogPage           StatusCode = 0x109
	StatusFeatureNotSaveable       StatusCode = 0x10D
	StatusFeatureNotChangeable     StatusCode = 0x10E
	StatusFeatureNotNamespace      StatusCode = 0x10F
	StatusConflictingAttributes    StatusCode = 0x180 // NVM commands; Connect: see below
	StatusInvalidProtection        StatusCode = 0x181 // NVM commands
	StatusReadOnlyRange            StatusCode = 0x182 // NVM commands
	StatusCommandSizeExceeded      StatusCode = 0x183 // NVM commands
	StatusConnectFormat            StatusCode = 0x180
	StatusConnectControllerBusy    StatusCode = 0x181
	StatusConnectInvalidParameters StatusCode = 0x182
	StatusConnectRestartDiscovery  StatusCode = 0x183
	StatusConnectInvalidHost       StatusCode = 0x184
	StatusConnectInvalidQueueType  StatusCode = 0x185
	StatusDiscoverRestart          StatusCode = 0x190
	StatusAuthRequired             StatusCode = 0x191
	StatusWriteFault               StatusCode = 0x280
	StatusUnrecoveredRead          StatusCode = 0x281
	StatusGuardCheck               StatusCode = 0x282
	StatusCompareFailure           StatusCode = 0x285
	StatusAccessDenied             StatusCode = 0x286
	StatusInternalPathError        StatusCode = 0x300
	StatusANAPersistentLoss        StatusCode = 0x301
	StatusANAInaccessible          StatusCode = 0x302
	StatusANATransition            StatusCode = 0x303
	StatusControllerPathError      StatusCode = 0x360
	StatusHostPathError            StatusCode = 0x370
	StatusHostAborted              StatusCode = 0x371
)

var statusNames = map[StatusCode]string{
	0x000: "successful completion",
	0x001: "invalid command opcode",
	0x002: "invalid field in command",
	0x003: "command ID conflict",
	0x004: "data transfer error",
	0x005: "aborted due to power loss",
	0x006: "internal error",
	0x007: "command aborted on request",
	0x008: "aborted because the submission queue was deleted",
	0x009: "aborted because the other fused command failed",
	0x00A: "aborted because the other fused command is missing",
	0x00B: "invalid namespace or format",
	0x00C: "command sequence error",
	0x00D: "invalid SGL segment descriptor",
	0x00E: "invalid number of SGL descriptors",
	0x00F: "data SGL length invalid",
	0x010: "metadata SGL length invalid",
	0x011: "SGL descriptor type invalid",
	0x012: "invalid use of controller memory buffer",
	0x013: "PRP offset invalid",
	0x014: "atomic write unit exceeded",
	0x015: "operation denied",
	0x016: "SGL offset invalid",
	0x018: "host identifier inconsistent format",
	0x019: "keep alive timer expired",
	0x01A: "keep alive timeout invalid",
	0x01B: "aborted due to preempt and abort",
	0x01C: "sanitize failed",
	0x01D: "sanitize in progress",
	0x01E: "SGL data block granularity invalid",
	0x01F: "command not supported for queue in controller memory buffer",
	0x020: "namespace is write protected",
	0x021: "command interrupted",
	0x022: "transient transport error",
	0x023: "command prohibited by command and feature lockdown",
	0x024: "admin command media not ready",
	0x025: "invalid key tag",
	0x026: "host dispersed namespace support not enabled",
	0x027: "host identifier not initialized",
	0x028: "incorrect key",
	0x029: "FDP disabled",
	0x02A: "invalid placement handle list",
	0x080: "LBA out of range",
	0x081: "capacity exceeded",
	0x082: "namespace not ready",
	0x083: "reservation conflict",
	0x084: "format in progress",
	0x085: "invalid value size",
	0x086: "invalid key size",
	0x087: "KV key does not exist",
	0x088: "unrecovered error",
	0x089: "key exists",

	0x100: "completion queue invalid",
	0x101: "invalid queue identifier",
	0x102: "invalid queue size",
	0x103: "abort command limit exceeded",
	0x105: "asynchronous event request limit exceeded",
	0x106: "invalid firmware slot",
	0x107: "invalid firmware image",
	0x108: "invalid interrupt vector",
	0x109: "invalid log page",
	0x10A: "invalid format",
	0x10B: "firmware activation requires conventional reset",
	0x10C: "invalid queue deletion",
	0x10D: "feature identifier not saveable",
	0x10E: "feature not changeable",
	0x10F: "feature not namespace specific",
	0x110: "firmware activation requires NVM subsystem reset",
	0x111: "firmware activation requires controller level reset",
	0x112: "firmware activation requires maximum time violation",
	0x113: "firmware activation prohibited",
	0x114: "overlapping range",
	0x115: "namespace insufficient capacity",
	0x116: "namespace identifier unavailable",
	0x118: "namespace already attached",
	0x119: "namespace is private",
	0x11A: "namespace not attached",
	0x11B: "thin provisioning not supported",
	0x11C: "controller list invalid",
	0x11D: "device self-test in progress",
	0x11E: "boot partition write prohibited",
	0x11F: "invalid controller identifier",
	0x120: "invalid secondary controller state",
	0x121: "invalid number of controller resources",
	0x122: "invalid resource identifier",
	0x123: "sanitize prohibited while persistent memory region is enabled",
	0x124: "ANA group identifier invalid",
	0x125: "ANA attach failed",
	0x126: "insufficient capacity",
	0x127: "namespace attachment limit exceeded",
	0x128: "prohibition of command execution not supported",
	0x129: "I/O command set not supported",
	0x12A: "I/O command set not enabled",
	0x12B: "I/O command set combination rejected",
	0x12C: "invalid I/O command set",
	0x12D: "identifier unavailable",
	0x12E: "namespace is dispersed",
	0x12F: "invalid discovery information",
	0x130: "zoning data structure locked",
	0x131: "zoning data structure not found",
	0x132: "insufficient discovery resources",
	0x133: "requested function disabled",
	0x134: "zone group originator invalid",
	0x135: "invalid host",
	0x136: "invalid NVM subsystem",
	0x137: "invalid controller data queue",
	0x138: "not enough resources",
	0x139: "controller suspended",
	0x13A: "controller not suspended",
	0x13B: "controller data queue full",

	0x180: "incompatible format, or conflicting attributes",
	0x181: "controller busy, or invalid protection information",
	0x182: "invalid parameters, or write to a read only range",
	0x183: "restart discovery, or command size limit exceeded",
	0x184: "host not allowed to connect, or invalid discovery namespace",
	0x185: "invalid queue type, or incompatible namespace",
	0x186: "fast copy not possible",
	0x187: "overlapping I/O range",
	0x188: "namespace not reachable",
	0x189: "insufficient resources",
	0x190: "discovery must be restarted",
	0x191: "authentication required",
	0x1B8: "zone boundary error",
	0x1B9: "zone is full",
	0x1BA: "zone is read only",
	0x1BB: "zone is offline",
	0x1BC: "invalid write to a zone",
	0x1BD: "too many active zones",
	0x1BE: "too many open zones",
	0x1BF: "invalid zone state transition",

	0x280: "write fault",
	0x281: "unrecovered read error",
	0x282: "end-to-end guard check error",
	0x283: "end-to-end application tag check error",
	0x284: "end-to-end reference tag check error",
	0x285: "compare failure",
	0x286: "access denied",
	0x287: "deallocated or unwritten logical block",
	0x288: "end-to-end storage tag check error",

	0x300: "internal path error",
	0x301: "asymmetric access persistent loss",
	0x302: "asymmetric access inaccessible",
	0x303: "asymmetric access transition",
	0x360: "controller pathing error",
	0x370: "host pathing error",
	0x371: "command aborted by host",
}

// connectNames and ioStatusNames tell apart the codes that mean one thing for
// Connect and another for commands of the NVM command set.
var connectNames = map[StatusCode]string{
	0x180: "incompatible record format",
	0x181: "controller busy",
	0x182: "invalid parameters",
	0x183: "restart discovery",
	0x184: "host not allowed to connect to this subsystem",
	0x185: "invalid queue type",
}

var ioStatusNames = map[StatusCode]string{
	0x180: "conflicting attributes",
	0x181: "invalid protection information",
	0x182: "attempted write to a read only range",
	0x183: "command size limit exceeded",
	0x184: "invalid namespace",
	0x185: "incompatible namespace",
}
