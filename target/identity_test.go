package target

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestCaseH24FileIdentity: an inode number alone tells nothing, since another file gets it.
func TestCaseH24FileIdentity(t *testing.T) {
	st := unix.Statx_t{Ino: 5, Mask: unix.STATX_INO, Btime: unix.StatxTimestamp{Sec: 7}}
	if id := fileIdentity(&st); id != nil {
		t.Errorf("without a time of birth: %x", id)
	}
	st.Mask |= unix.STATX_BTIME
	first := string(fileIdentity(&st))
	st.Btime.Nsec++
	if second := string(fileIdentity(&st)); first == "" || second == first {
		t.Errorf("files born at different times: %x, %x", first, second)
	}
}

// TestCaseH24DeviceIdentity: a block device is known by what it is, wherever it is found, and by no number or name that
// another gets after a reboot.
func TestCaseH24DeviceIdentity(t *testing.T) {
	// identity is that of device 8:16, or of its first partition 8:17, on a machine with these files in its sysfs.
	identity := func(minor uint32, files map[string]string) string {
		sys := t.TempDir()
		disk := filepath.Join(sys, "devices/block/sdb")
		for name, content := range files {
			path := filepath.Join(disk, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		numbers := filepath.Join(sys, "dev/block")
		if err := os.MkdirAll(numbers, 0o700); err != nil {
			t.Fatal(err)
		}
		for number, dir := range map[string]string{"8:16": disk, "8:17": filepath.Join(disk, "sdb1")} {
			if err := os.Symlink(dir, filepath.Join(numbers, number)); err != nil {
				t.Fatal(err)
			}
		}
		return string(deviceIdentity(sys, 8, minor))
	}
	seen := map[string]int{"": -1}
	for i, files := range []map[string]string{
		{"device/wwid": "naa.5000c500a0b1c2d3"},
		{"device/wwid": "naa.5000c500a0b1c2d4"},
		{"wwid": "eui.0025385b71b0aaaa"},
		{"dm/uuid": "LVM-abc"},
		{"serial": "S1", "size": "2048"},
		{"serial": "S1", "size": "4096"},
		{"device/serial": "S1", "size": "2048", "wwid": "nvme.0000"},
	} {
		id := identity(16, files)
		if other, taken := seen[id]; taken {
			t.Errorf("disks %d and %d are both %q", i, other, id)
		}
		seen[id] = i
		if again := identity(16, files); again != id {
			t.Errorf("disk %d is %q, and then %q", i, id, again)
		}
	}
	for _, files := range []map[string]string{nil, {"size": "2048"}, {"serial": ""}, {"device/wwid": "naa.0000000000000000"}} {
		if id := identity(16, files); id != "" {
			t.Errorf("%v passes for %q", files, id)
		}
	}
	disk := map[string]string{"wwid": "eui.1", "sdb1/partition": "1", "sdb1/start": "2048"}
	whole, first := identity(16, disk), identity(17, disk)
	disk["sdb1/start"] = "4096"
	if second := identity(17, disk); first == "" || first == whole || second == first {
		t.Errorf("a disk %q and its partitions %q and %q", whole, first, second)
	}
	if id := identity(17, map[string]string{"sdb1/partition": "1", "sdb1/start": "2048"}); id != "" {
		t.Errorf("a partition of an unknown disk is %q", id)
	}
}
