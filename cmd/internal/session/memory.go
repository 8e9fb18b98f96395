package session

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// hardenMemory prepares this process for serving a device on which the machine's memory reclaim may depend: its
// pages stay in memory and the out-of-memory killer passes it by. What is not allowed is logged and done without.
// The I/O flusher state comes from whoever started the process.
func hardenMemory(log *slog.Logger) {
	if on, err := unix.PrctlRetInt(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0); err != nil || on != 1 {
		log.Warn("not an I/O flusher: under memory pressure, buffered writes to the exported device can block (needs CAP_SYS_RESOURCE)")
	}
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit)
	// A finite limit would count all mappings and make later ones fail, unless the process is above limits.
	if limit.Cur == unix.RLIM_INFINITY || hasCapability(unix.CAP_IPC_LOCK) {
		if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
			log.Warn("memory is not locked", "error", os.NewSyscallError("mlockall", err))
		}
	} else {
		log.Warn("memory is not locked: it needs CAP_IPC_LOCK or an unlimited RLIMIT_MEMLOCK")
	}
	if hasCapability(unix.CAP_SYS_RESOURCE) {
		if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
			log.Warn("the out-of-memory killer may choose this process", "error", err)
		}
	}
}

// hasCapability tells whether the capability is in the effective set.
func hasCapability(c uint) bool {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}
	_, rest, ok := strings.Cut(string(b), "\nCapEff:")
	if !ok {
		return false
	}
	var set uint64
	if _, err := fmt.Sscanf(strings.TrimSpace(rest), "%x", &set); err != nil {
		return false
	}
	return set&(1<<c) != 0
}

// BecomeFlusher makes every thread of this process an I/O flusher (see startFlusher) by executing the program
// anew from a thread that is one. It returns when that is done already, or not allowed.
func BecomeFlusher() {
	if on, err := unix.PrctlRetInt(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0); err != nil || on == 1 {
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0) != nil {
		return
	}
	_ = unix.Exec("/proc/self/exe", os.Args, os.Environ()) // returns only when it failed
	_ = unix.Prctl(unix.PR_SET_IO_FLUSHER, 0, 0, 0, 0)
}
