package nbd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelState is what sysfs says about /dev/nbdN.
type kernelState struct {
	exists    bool
	connected bool
	pid       int    // the thread that connected; 0 if not connected
	backend   string // the identifier it was connected with
	size      int64  // bytes
	queues    int    // hardware queues, which is how many sockets it was connected with
}

func sysPath(index int, name ...string) string {
	return filepath.Join(append([]string{"/sys/block", "nbd" + strconv.Itoa(index)}, name...)...)
}

func devPath(index int) string { return "/dev/nbd" + strconv.Itoa(index) }

func readState(index int) (s kernelState) {
	if _, err := os.Stat(sysPath(index)); err != nil {
		return s
	}
	s.exists = true
	if b, err := os.ReadFile(sysPath(index, "pid")); err == nil {
		s.connected = true
		s.pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if b, err := os.ReadFile(sysPath(index, "backend")); err == nil {
		s.backend = strings.TrimSuffix(string(b), "\n")
	}
	if b, err := os.ReadFile(sysPath(index, "size")); err == nil {
		n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		s.size = n * 512 // always in units of 512 bytes
	}
	if list, err := os.ReadDir(sysPath(index, "mq")); err == nil {
		s.queues = len(list)
	}
	return s
}

// requestsWait says whether a device has requests that are not answered. Those that its process had taken are in inflight
// (Documentation/ABI/stable/sysfs-block: reads, writes). Those that wait for a process to take them are not; they only
// have tags, which debugfs tells of, where it is mounted.
func requestsWait(index int) bool {
	b, _ := os.ReadFile(sysPath(index, "inflight"))
	if slices.ContainsFunc(strings.Fields(string(b)), func(n string) bool { return n != "0" }) {
		return true
	}
	tags, _ := filepath.Glob(fmt.Sprintf("/sys/kernel/debug/block/nbd%d/hctx*/*tags", index)) // sched_tags: with a scheduler
	return slices.ContainsFunc(tags, func(name string) bool {
		b, _ := os.ReadFile(name)
		return slices.ContainsFunc(strings.Fields(string(b)), func(f string) bool {
			n, ok := strings.CutPrefix(f, "busy=") // of sbitmaps
			return ok && n != "0"
		})
	})
}

// indices are the NBD devices that the kernel has, connected or not.
func indices() ([]int, error) {
	list, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	var out []int
	for _, e := range list {
		if n, ok := strings.CutPrefix(e.Name(), "nbd"); ok {
			if i, err := strconv.Atoi(n); err == nil {
				out = append(out, i)
			}
		}
	}
	return out, nil
}

// partitions gives the numbers of a device's partitions.
func partitions(index int) []int {
	list, _ := os.ReadDir(sysPath(index))
	var out []int
	for _, e := range list {
		if n, ok := strings.CutPrefix(e.Name(), fmt.Sprintf("nbd%dp", index)); ok {
			if p, err := strconv.Atoi(n); err == nil {
				out = append(out, p)
			}
		}
	}
	return out
}

// deviceNumber reads a "major:minor" file of sysfs.
func deviceNumber(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	major, minor, ok := strings.Cut(strings.TrimSpace(string(b)), ":")
	x, err1 := strconv.ParseUint(major, 10, 32)
	y, err2 := strconv.ParseUint(minor, 10, 32)
	if !ok || err1 != nil || err2 != nil {
		return 0, fmt.Errorf("%s: not a device number: %q", path, b)
	}
	return unix.Mkdev(uint32(x), uint32(y)), nil
}

// openDevice opens /dev/nbdN, which must be that device.
func openDevice(index, flags int) (*os.File, error) {
	want, err := deviceNumber(sysPath(index, "dev"))
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(devPath(index), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%w: the kernel has the device, /dev does not (no devtmpfs or udev here?); \"mknod %s b %d %d\" makes it",
				err, devPath(index), unix.Major(want), unix.Minor(want))
		}
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != want {
		f.Close()
		return nil, fmt.Errorf("%s is not the kernel's device nbd%d", devPath(index), index)
	}
	return f, nil
}
