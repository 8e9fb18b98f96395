package nbd

import (
	"errors"
	"io"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// want is what parse needs to go on.
type want uint8

const (
	wantInput want = iota // bytes from the socket
	wantSlot              // a free task
	wantLease             // a buffer of receiver.leaseSize bytes
	wantLarge             // the pool's right to collect several buffers
	wantRoom              // that the client takes some of what it asked for before
)

var errMagic = errors.New("bad magic number before a request")

// receiver is the reading half of a connection; run's own. Requests are parsed in buf, where small payloads are
// copied from; of a longer payload the rest is read straight into its buffer.
type receiver struct {
	c          *conn
	buf        []byte
	begin, end int  // what is in buf and not parsed
	full       bool // the last read took all there was room for: there may be more

	// head is the Read or Write to which parts are still to be added, nil if none; rest is how many bytes of it
	// have no part yet.
	head *task
	rest int
	// fill is the part of a Write that is being filled, and filled how far it is.
	fill   *task
	filled int
	// stalled is when fill was first waited for; zero if it was not.
	stalled time.Time
	// borrowed counts the bytes of buffers that were ever leased for Reads.
	borrowed int64
	// skip is how many bytes of payload of a Write are to be read over; refused is the answer, if that is all of it.
	skip    int
	refused *task

	leaseSize int    // wantLease and wantRoom: how much
	spare     []byte // what waiting for a lease gave
	hasLarge  bool   // what waiting for the right gave

	try, wait func(fd uintptr) bool
	vectors   [2]unix.Iovec
	n         int
	err       error
}

func (in *receiver) init(c *conn) {
	in.c = c
	in.buf = make([]byte, receiveSize)
	in.try = func(fd uintptr) bool { in.read(fd); return true }
	in.wait = func(fd uintptr) bool { in.read(fd); return in.err != unix.EAGAIN }
}

// tryRead reads what is there, if anything: 0 and no error if not. waitRead waits for some.
func (in *receiver) tryRead() (int, error)  { return in.receive(in.try) }
func (in *receiver) waitRead() (int, error) { return in.receive(in.wait) }

func (in *receiver) receive(f func(fd uintptr) bool) (int, error) {
	if in.begin == in.end {
		in.begin, in.end = 0, 0
	} else if in.begin > len(in.buf)/2 || in.end == len(in.buf) {
		in.end = copy(in.buf, in.buf[in.begin:in.end])
		in.begin = 0
	}
	if err := in.c.raw.Read(f); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = in.c.waitError(err)
		}
		return 0, err
	}
	switch {
	case in.err == unix.EAGAIN:
		return 0, nil
	case in.err != nil:
		return 0, in.err
	case in.n == 0:
		if in.begin == in.end && in.head == nil && in.refused == nil {
			return 0, errDone // it might have said so, but leaves nothing half done
		}
		return 0, io.ErrUnexpectedEOF
	}
	n := in.n
	if in.fill != nil {
		k := min(n, len(in.fill.req.Data)-in.filled)
		in.filled += k
		n -= k
	}
	in.end += n
	in.full = in.end == len(in.buf)
	return in.n, nil
}

// read is one read into the part that is being filled and the buffer behind it. It does not block, so the Go
// scheduler need not know: a processor that it thought stuck in the call would be given to another thread.
func (in *receiver) read(fd uintptr) {
	v := in.vectors[:0]
	if in.fill != nil {
		b := in.fill.req.Data[in.filled:]
		v = append(v, unix.Iovec{Base: unsafe.SliceData(b), Len: uint64(len(b))})
	}
	b := in.buf[in.end:]
	v = append(v, unix.Iovec{Base: unsafe.SliceData(b), Len: uint64(len(b))})
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
		switch errno {
		case 0:
			in.n, in.err = int(n), nil
			return
		case unix.EINTR:
		default:
			in.n, in.err = 0, errno
			return
		}
	}
}

// parse handles everything that was received, as far as it can, and says what it waits for.
func (in *receiver) parse() (want, error) {
	for {
		switch {
		case in.skip > 0:
			n := min(in.skip, in.end-in.begin)
			in.begin += n
			if in.skip -= n; in.skip > 0 {
				return wantInput, nil
			}
			if in.refused != nil {
				in.c.answer(in.refused)
				in.refused = nil
			}
		case in.head != nil && in.head.command == cmdWrite:
			if w, more := in.fillWrite(); more {
				return w, nil
			}
		case in.head != nil:
			if w, more := in.splitRead(); more {
				return w, nil
			}
		default:
			b := in.buf[in.begin:in.end]
			if len(b) < requestSize {
				return wantInput, nil
			}
			r, ok := parseRequest(b)
			if !ok {
				return 0, errMagic
			}
			if r.command == cmdDisc {
				in.c.farewell = true
				return 0, errDone
			}
			t := in.c.take()
			if t == nil {
				return wantSlot, nil
			}
			in.begin += requestSize
			t.request = r
			in.c.start(t)
		}
	}
}

