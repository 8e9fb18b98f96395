package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mountEntry is a line of the mount table (proc(5), /proc/pid/mountinfo).
type mountEntry struct {
	dev    string // major:minor; the minor is the number of a FUSE connection
	point  string
	fsType string
	source string
}

// mountTable is this process's, in the order of mounting. It is read without touching any mount.
func mountTable() []mountEntry {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	return parseMountTable(string(b))
}

func parseMountTable(s string) []mountEntry {
	var t []mountEntry
	for line := range strings.Lines(s) {
		left, right, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 2 {
			continue
		}
		t = append(t, mountEntry{dev: l[2], point: unescape(l[4]), fsType: r[0], source: unescape(r[1])})
	}
	return t
}

// unescape undoes the octal escapes of the mount table: blank, tab, newline and backslash.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// ownMountAt is the topmost mount at path, if it is a farblk's.
func ownMountAt(path string) (mountEntry, bool) {
	t := mountTable()
	for i := len(t) - 1; i >= 0; i-- {
		if t[i].point == path {
			return t[i], t[i].fsType == "fuse."+subtype
		}
	}
	return mountEntry{}, false
}

// checkDevice looks whether FUSE can be had at all.
func checkDevice() error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case err == nil:
		return unix.Close(fd)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("this machine offers no FUSE: /dev/fuse: %w: run \"modprobe fuse\"; give a container --device /dev/fuse; or use another export, such as nbd-unix", err)
	default:
		return fmt.Errorf("no permission to use FUSE: /dev/fuse: %w: make it readable and writable for this user (chmod 666 /dev/fuse); give a container --device /dev/fuse", err)
	}
}

// checkUnprivileged looks for what mounting needs without root.
func checkUnprivileged(allowOther bool) error {
	if _, err := exec.LookPath("fusermount3"); err != nil {
		return fmt.Errorf("mounting without root needs fusermount3: install the package fuse3: %w", err)
	}
	if !allowOther {
		return nil
	}
	conf, _ := os.ReadFile("/etc/fuse.conf")
	for line := range bytes.Lines(conf) {
		if string(bytes.TrimSpace(line)) == "user_allow_other" {
			return nil
		}
	}
	return fmt.Errorf("access for other users: add the line user_allow_other to /etc/fuse.conf: %w", unix.EPERM)
}

// resolve makes path absolute and follows symbolic links in its parent only: the last part may be a dead mount.
func resolve(path string) (string, error) {
	if path == "" {
		return "", errors.New("no path to mount at")
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if errors.Is(err, os.ErrNotExist) {
		return abs, nil
	}
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(abs)), nil
}

// preparePath looks at what is at path, and makes a folder of nothing: made are the folders that it made, the
// innermost first.
func preparePath(path string) (resolved string, isFile bool, made []string, err error) {
	if resolved, err = filepath.EvalSymlinks(path); errors.Is(err, os.ErrNotExist) {
		made, err = makeFolders(path)
		return path, false, made, err
	}
	if err != nil {
		return "", false, nil, err
	}
	st, err := os.Stat(resolved)
	if err != nil {
		return "", false, nil, err
	}
	if st.Mode().IsRegular() {
		return resolved, true, nil, nil
	}
	d, err := os.ReadDir(resolved)
	if err != nil {
		return "", false, nil, fmt.Errorf("%s is neither a folder nor a regular file to mount over: %w", path, err)
	}
	if len(d) > 0 {
		return "", false, nil, fmt.Errorf("%s is not empty (%s): mounting would hide what is in it: give an empty or new folder", path, d[0].Name())
	}
	return resolved, false, nil, nil
}

// makeFolders makes path, and the folders above it that are missing. It returns those it made, the innermost first,
// and none with an error.
func makeFolders(path string) (made []string, err error) {
	var missing []string
	for p := path; ; p = filepath.Dir(p) {
		if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
			break // also an error: Mkdir says what is wrong
		}
		missing = append(missing, p)
	}
	for _, p := range slices.Backward(missing) {
		mode := os.FileMode(0o755)
		if p == path {
			mode = 0o700
		}
		err := os.Mkdir(p, mode)
		if errors.Is(err, os.ErrExist) && p != path {
			continue // another one made it at the same time
		}
		if err != nil {
			_ = removeFolders(made)
			return nil, err
		}
		made = slices.Insert(made, 0, p)
	}
	return made, nil
}

