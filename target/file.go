package target

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// file is a backend in a file, which may be sparse, or a block device.
type file struct {
	f   *os.File
	fd  int
	dev bool // a block device: its size is fixed

	syncing sync.Mutex
	lost    error // what a sync failed with; guarded by syncing
}

// openFile opens or makes a file of at least size bytes and returns its size.
func openFile(path string, size uint64, readOnly bool) (*file, uint64, error) {
	flags := os.O_RDWR | os.O_CREATE
	if readOnly {
		flags = os.O_RDONLY
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, 0, err
	}
	b := &file{f: f, fd: int(f.Fd())}
	got, err := b.prepare(size, readOnly)
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return b, got, nil
}

func (b *file) prepare(size uint64, readOnly bool) (uint64, error) {
	end, err := b.f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	st, err := b.f.Stat()
	if err != nil {
		return 0, err
	}
	b.dev = st.Mode()&os.ModeDevice != 0
	switch {
	case size == 0:
		return uint64(end), nil
	case size <= uint64(end):
		return size, nil
	case b.dev || readOnly:
		return 0, fmt.Errorf("%s has %d bytes and cannot grow to %d", b.f.Name(), end, size)
	}
	return size, b.f.Truncate(int64(size))
}

// identity tells the file from every other that may come to be at path: by inode
// and time of birth, or by path if it is a device, whose node may be made anew.
func (b *file) identity(path string) ([]byte, error) {
	if b.dev {
		return []byte(path), nil
	}
	var st unix.Statx_t
	if err := unix.Statx(b.fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		return nil, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	id := binary.LittleEndian.AppendUint64(nil, st.Ino)
	if st.Mask&unix.STATX_BTIME != 0 {
		id = binary.LittleEndian.AppendUint64(id, uint64(st.Btime.Sec))
		id = binary.LittleEndian.AppendUint32(id, st.Btime.Nsec)
	}
	return id, nil
}

func (b *file) readAt(p []byte, off uint64) error {
	for len(p) > 0 {
		n, err := unix.Pread(b.fd, p, int64(off))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0: // a file that was cut behind our back reads as zeros
			clear(p)
			return nil
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

func (b *file) writeAt(p []byte, off uint64) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(b.fd, p, int64(off))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return io.ErrShortWrite
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

// zero punches a hole, or writes zeros where the file system cannot.
func (b *file) zero(off, n uint64) error {
	err := unix.Fallocate(b.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n))
	if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	zeros := make([]byte, min(n, 1<<20))
	for n > 0 {
		z := zeros[:min(n, uint64(len(zeros)))]
		if err := b.writeAt(z, off); err != nil {
			return err
		}
		off, n = off+uint64(len(z)), n-uint64(len(z))
	}
	return nil
}

// sync makes the file's data durable. The kernel tells of data that it lost only
// once, and only one of those who sync: after that, no sync succeeds any more.
func (b *file) sync() error {
	b.syncing.Lock()
	defer b.syncing.Unlock()
	if b.lost == nil {
		b.lost = unix.Fdatasync(b.fd)
	}
	return b.lost
}

func (b *file) resize(_, size uint64) error {
	if b.dev {
		return errors.New("a block device cannot be resized")
	}
	return b.f.Truncate(int64(size))
}

func (b *file) close() error { return b.f.Close() }
