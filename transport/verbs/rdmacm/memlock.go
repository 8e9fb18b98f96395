package rdmacm

import (
	"bufio"
	"bytes"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
)

// capIPCLock is the number of CAP_IPC_LOCK, which lifts RLIMIT_MEMLOCK.
const capIPCLock = 14

// lockedMemory is what /proc/self/status says of pinned memory and of the right to pin without limit.
type lockedMemory struct {
	pinned    uint64 // bytes
	unlimited bool
}

// parseStatus reads the lines VmPin (KiB) and CapEff (hexadecimal) of /proc/PID/status.
func parseStatus(status []byte) lockedMemory {
	var m lockedMemory
	for s := bufio.NewScanner(bytes.NewReader(status)); s.Scan(); {
		key, value, _ := strings.Cut(s.Text(), ":")
		fields := strings.Fields(value)
		if len(fields) == 0 {
			continue
		}
		switch key {
		case "VmPin":
			kib, _ := strconv.ParseUint(fields[0], 10, 64)
			m.pinned = kib << 10
		case "CapEff":
			caps, _ := strconv.ParseUint(fields[0], 16, 64)
			m.unlimited = caps&(1<<capIPCLock) != 0
		}
	}
	return m
}

// checkMemlock tells whether n more bytes can be pinned. The kernel compares all that the process has pinned with
// the soft limit. refused says that the kernel said ENOMEM: then a capability did not help (a user namespace's).
func checkMemlock(n uint64, refused bool) error {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) != nil || limit.Cur == unix.RLIM_INFINITY {
		return nil
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil // unknown: let the kernel decide
	}
	m := parseStatus(status)
	if m.unlimited && !refused || m.pinned+n <= limit.Cur {
		return nil
	}
	return &verbs.MemlockError{Need: m.pinned + n, Limit: limit.Cur}
}