// take gives a free task, to be the first part of a command, or nil.
func (c *conn) take() *task {
	c.mu.Lock()
	t := c.free.pop()
	c.mu.Unlock()
	if t != nil {
		t.head, t.last, t.left, t.unsent = t, t, 1, 0
		t.errno, t.chunked, t.structured, t.large, t.thenFlush = 0, false, false, false, false
		t.req.Err = nil
	}
	return t
}

// answer completes a command that the device has no part in, with t.errno.
func (c *conn) answer(t *task) {
	c.mu.Lock()
	c.reply(t)
	c.unlockAndFlush()
}

// start checks the command in t, and answers or submits it, or prepares the receiver for its data.
func (c *conn) start(t *task) {
	info := c.export.info.Load()
	r := &t.req
	r.Off, r.Len, r.Flags, r.Data = int64(t.offset), int64(t.length), 0, nil
	allowed := uint16(cmdFlagFUA)
	control := false // the device has no part in it
	switch t.command {
	case cmdRead:
		r.Op, allowed = blockdev.Read, allowed|cmdFlagDF
		t.structured = c.structured
	case cmdWrite:
		r.Op = blockdev.Write
	case cmdFlush:
		r.Op = blockdev.Flush
	case cmdTrim:
		r.Op = blockdev.Discard
		t.thenFlush = t.flags&cmdFlagFUA != 0
	case cmdWriteZeroes:
		r.Op, allowed = blockdev.WriteZeroes, allowed|cmdFlagNoHole|cmdFlagFastZero
	case cmdCache:
		r.Op, control = blockdev.Read, true
	case cmdBlockStatus:
		r.Op, control, allowed = blockdev.Read, true, allowed|cmdFlagReqOne
		t.structured = c.structured
	default:
		allowed, control = 0, true
		t.errno = errnoInval
	}
	if t.flags&cmdFlagFUA != 0 && (r.Op == blockdev.Write || r.Op == blockdev.WriteZeroes) {
		r.Flags |= blockdev.FUA
	}
	if t.flags&cmdFlagNoHole != 0 {
		r.Flags |= blockdev.NoUnmap
	}
	switch {
	case t.errno != 0:
	case t.flags&^allowed != 0, t.command == cmdBlockStatus && !c.allocation:
		t.errno = errnoInval
	default:
		t.errno = c.check(info, t)
	}
	switch {
	case t.command == cmdWrite && t.errno != 0:
		c.in.skip, c.in.refused = int(t.length), t
		if t.length == 0 {
			c.in.refused = nil
			c.answer(t)
		}
	case t.errno != 0 || control:
		c.answer(t)
	case t.command == cmdRead || t.command == cmdWrite:
		c.in.head, c.in.rest = t, int(t.length)
	default:
		c.submit(t)
	}
}

// check is what the device would answer to the whole of t, which it may be given in parts: 0, or NBD's error.
func (c *conn) check(info *blockdev.Info, t *task) uint32 {
	r := &t.req // Data are still missing
	switch r.Op {
	case blockdev.Flush:
		return 0
	case blockdev.Read, blockdev.Write:
		if int64(t.length) > int64(c.export.maxPayload) && t.command <= cmdWrite {
			return errnoInval
		}
	}
	off := int64(min(t.offset, 1<<63-1)) // wherever, it is past the end
	errno := errnoOf(info.CheckRange(r.Op, off, r.Len))
	if errno == errnoNotSup && t.flags&cmdFlagFastZero == 0 {
		return errnoInval // it was not offered
	}
	return errno
}

func (c *conn) submit(t *task) {
	c.started = true
	c.queue.Submit(&t.req)
}

// hasRoom says whether the client may have in.leaseSize more bytes leased for its Reads. What it asks for and does not
// take stays leased, so at first it may have a buffer of the longest size, and more the more it has taken; the kernel
// takes all. Nobody gets more than he leaves free in the pool: half of it alone, a third beside another, on whatever
// server, who wants as much. A buffer of the longest size is everybody's.
func (c *conn) hasRoom() bool {
	taken := c.taken.Load()
	owed := c.in.borrowed - taken + int64(c.in.leaseSize)
	if owed <= blockdev.MaxLease {
		return true
	}
	limit := int64(c.pool.Size() - c.pool.Leased())
	if !c.kernel {
		limit = min(limit, blockdev.MaxLease+taken/8)
	}
	return owed <= limit
}

