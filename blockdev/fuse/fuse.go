// Package fuse exports block devices as files: a folder with one file a device, or one device mounted over an
// existing file. What is stacked on the files must not notice that they are no local disk: loop devices, O_DIRECT,
// io_uring, shared mappings, fsync, hole punching and requests of any offset and length work.
//
// It stands on go-fuse's raw interface. Each request runs in the goroutine that read it from /dev/fuse, on memory
// leased from the device: a read is answered straight from its lease, a write is copied into one, once.
//
// Decisions where nothing prescribes them:
//   - A file's attributes are never cached by the kernel, so a resize shows at once.
//   - Truncating is refused, but for opening with O_TRUNC, which block devices ignore.
//   - A request that the kernel wants to interrupt is finished: a write cannot be called back.
//   - Punching a hole promises zeroes. It is a Discard only where the device says that discarded blocks read as
//     zeroes, else a Write Zeroes that may deallocate.
//   - The process that serves a mount never touches it: no stat, no open, no statfs below Path.
package fuse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

const (
	// maxRequest is the most data in one FUSE request, in bytes: what fits a lease.
	maxRequest = blockdev.MaxLease
	// maxBackground is how many asynchronous requests the kernel has under way at once.
	maxBackground = 128
	// subtype marks our mounts in the mount table: fuse.farblk.
	subtype = "farblk"
	// lastFlush bounds the flush after the kernel has let go of the files.
	lastFlush = 10 * time.Second
)

// Config says what to mount and where.
type Config struct {
	// Path is a folder, empty or not there yet (it is made, and removed again), in which each device is a file
	// named by its key in Devices; or an existing regular file, over which the only device is mounted.
	Path    string
	Devices map[string]blockdev.Device
	// ReadOnly refuses writing even if a device allows it.
	ReadOnly bool
	// AllowOther lets users other than the mounting one reach the files, as far as the files' mode lets them.
	AllowOther bool
	// Logger gets what happens outside of requests; nil is silence.
	Logger *slog.Logger
}

// Mounted is a mount that is being served. Devices may be added, removed and resized.
type Mounted struct {
	path     string
	dev      string // major:minor in the mount table
	isFile   bool
	made     []string // the folders that are ours, to be removed, the innermost first
	fs       *fileSystem
	server   *gofuse.Server
	log      *slog.Logger
	ctx      context.Context // ends when waiting for devices must end
	giveUp   context.CancelFunc
	done     chan struct{}
	unmountM sync.Mutex // one Unmount at a time
}

// Mount mounts and serves. The files can be opened when it returns. The devices stay the caller's, to be closed
// after Done or Remove. A mount at Path that a farblk left behind when it was killed is replaced.
//
// Errors say what to do; errors.Is tells unix.EBUSY (a living farblk serves Path), unix.ENOENT and unix.EPERM.
func Mount(ctx context.Context, c Config) (*Mounted, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	log := c.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if err := checkDevice(); err != nil {
		return nil, err
	}
	path, err := resolve(c.Path)
	if err != nil {
		return nil, err
	}
	if err := clearStale(path, log); err != nil {
		return nil, err
	}
	m := &Mounted{log: log, done: make(chan struct{})}
	m.path, m.isFile, m.made, err = preparePath(path)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Mounted, error) {
		_ = removeFolders(m.made)
		return nil, err
	}
	if m.isFile && len(c.Devices) != 1 {
		return fail(fmt.Errorf("%s: a file takes one device, not %d: give a folder", m.path, len(c.Devices)))
	}
	m.ctx, m.giveUp = context.WithCancel(context.Background())
	m.fs = newFileSystem(m.ctx, m.isFile, c.ReadOnly)
	for _, name := range slices.Sorted(maps.Keys(c.Devices)) {
		if err := m.fs.add(name, c.Devices[name]); err != nil {
			m.giveUp()
			return fail(err)
		}
	}
	if err := m.start(c); err != nil {
		m.giveUp()
		return fail(err)
	}
	go m.serve()
	return m, nil
}

