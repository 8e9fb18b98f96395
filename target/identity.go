package target

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Hosts go on over what has the identity that they know, when they find it again. So a file's or device's identity must
// be no other's, not even after the file was made anew, or after a reboot that gave the device's name and number to
// another. What cannot be told apart so well gets a new identity each time.

// identity tells the store from every other that may come to be at its path, or is nil if nothing does.
func (b *file) identity() ([]byte, error) {
	var st unix.Statx_t
	if err := unix.Statx(b.fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		return nil, &os.PathError{Op: "statx", Path: b.f.Name(), Err: err}
	}
	if b.dev {
		return deviceIdentity("/sys", st.Rdev_major, st.Rdev_minor), nil
	}
	return fileIdentity(&st), nil
}

// fileIdentity is a file's inode number, which others get after it, and its time of birth.
func fileIdentity(st *unix.Statx_t) []byte {
	if st.Mask&unix.STATX_BTIME == 0 {
		return nil
	}
	id := binary.LittleEndian.AppendUint64(nil, st.Ino)
	id = binary.LittleEndian.AppendUint64(id, uint64(st.Btime.Sec))
	return binary.LittleEndian.AppendUint32(id, st.Btime.Nsec)
}

// deviceIdentity is what the kernel knows about a block device in its sysfs: a world-wide or device-mapper name, or a
// serial number with the size. A partition has its disk's, with where it starts.
func deviceIdentity(sys string, major, minor uint32) []byte {
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "dev/block", fmt.Sprintf("%d:%d", major, minor)))
	if err != nil {
		return nil
	}
	read := func(name string) string {
		b, _ := os.ReadFile(filepath.Join(dir, name)) // what is not there is empty
		return strings.TrimSpace(string(b))
	}
	suffix := ""
	if read("partition") != "" {
		suffix = "\x00partition at " + read("start")
		dir = filepath.Dir(dir)
	}
	for _, name := range []string{"wwid", "device/wwid", "dm/uuid"} {
		if v := read(name); telling(v) {
			return []byte(name + "\x00" + v + suffix)
		}
	}
	for _, name := range []string{"serial", "device/serial"} {
		if v := read(name); telling(v) {
			return []byte(name + "\x00" + v + "\x00" + read("size") + suffix)
		}
	}
	return nil
}

// telling says whether a name is more than zeros behind its kind, as in "naa.0000000000000000".
func telling(name string) bool {
	_, value, kind := strings.Cut(name, ".")
	if !kind {
		value = name
	}
	return strings.Trim(value, "0- ") != ""
}