// removeFolders removes what makeFolders made, as far as it is empty: only that the innermost stays is an error.
func removeFolders(made []string) error {
	for i, p := range made {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			if i == 0 {
				return err
			}
			return nil // others use it, too
		}
	}
	return nil
}

// clearStale removes a mount at path that nobody serves any more ("Transport endpoint is not connected").
func clearStale(path string, log *slog.Logger) error {
	for range 16 { // a crash loop stacks them
		if _, ok := ownMountAt(path); !ok {
			return nil
		}
		if !dead(path) {
			return fmt.Errorf("%s: a running farblk serves this mount: disconnect it first, or choose another path: %w", path, unix.EBUSY)
		}
		log.Info("replacing a mount that a killed farblk left behind", "path", path)
		if err := detach(path); err != nil {
			return fmt.Errorf("%s: a dead mount is in the way and cannot be removed: run \"umount -l %s\" as root: %w", path, path, err)
		}
	}
	return fmt.Errorf("%s: too many dead mounts: run \"umount -l %s\" until it is clear: %w", path, path, unix.EBUSY)
}

// dead asks the server of a mount that is not ours, with a bound in case it hangs.
func dead(path string) bool {
	c := make(chan error, 1)
	go func() {
		var st unix.Statfs_t
		c <- unix.Statfs(path, &st)
	}()
	t := time.NewTimer(2 * time.Second)
	defer t.Stop()
	select {
	case err := <-c:
		return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED)
	case <-t.C:
		return false
	}
}

// mountDirect mounts as root and returns the connection's descriptor. It is ours rather than go-fuse's because a
// child process must not inherit the descriptor: that would keep a dead mount looking alive.
func mountDirect(path string, c Config) (int, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return -1, fmt.Errorf("mount %s: %w", path, err)
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("/dev/fuse: %w", err)
	}
	data := fmt.Sprintf("fd=%d,rootmode=%o,user_id=%d,group_id=%d,max_read=%d,default_permissions",
		fd, st.Mode&unix.S_IFMT, os.Geteuid(), os.Getegid(), maxRequest)
	if c.AllowOther {
		data += ",allow_other"
	}
	var flags uintptr = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOATIME
	if c.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	if err := unix.Mount(subtype, path, "fuse."+subtype, flags, data); err != nil {
		_ = unix.Close(fd)
		if errors.Is(err, unix.EPERM) {
			return -1, fmt.Errorf("mount %s: %w: mounting needs CAP_SYS_ADMIN; give a container --cap-add SYS_ADMIN, or use another export, such as nbd-unix", path, err)
		}
		return -1, fmt.Errorf("mount %s: %w", path, err)
	}
	return fd, nil
}

// unmount unmounts what nobody uses; else the error is EBUSY. A user that is just letting go is waited for.
func unmount(ctx context.Context, path string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for try := 0; ; try++ {
		err := unmountOnce(path, false)
		if !errors.Is(err, unix.EBUSY) || try == 10 {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}

// detach takes the mount out of the tree; who has a file open keeps it.
func detach(path string) error { return unmountOnce(path, true) }

func unmountOnce(path string, lazy bool) error {
	if os.Geteuid() == 0 {
		flags := unix.UMOUNT_NOFOLLOW
		if lazy {
			flags |= unix.MNT_DETACH
		}
		return unix.Unmount(path, flags)
	}
	args := []string{"-u", "--", path}
	if lazy {
		args[0] = "-uz"
	}
	out, err := exec.Command("fusermount3", args...).CombinedOutput()
	if err != nil && bytes.Contains(out, []byte("busy")) {
		return unix.EBUSY
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// abort detaches and ends the connection: every request fails, and so do those to come. Without root and without
// the fusectl file system it can only detach, and says so: the connection lasts until its last user closes.
func abort(path, dev string) (ended bool, err error) {
	if os.Geteuid() == 0 {
		return true, unix.Unmount(path, unix.MNT_FORCE|unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	_, minor, _ := strings.Cut(dev, ":")
	ended = os.WriteFile("/sys/fs/fuse/connections/"+minor+"/abort", []byte("1"), 0) == nil
	return ended, detach(path)
}