// start mounts and answers the kernel's first request.
func (m *Mounted) start(c Config) error {
	o := &gofuse.MountOptions{
		FsName:        subtype,
		Name:          subtype,
		AllowOther:    c.AllowOther,
		Options:       []string{"default_permissions"},
		MaxBackground: maxBackground,
		MaxWrite:      maxRequest,
		// each write holds a buffer of maxRequest while it is under way
		MaxInflightRequestBytes: (maxBackground + 32) * (maxRequest + blockdev.PageSize),
		DisableXAttrs:           true,
		DisableReadDirPlus:      true,
		DisableSplice:           true, // it would want a file, where we have memory
		ExtraCapabilities:       gofuse.CAP_ASYNC_DIO | gofuse.CAP_DIRECT_IO_ALLOW_MMAP,
		Logger:                  slog.NewLogLogger(m.log.Handler(), slog.LevelDebug),
		PanicHandler: func(v any) gofuse.Status {
			m.log.Error("request failed inside farblk", "mount", m.path, "panic", v, "stack", string(debug.Stack()))
			return gofuse.EIO
		},
	}
	if c.ReadOnly {
		o.Options = append(o.Options, "ro")
	}
	where := m.path
	if os.Geteuid() == 0 {
		fd, err := mountDirect(m.path, c)
		if err != nil {
			return err
		}
		where = fmt.Sprintf("/dev/fd/%d", fd) // go-fuse's form for a descriptor that is mounted already
	} else if err := checkUnprivileged(c.AllowOther); err != nil {
		return err
	}
	var err error
	if m.server, err = gofuse.NewServer(m.fs, where, o); err != nil {
		if os.Geteuid() == 0 {
			_ = unix.Unmount(m.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
		return fmt.Errorf("mount %s: %w", m.path, err)
	}
	if e, ok := ownMountAt(m.path); ok {
		m.dev = e.dev
	}
	return nil
}

// serve answers requests until the kernel has let go of the mount.
func (m *Mounted) serve() {
	m.server.Serve()
	if m.mounted() { // the connection was aborted from outside, and a dead mount is left
		m.log.Warn("the FUSE connection was aborted", "mount", m.path)
		_ = detach(m.path)
	}
	ctx, cancel := context.WithTimeout(m.ctx, lastFlush)
	for _, f := range m.fs.files() {
		if err := f.flush(ctx); err != nil {
			m.log.Error("last flush failed", "device", f.name, "error", err)
		}
	}
	cancel()
	m.giveUp()
	m.removeFolder()
	close(m.done)
}

// removeFolder removes the folders that Mount made, perhaps again.
func (m *Mounted) removeFolder() {
	if err := removeFolders(m.made); err != nil {
		m.log.Warn("the mount's folder stays", "error", err)
	}
}

// mounted asks the mount table.
func (m *Mounted) mounted() bool {
	e, ok := ownMountAt(m.path)
	return ok && e.dev == m.dev
}

// Path is where it is mounted: absolute, without symbolic links.
func (m *Mounted) Path() string { return m.path }

// File is the path of the named device's file.
func (m *Mounted) File(name string) string {
	if m.isFile {
		return m.path
	}
	return filepath.Join(m.path, name)
}

// Add makes d appear as a file in the mounted folder.
func (m *Mounted) Add(name string, d blockdev.Device) error {
	if m.isFile {
		return fmt.Errorf("%s: a file takes one device only", m.path)
	}
	return m.fs.add(name, d)
}

// Remove takes the named file away. Handles that are still open answer EIO from then on. When it returns nil, the
// device is in no request any more; else ctx ended first, and it may be called again to wait on.
func (m *Mounted) Remove(ctx context.Context, name string) error { return m.fs.remove(ctx, name) }

// Done is closed when nothing is served any more: after Unmount, or when somebody else unmounted.
func (m *Mounted) Done() <-chan struct{} { return m.done }

// Wait waits for Done.
func (m *Mounted) Wait() { <-m.done }

// Unmount unmounts and waits until every request has been answered and the devices were flushed. A mount in use is
// left as it is and a *BusyError says who uses it; with force it is taken away from its users, who get errors, and
// nothing is flushed. If ctx ends first, the mount is gone or as before, and requests may still be under way.
//
// By force without root, where the fusectl file system is not mounted, Done waits for the last user to close; the
// devices are in no request any more when Unmount returns.
func (m *Mounted) Unmount(ctx context.Context, force bool) error {
	m.unmountM.Lock()
	defer m.unmountM.Unlock()
	ended := true
	if m.mounted() {
		err := unmount(ctx, m.path)
		if err != nil && force {
			m.giveUp()
			ended, err = abort(m.path, m.dev)
		}
		switch {
		case err != nil && !m.mounted(): // somebody was faster
		case errors.Is(err, unix.EBUSY):
			return &BusyError{Path: m.path, Holders: holders(m.path)}
		case err != nil:
			return fmt.Errorf("unmount %s: %w", m.path, err)
		}
	} else if force {
		m.giveUp()
	}
	idle := m.done
	if !ended {
		idle = m.fs.shut()
	}
	if force { // serve does it, too, but the process may end before
		m.removeFolder()
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("unmount %s: requests are still under way: %w", m.path, ctx.Err())
	}
}