// part gives the next part of the command at hand, with a buffer, or says what is missing.
func (in *receiver) part() (*task, want) {
	c, h := in.c, in.head
	n := min(in.rest, blockdev.MaxLease)
	b := in.spare
	if in.spare = nil; b == nil {
		in.leaseSize = n
		if h.command == cmdRead && !h.large && !c.hasRoom() {
			return nil, wantRoom
		}
		if b = c.pool.TryLease(n); b == nil {
			return nil, wantLease
		}
	}
	t := h
	if in.rest < int(h.length) {
		c.mu.Lock()
		t = c.free.pop()
		c.mu.Unlock()
		if t == nil {
			in.spare = b
			return nil, wantSlot
		}
		t.req.Op, t.req.Flags, t.req.Err = h.req.Op, h.req.Flags|blockdev.Continued, nil
		t.req.Off = int64(h.offset) + int64(int(h.length)-in.rest)
		t.head = h
	}
	t.lease, t.req.Data = b, b[:n]
	in.rest -= n
	if h.command == cmdRead {
		in.borrowed += int64(cap(b))
	}
	return t, 0
}

// add makes t one more part of the command at hand, before it is submitted.
func (in *receiver) add(t *task) {
	c, h := in.c, in.head
	c.mu.Lock()
	h.left++
	if t != h && !h.chunked { // else each part is on its own once it is submitted
		h.last.more = t
		h.last = t
	}
	c.mu.Unlock()
}

// finish ends adding parts to the command at hand.
func (in *receiver) finish() {
	c, h := in.c, in.head
	in.head = nil
	c.mu.Lock()
	if !h.chunked {
		c.endPart(h)
	} else if h.left--; h.left == 0 {
		c.freeTask(h)
	}
	c.unlockAndFlush()
}

// fillWrite moves received bytes into the buffers of the Write at hand, and submits those that are full.
func (in *receiver) fillWrite() (w want, more bool) {
	for {
		if in.fill == nil {
			if in.rest == 0 {
				in.finish()
				return 0, false
			}
			t, w := in.part()
			if t == nil {
				return w, true
			}
			in.fill, in.filled, in.stalled = t, 0, time.Time{}
		}
		n := copy(in.fill.req.Data[in.filled:], in.buf[in.begin:in.end])
		in.begin += n
		if in.filled += n; in.filled < len(in.fill.req.Data) {
			return wantInput, true
		}
		t := in.fill
		in.fill = nil
		in.add(t)
		in.c.submit(t)
	}
}

// splitRead finds buffers for the Read at hand, and submits its parts. A Read of several parts is answered part
// by part if the client allows it; if not, its parts hold their buffers until the last is there.
func (in *receiver) splitRead() (w want, more bool) {
	c, h := in.c, in.head
	if in.rest == int(h.length) && in.rest > blockdev.MaxLease && !h.large && !h.chunked {
		if h.structured && h.flags&cmdFlagDF == 0 {
			h.chunked = true
			h.unsent = (in.rest + blockdev.MaxLease - 1) / blockdev.MaxLease
		} else {
			if !in.hasLarge {
				if !c.pool.TryCollect() {
					return wantLarge, true
				}
			}
			in.hasLarge = false
			h.large = true
		}
	}
	for in.rest > 0 {
		t, w := in.part()
		if t == nil {
			return w, true
		}
		in.add(t)
		c.submit(t)
	}
	in.finish()
	return 0, false
}

// giveUp has the command at hand fail with err for want of a buffer, after the parts that it has. A Read that is
// answered part by part cannot be ended that way: it is left alone, and false returned.
func (in *receiver) giveUp(err error) bool {
	c, h := in.c, in.head
	if h.chunked {
		return false
	}
	c.mu.Lock()
	if h.err == nil {
		h.err = err
	}
	c.mu.Unlock()
	if h.command == cmdWrite {
		in.skip = in.rest
	}
	in.rest = 0
	return true
}

// abandon gives back what the receiver holds when the connection ends.
func (in *receiver) abandon() {
	c := in.c
	if in.spare != nil {
		c.pool.Release(in.spare)
		in.spare = nil
	}
	if in.hasLarge {
		in.hasLarge = false
		c.pool.EndCollect()
	}
	if t := in.refused; t != nil {
		in.refused = nil
		c.drop(t)
	}
	if in.head == nil {
		return
	}
	if t := in.fill; t != nil { // not a part yet
		in.fill = nil
		c.pool.Release(t.lease)
		t.lease = nil
		if t != in.head {
			c.drop(t)
		}
	}
	// Without its end the command cannot be answered.
	c.fail(errUnfinished)
	in.finish()
}

func (c *conn) drop(t *task) {
	c.mu.Lock()
	c.freeTask(t)
	c.mu.Unlock()
}
