package nbd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Holder is somebody who uses a device.
type Holder struct {
	Kind    string `json:"kind"` // "process", "mount", "swap" or "device"
	PID     int    `json:"pid,omitempty"`
	Command string `json:"command,omitempty"`
	Device  string `json:"device"`          // /dev/nbdN, or a partition of it
	Where   string `json:"where,omitempty"` // the mount point, or the device that stands on this one
}

// String is for people.
func (h Holder) String() string {
	switch h.Kind {
	case "process":
		return fmt.Sprintf("process %d (%s) has %s open", h.PID, h.Command, h.Device)
	case "mount":
		return fmt.Sprintf("%s is mounted on %s", h.Device, h.Where)
	case "swap":
		return fmt.Sprintf("%s is swap space", h.Device)
	default:
		return fmt.Sprintf("%s stands on %s", h.Where, h.Device)
	}
}

// BusyError is a device that is in use: by the holders, by requests that wait, or as a whole by another NBD client (PID).
type BusyError struct {
	Index   int
	PID     int    // the thread that connected the device; 0 if it is ours
	Backend string // what that one said it is connected to, if anything
	Holders []Holder
	Waiting bool // it has requests that nobody answers
}

// Error says who uses it.
func (e *BusyError) Error() string {
	switch {
	case e.PID != 0 && e.Backend != "":
		return fmt.Sprintf("%s is connected already, by process %d to %s", devPath(e.Index), e.PID, e.Backend)
	case e.PID != 0:
		return fmt.Sprintf("%s is connected already, by process %d", devPath(e.Index), e.PID)
	case len(e.Holders) == 0 && e.Waiting:
		return devPath(e.Index) + " has requests waiting"
	case len(e.Holders) == 0:
		return devPath(e.Index) + " is in use"
	}
	var s []string
	for i, h := range e.Holders {
		if i == 4 {
			s = append(s, fmt.Sprintf("and %d more", len(e.Holders)-i))
			break
		}
		s = append(s, h.String())
	}
	return devPath(e.Index) + " is in use: " + strings.Join(s, "; ")
}

// Unwrap is EBUSY.
func (e *BusyError) Unwrap() error { return unix.EBUSY }

// Holders are those who use the device now; a short visit, such as a udev probe, counts as well.
func (a *Attachment) Holders() []Holder { return holders(a.Index, -1) }

// holders finds who uses the device or one of its partitions, as far as this process may see. except is a
// descriptor of this process that does not count.
func holders(index, except int) []Holder {
	names := map[uint64]string{} // by device number
	for _, n := range append([]int{0}, partitions(index)...) {
		sys, dev := sysPath(index, "dev"), devPath(index)
		if n > 0 {
			part := fmt.Sprintf("nbd%dp%d", index, n)
			sys, dev = sysPath(index, part, "dev"), "/dev/"+part
		}
		if number, err := deviceNumber(sys); err == nil {
			names[number] = dev
		}
	}
	var out []Holder
	out = append(out, standingOn(index, names)...)
	seen := map[string]bool{} // mount namespaces
	processes, _ := os.ReadDir("/proc")
	for _, p := range processes {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		ns, err := os.Readlink(filepath.Join("/proc", p.Name(), "ns/mnt"))
		if err == nil && !seen[ns] {
			seen[ns] = true
			for _, m := range mountsOf(pid, names) {
				if !slices.Contains(out, m) {
					out = append(out, m)
				}
			}
		}
		if h, ok := openBy(pid, names, except); ok {
			out = append(out, h)
		}
	}
	return out
}

// standingOn finds device mapper, RAID and loop devices, and swap.
func standingOn(index int, names map[uint64]string) (out []Holder) {
	for _, pattern := range []string{sysPath(index, "holders/*"), sysPath(index, fmt.Sprintf("nbd%dp*/holders/*", index))} {
		list, _ := filepath.Glob(pattern)
		for _, path := range list {
			out = append(out, Holder{Kind: "device", Device: "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(path))), Where: "/dev/" + filepath.Base(path)})
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range loops {
		b, _ := os.ReadFile(path)
		if dev, ok := named(strings.TrimSuffix(string(b), "\n"), names); ok {
			out = append(out, Holder{Kind: "device", Device: dev, Where: "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(path)))})
		}
	}
	swaps, _ := os.ReadFile("/proc/swaps")
	for line := range strings.Lines(string(swaps)) {
		if f := strings.Fields(line); len(f) > 0 {
			if dev, ok := named(f[0], names); ok {
				out = append(out, Holder{Kind: "swap", Device: dev})
			}
		}
	}
	return out
}

// named says which of the devices the file at path is.
func named(path string, names map[uint64]string) (string, bool) {
	if !strings.HasPrefix(path, "/") {
		return "", false
	}
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", false
	}
	dev, ok := names[st.Rdev]
	return dev, ok
}

// mountsOf finds mounts in the mount namespace of a process (proc_pid_mountinfo(5): field 3 is the device's
// number, field 5 the mount point).
func mountsOf(pid int, names map[uint64]string) (out []Holder) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		var major, minor uint32
		if n, _ := fmt.Sscanf(f[2], "%d:%d", &major, &minor); n != 2 {
			continue
		}
		if dev, ok := names[unix.Mkdev(major, minor)]; ok {
			out = append(out, Holder{Kind: "mount", Device: dev, Where: f[4]})
		}
	}
	return out
}

// openBy says whether a process has one of the devices open.
func openBy(pid int, names map[uint64]string, except int) (Holder, bool) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, _ := os.ReadDir(dir)
	for _, fd := range fds {
		if pid == os.Getpid() && fd.Name() == strconv.Itoa(except) {
			continue
		}
		path := filepath.Join(dir, fd.Name())
		// looking at the name first spares a stat of what might hang
		if target, err := os.Readlink(path); err != nil || !strings.HasPrefix(target, "/") || !strings.Contains(target, "nbd") {
			continue
		}
		if dev, ok := named(path, names); ok {
			command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			return Holder{Kind: "process", PID: pid, Command: strings.TrimSpace(string(command)), Device: dev}, true
		}
	}
	return Holder{}, false
}
