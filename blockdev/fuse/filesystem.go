package fuse

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// fileSystem answers the kernel: names and attributes here, data in data.go.
//
// Locks: mu and idleM are leaves. The data path takes idleM only; it loads the table.
type fileSystem struct {
	gofuse.RawFileSystem // ENOSYS for the rest, which the kernel then stops asking

	ctx      context.Context // ends when waiting for memory must end
	rootFile bool            // the root is the file
	readOnly bool
	born     time.Time
	uid, gid uint32

	mu    sync.Mutex // for changing what follows, and the files' owner and mode
	next  uint64     // node number
	table atomic.Pointer[table]

	idleM sync.Mutex // for idle
	idle  []*transfer
}

// table is the files at one moment; it is replaced, never changed.
type table struct {
	byNode map[uint64]*file
	sorted []*file // by name
}

// file is one device.
type file struct {
	name string
	node uint64
	dev  blockdev.Device
	gate gate
	rmw  blockLock
	wait adaptiveWait

	mode, uid, gid uint32 // under fileSystem.mu
}

func newFileSystem(ctx context.Context, rootFile, readOnly bool) *fileSystem {
	fs := &fileSystem{
		RawFileSystem: gofuse.NewDefaultRawFileSystem(),
		ctx:           ctx,
		rootFile:      rootFile,
		readOnly:      readOnly,
		born:          time.Now(),
		uid:           uint32(os.Geteuid()),
		gid:           uint32(os.Getegid()),
		next:          gofuse.FUSE_ROOT_ID + 1,
	}
	fs.table.Store(&table{byNode: map[uint64]*file{}})
	return fs
}

// String names the file system in go-fuse's messages.
func (fs *fileSystem) String() string { return subtype }

func (fs *fileSystem) files() []*file { return fs.table.Load().sorted }

// change replaces the table by what edit makes of the files. mu is held.
func (fs *fileSystem) change(edit func([]*file) []*file) {
	t := &table{byNode: map[uint64]*file{}, sorted: edit(slices.Clone(fs.files()))}
	slices.SortFunc(t.sorted, func(a, b *file) int { return strings.Compare(a.name, b.name) })
	for _, f := range t.sorted {
		t.byNode[f.node] = f
	}
	fs.table.Store(t)
}

func (fs *fileSystem) find(name string) *file {
	for _, f := range fs.files() {
		if f.name == name {
			return f
		}
	}
	return nil
}

