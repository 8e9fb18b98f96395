package fuse

import (
	"context"
	"runtime"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// transfer is a request under way. It is made once and used again and again. It is also the answer to a read:
// go-fuse writes it to the kernel from the leased buffer and then calls Done.
type transfer struct {
	fs   *fileSystem
	f    *file
	req  blockdev.Request
	done chan struct{} // gets one element for each completion
	buf  []byte        // leased from f's pool, or nil
	out  [1][]byte     // the part of buf that a read answers with
}

// begin leases n bytes for a request on f, waiting while the pool is empty; n may be 0. The caller has entered f.
func (fs *fileSystem) begin(f *file, n int) (*transfer, error) {
	fs.idleM.Lock()
	var t *transfer
	if i := len(fs.idle) - 1; i >= 0 {
		t, fs.idle = fs.idle[i], fs.idle[:i]
	}
	fs.idleM.Unlock()
	if t == nil {
		t = &transfer{fs: fs, done: make(chan struct{}, 1)}
		t.req.Done = func(*blockdev.Request) { t.done <- struct{}{} }
	}
	t.f = f
	if n == 0 {
		return t, nil
	}
	pool := f.dev.Pool()
	if t.buf = pool.TryLease(n); t.buf == nil {
		var err error
		if t.buf, err = pool.Lease(fs.ctx, n); err != nil {
			t.end()
			return nil, err
		}
	}
	return t, nil
}

// end gives back what begin took.
func (t *transfer) end() {
	if t.buf != nil {
		t.f.dev.Pool().Release(t.buf)
	}
	t.buf, t.out[0], t.f, t.req.Data = nil, nil, nil, nil
	t.fs.idleM.Lock()
	t.fs.idle = append(t.fs.idle, t)
	t.fs.idleM.Unlock()
}

// Size, Bytes, Slices and Done make a gofuse.ReadResult. go-fuse prefers Slices, which it writes as they are.

func (t *transfer) Size() int                            { return len(t.out[0]) }
func (t *transfer) Bytes([]byte) ([]byte, gofuse.Status) { return t.out[0], gofuse.OK }
func (t *transfer) Slices() ([][]byte, gofuse.Status)    { return t.out[:], gofuse.OK }

func (t *transfer) Done() {
	f := t.f
	t.end()
	f.leave()
}

// burst is how many requests under way on a device make it likely that the next one is about to come.
const burst = 4

// run carries out one operation and waits for it. unique is the FUSE request's number, which picks the queue:
// neighbours share one, so that a burst shares its doorbell and its poll.
func (t *transfer) run(unique uint64, op blockdev.Op, flags blockdev.Flags, off, n int64, data []byte) error {
	r := &t.req
	r.Op, r.Flags, r.Off, r.Len, r.Data, r.Err = op, flags, off, n, data, nil
	q := t.f.dev.Queue(int(unique / 16 % 1024)) // numbers go in steps of two
	q.Submit(r)
	if t.completed() {
		return r.Err
	}
	start := time.Now()
	if t.f.gate.n.Load() >= burst {
		// let others submit first: who goes on first then starts all of it, with one doorbell
		runtime.Gosched()
		if t.completed() {
			return r.Err
		}
	}
	t.await(q)
	if op <= blockdev.Write {
		t.f.wait.took(time.Since(start))
	}
	return r.Err
}

func (t *transfer) completed() bool {
	select {
	case <-t.done:
		return true
	default:
		return false
	}
}

func (t *transfer) await(q blockdev.Queue) {
	budget := t.f.wait.budget()
	if budget == 0 {
		q.Kick()
		<-t.done
		return
	}
	for q.Poll(budget) > 0 {
		if t.completed() {
			// Having polled, we must go on until there is nothing, but the answer need not wait for that.
			if q.Poll(0) > 0 {
				go pollOut(q)
			}
			return
		}
	}
	<-t.done
}

// pollOut ends a turn of polling: after a 0, the device's own goroutine watches.
func pollOut(q blockdev.Queue) {
	for q.Poll(0) > 0 {
	}
}

// status is the answer for an outcome.
func status(err error) gofuse.Status { return gofuse.Status(blockdev.Errno(err)) }

// span is the whole blocks that hold n bytes from off.
func span(off, n int64, block int) (start, length int64) {
	b := int64(block)
	start = off &^ (b - 1)
	return start, (off+n+b-1)&^(b-1) - start
}

// Read answers what there is up to the end of the device.
func (fs *fileSystem) Read(_ <-chan struct{}, in *gofuse.ReadIn, buf []byte) (gofuse.ReadResult, gofuse.Status) {
	f := fs.enter(in.NodeId)
	if f == nil {
		return nil, gofuse.EIO
	}
	info := f.dev.Info()
	n := min(int64(in.Size), info.Size-int64(in.Offset))
	if in.Offset >= uint64(info.Size) || n == 0 {
		f.leave()
		return gofuse.ReadResultData(nil), gofuse.OK
	}
	off := int64(in.Offset)
	start, length := span(off, n, info.BlockSize)
	if length > maxRequest {
		defer f.leave()
		return fs.readParts(f, in.Unique, info.BlockSize, off, buf[:n])
	}
	t, err := fs.begin(f, int(length))
	if err == nil {
		if err = t.run(in.Unique, blockdev.Read, 0, start, length, t.buf); err == nil {
			t.out[0] = t.buf[off-start:][:n]
			return t, gofuse.OK
		}
		t.end()
	}
	f.leave()
	return nil, status(err)
}

// readParts is for what does not fit one lease because it starts within a block: it copies.
func (fs *fileSystem) readParts(f *file, unique uint64, block int, off int64, buf []byte) (gofuse.ReadResult, gofuse.Status) {
	t, err := fs.begin(f, maxRequest)
	if err != nil {
		return nil, status(err)
	}
	defer t.end()
	for done := 0; done < len(buf); {
		start, length := span(off, int64(len(buf)-done), block)
		length = min(length, maxRequest)
		if err := t.run(unique, blockdev.Read, 0, start, length, t.buf[:length]); err != nil {
			return nil, status(err)
		}
		n := copy(buf[done:], t.buf[off-start:length])
		off += int64(n)
		done += n
	}
	return gofuse.ReadResultData(buf), gofuse.OK
}

// Write writes up to the end of the device, and says ENOSPC there. It is durable at once if the file was opened so.
func (fs *fileSystem) Write(_ <-chan struct{}, in *gofuse.WriteIn, data []byte) (uint32, gofuse.Status) {
	f := fs.enter(in.NodeId)
	if f == nil {
		return 0, gofuse.EIO
	}
	defer f.leave()
	info := f.dev.Info()
	switch {
	case fs.readOnly || info.ReadOnly:
		return 0, gofuse.EROFS
	case len(data) == 0:
		return 0, gofuse.OK
	case in.Offset >= uint64(info.Size):
		return 0, gofuse.Status(unix.ENOSPC)
	}
	data = data[:min(int64(len(data)), info.Size-int64(in.Offset))]
	var flags blockdev.Flags
	if in.Flags&syscall.O_DSYNC != 0 && info.WriteCache { // O_SYNC contains O_DSYNC
		flags = blockdev.FUA
	}
	return fs.write(f, in.Unique, info.BlockSize, int64(in.Offset), data, flags)
}

// write writes within the device, in as many pieces as leases force, and says how much it wrote if anything.
func (fs *fileSystem) write(f *file, unique uint64, block int, off int64, data []byte, flags blockdev.Flags) (uint32, gofuse.Status) {
	_, length := span(off, int64(len(data)), block)
	t, err := fs.begin(f, int(min(length, maxRequest)))
	if err != nil {
		return 0, status(err)
	}
	defer t.end()
	written := 0
	for written < len(data) {
		n, err := t.writePiece(unique, block, off, data[written:], flags)
		if err != nil && written == 0 {
			return 0, status(err)
		}
		if err != nil {
			break
		}
		written += n
		off += int64(n)
	}
	return uint32(written), gofuse.OK
}

// writePiece writes what fits the lease; parts of blocks by reading, changing and writing them.
func (t *transfer) writePiece(unique uint64, block int, off int64, data []byte, flags blockdev.Flags) (int, error) {
	start, length := span(off, int64(len(data)), block)
	length = min(length, int64(len(t.buf)))
	head := int(off - start)
	data = data[:min(len(data), int(length)-head)]
	tail := (head + len(data)) % block // bytes written in the last block; 0 is all
	alone := head != 0 || tail != 0

	mask := t.f.rmw.mask(start, length)
	t.f.rmw.lock(mask, alone)
	defer t.f.rmw.unlock(mask, alone)
	if head != 0 {
		if err := t.run(unique, blockdev.Read, 0, start, int64(block), t.buf[:block]); err != nil {
			return 0, err
		}
	}
	if last := length - int64(block); tail != 0 && (last > 0 || head == 0) {
		if err := t.run(unique, blockdev.Read, 0, start+last, int64(block), t.buf[last:length]); err != nil {
			return 0, err
		}
	}
	copy(t.buf[head:], data)
	return len(data), t.run(unique, blockdev.Write, flags, start, length, t.buf[:length])
}

// Fsync makes what was written durable.
func (fs *fileSystem) Fsync(_ <-chan struct{}, in *gofuse.FsyncIn) gofuse.Status {
	f := fs.enter(in.NodeId)
	if f == nil {
		return gofuse.EIO
	}
	defer f.leave()
	if !f.dev.Info().WriteCache {
		return gofuse.OK
	}
	t, err := fs.begin(f, 0)
	if err != nil {
		return status(err)
	}
	defer t.end()
	return status(t.run(in.Unique, blockdev.Flush, 0, 0, 0, nil))
}

// FsyncDir has nothing to do: names are not stored.
func (fs *fileSystem) FsyncDir(<-chan struct{}, *gofuse.FsyncIn) gofuse.Status { return gofuse.OK }

// Flush is close(2), which promises nothing; ENOSYS is success, and the kernel does not ask again.
func (fs *fileSystem) Flush(<-chan struct{}, *gofuse.FlushIn) gofuse.Status { return gofuse.ENOSYS }

// flush is the last one of a mount. The device may be failing: it waits no longer than ctx.
func (f *file) flush(ctx context.Context) error {
	if !f.gate.enter() {
		return nil
	}
	defer f.leave()
	if i := f.dev.Info(); !i.WriteCache || i.ReadOnly {
		return nil
	}
	_, err := blockdev.SubmitWait(ctx, f.dev, &blockdev.Request{Op: blockdev.Flush})
	return err
}

// zeroes is what the parts of blocks at the ends of a hole are overwritten with; blocks are not larger.
var zeroes [1 << 16]byte

// Fallocate punches holes and zeroes ranges within the device. Everything else would change a device's size or
// layout, which it cannot.
func (fs *fileSystem) Fallocate(_ <-chan struct{}, in *gofuse.FallocateIn) gofuse.Status {
	f := fs.enter(in.NodeId)
	if f == nil {
		return gofuse.EIO
	}
	defer f.leave()
	info := f.dev.Info()
	var op blockdev.Op
	var flags blockdev.Flags
	switch {
	case in.Mode == unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE && info.Discard && info.DiscardZeroes:
		op = blockdev.Discard
	case in.Mode == unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE && info.WriteZeroes:
		op = blockdev.WriteZeroes
	case in.Mode == unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE && info.WriteZeroes:
		op, flags = blockdev.WriteZeroes, blockdev.NoUnmap
	default:
		return gofuse.Status(unix.EOPNOTSUPP)
	}
	if fs.readOnly || info.ReadOnly {
		return gofuse.EROFS
	}
	if in.Offset >= uint64(info.Size) {
		return gofuse.OK
	}
	off := int64(in.Offset)
	end := off + int64(min(in.Length, uint64(info.Size-off)))
	block := int64(info.BlockSize)
	first, last := (off+block-1)&^(block-1), end&^(block-1) // whole blocks
	if first > last {                                       // within one block
		_, s := fs.write(f, in.Unique, info.BlockSize, off, zeroes[:end-off], 0)
		return s
	}
	if n := first - off; n > 0 {
		if _, s := fs.write(f, in.Unique, info.BlockSize, off, zeroes[:n], 0); !s.Ok() {
			return s
		}
	}
	if n := end - last; n > 0 {
		if _, s := fs.write(f, in.Unique, info.BlockSize, last, zeroes[:n], 0); !s.Ok() {
			return s
		}
	}
	if first == last {
		return gofuse.OK
	}
	t, err := fs.begin(f, 0)
	if err != nil {
		return status(err)
	}
	defer t.end()
	mask := f.rmw.mask(first, last-first)
	f.rmw.lock(mask, false)
	defer f.rmw.unlock(mask, false)
	return status(t.run(in.Unique, op, flags, first, last-first, nil))
}

// Lseek knows of no holes: all of a device is data.
func (fs *fileSystem) Lseek(_ <-chan struct{}, in *gofuse.LseekIn, out *gofuse.LseekOut) gofuse.Status {
	f := fs.enter(in.NodeId)
	if f == nil {
		return gofuse.EIO
	}
	defer f.leave()
	size := uint64(f.dev.Info().Size)
	switch {
	case in.Whence != unix.SEEK_DATA && in.Whence != unix.SEEK_HOLE:
		return gofuse.EINVAL
	case in.Offset >= size:
		return gofuse.Status(unix.ENXIO)
	case in.Whence == unix.SEEK_HOLE:
		out.Offset = size
	default:
		out.Offset = in.Offset
	}
	return gofuse.OK
}