func (fs *fileSystem) add(name string, d blockdev.Device) error {
	if !fs.rootFile && (name == "" || name == "." || name == ".." || len(name) > 255 || strings.ContainsAny(name, "/\x00")) {
		return fmt.Errorf("%q cannot be a file's name", name)
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.find(name) != nil {
		return fmt.Errorf("there is a file %q already", name)
	}
	f := &file{name: name, node: fs.next, dev: d, uid: fs.uid, gid: fs.gid, mode: 0o600}
	f.gate.idle = make(chan struct{})
	if fs.rootFile {
		f.node = gofuse.FUSE_ROOT_ID
	}
	if fs.readOnlyFile(f) {
		f.mode = 0o400
	}
	fs.next++
	fs.change(func(s []*file) []*file { return append(s, f) })
	return nil
}

func (fs *fileSystem) remove(ctx context.Context, name string) error {
	fs.mu.Lock()
	f := fs.find(name)
	if f != nil {
		// it loses its name at once, and its node when nothing is under way: remove can be called again
		f.gate.close()
	}
	fs.mu.Unlock()
	if f == nil {
		return fmt.Errorf("no file %q: %w", name, unix.ENOENT)
	}
	select {
	case <-f.gate.idle:
	case <-ctx.Done():
		return fmt.Errorf("%s: requests are still under way: %w", name, ctx.Err())
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.change(func(s []*file) []*file { return slices.DeleteFunc(s, func(x *file) bool { return x == f }) })
	return nil
}

// shut makes all requests to come fail. The channel is closed when none is under way any more.
func (fs *fileSystem) shut() chan struct{} {
	fs.mu.Lock()
	files := fs.files()
	for _, f := range files {
		f.gate.close()
	}
	fs.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		for _, f := range files {
			<-f.gate.idle
		}
		close(idle)
	}()
	return idle
}

func (fs *fileSystem) readOnlyFile(f *file) bool { return fs.readOnly || f.dev.Info().ReadOnly }

// enter finds a file and keeps it from being removed until leave.
func (fs *fileSystem) enter(node uint64) *file {
	f := fs.table.Load().byNode[node]
	if f == nil || !f.gate.enter() {
		return nil
	}
	return f
}

func (f *file) leave() { f.gate.leave() }

// fileAttr fills in what stat(2) shows. The caller has entered f.
func (fs *fileSystem) fileAttr(f *file, a *gofuse.Attr) {
	info := f.dev.Info()
	fs.mu.Lock()
	a.Mode, a.Uid, a.Gid = syscall.S_IFREG|f.mode, f.uid, f.gid
	fs.mu.Unlock()
	a.Ino, a.Nlink = f.node, 1
	a.Size = uint64(info.Size)
	a.Blocks = uint64(info.Size) / 512
	a.Blksize = uint32(preferredSize(info))
	fs.times(a)
}

func (fs *fileSystem) rootAttr(a *gofuse.Attr) {
	a.Mode, a.Uid, a.Gid = syscall.S_IFDIR|0o755, fs.uid, fs.gid
	a.Ino, a.Nlink, a.Blksize = gofuse.FUSE_ROOT_ID, 2, blockdev.PageSize
	fs.times(a)
}

func (fs *fileSystem) times(a *gofuse.Attr) { a.SetTimes(&fs.born, &fs.born, &fs.born) }

// preferredSize is st_blksize in bytes: a power of two, at least a page and a block.
func preferredSize(info blockdev.Info) int {
	n := max(blockdev.PageSize, info.BlockSize)
	for n*2 <= info.OptimalIO && n*2 <= maxRequest {
		n *= 2
	}
	return n
}

// Lookup answers without lifetimes: the next use of the name asks again.
func (fs *fileSystem) Lookup(_ <-chan struct{}, h *gofuse.InHeader, name string, out *gofuse.EntryOut) gofuse.Status {
	f := fs.find(name)
	if h.NodeId != gofuse.FUSE_ROOT_ID || fs.rootFile || f == nil || !f.gate.enter() {
		return gofuse.ENOENT
	}
	defer f.leave()
	out.NodeId, out.Generation = f.node, 1
	fs.fileAttr(f, &out.Attr)
	return gofuse.OK
}

func (fs *fileSystem) GetAttr(_ <-chan struct{}, in *gofuse.GetAttrIn, out *gofuse.AttrOut) gofuse.Status {
	if in.NodeId == gofuse.FUSE_ROOT_ID && !fs.rootFile {
		fs.rootAttr(&out.Attr)
		return gofuse.OK
	}
	f := fs.enter(in.NodeId)
	if f == nil {
		return gofuse.Status(unix.ESTALE)
	}
	defer f.leave()
	fs.fileAttr(f, &out.Attr)
	return gofuse.OK
}

// SetAttr keeps owner and mode for as long as it is mounted, ignores times, and refuses another size. A size of 0
// without a handle is open(2) with O_TRUNC, which does nothing to a block device.
func (fs *fileSystem) SetAttr(_ <-chan struct{}, in *gofuse.SetAttrIn, out *gofuse.AttrOut) gofuse.Status {
	f := fs.enter(in.NodeId)
	if f == nil {
		return gofuse.EPERM
	}
	defer f.leave()
	if n, ok := in.GetSize(); ok && n != uint64(f.dev.Info().Size) {
		if _, handle := in.GetFh(); handle || n != 0 {
			return gofuse.EINVAL
		}
	}
	fs.mu.Lock()
	if v, ok := in.GetMode(); ok {
		f.mode = v & 0o777
	}
	if v, ok := in.GetUID(); ok {
		f.uid = v
	}
	if v, ok := in.GetGID(); ok {
		f.gid = v
	}
	fs.mu.Unlock()
	fs.fileAttr(f, &out.Attr)
	return gofuse.OK
}

func (fs *fileSystem) Open(_ <-chan struct{}, in *gofuse.OpenIn, out *gofuse.OpenOut) gofuse.Status {
	f := fs.enter(in.NodeId)
	if f == nil {
		return gofuse.Status(unix.ESTALE)
	}
	defer f.leave()
	if in.Flags&syscall.O_ACCMODE != syscall.O_RDONLY && fs.readOnlyFile(f) {
		return gofuse.EROFS
	}
	out.OpenFlags = gofuse.FOPEN_DIRECT_IO | gofuse.FOPEN_PARALLEL_DIRECT_WRITES
	return gofuse.OK
}

func (fs *fileSystem) OpenDir(_ <-chan struct{}, _ *gofuse.OpenIn, _ *gofuse.OpenOut) gofuse.Status {
	return gofuse.OK
}

func (fs *fileSystem) ReadDir(_ <-chan struct{}, in *gofuse.ReadIn, out *gofuse.DirEntryList) gofuse.Status {
	entries := []gofuse.DirEntry{
		{Name: ".", Ino: gofuse.FUSE_ROOT_ID, Mode: syscall.S_IFDIR},
		{Name: "..", Mode: syscall.S_IFDIR},
	}
	for _, f := range fs.files() {
		if !f.gate.closed() {
			entries = append(entries, gofuse.DirEntry{Name: f.name, Ino: f.node, Mode: syscall.S_IFREG})
		}
	}
	for i := in.Offset; i < uint64(len(entries)); i++ {
		entries[i].Off = i + 1
		if !out.AddDirEntry(entries[i]) {
			break
		}
	}
	return gofuse.OK
}

// StatFs adds the devices up.
func (fs *fileSystem) StatFs(_ <-chan struct{}, _ *gofuse.InHeader, out *gofuse.StatfsOut) gofuse.Status {
	for _, f := range fs.files() {
		if f.gate.enter() {
			out.Blocks += uint64(f.dev.Info().Size) / blockdev.PageSize
			out.Files++
			f.leave()
		}
	}
	out.Bsize, out.Frsize, out.NameLen = blockdev.PageSize, blockdev.PageSize, 255
	return gofuse.OK
}

// The set of files is the set of namespaces.

func (fs *fileSystem) Create(<-chan struct{}, *gofuse.CreateIn, string, *gofuse.CreateOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Mknod(<-chan struct{}, *gofuse.MknodIn, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Mkdir(<-chan struct{}, *gofuse.MkdirIn, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Unlink(<-chan struct{}, *gofuse.InHeader, string) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Rename(<-chan struct{}, *gofuse.RenameIn, string, string) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Link(<-chan struct{}, *gofuse.LinkIn, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Symlink(<-chan struct{}, *gofuse.InHeader, string, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}
