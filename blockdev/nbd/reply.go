package nbd

import (
	"encoding/binary"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

const (
	batchHeaders = 8 << 10 // bytes of reply headers in one batch
	batchVectors = 512     // at most 1024 (IOV_MAX)
	// headerRoom is the most that one task adds to the headers: a chunk with an error, and its message.
	headerRoom = 128
)

// sender is a batch of replies on its way. Whoever set conn.sending owns it.
type sender struct {
	c       *conn
	headers []byte
	vectors []unix.Iovec
	first   int // the first vector not sent in full
	batch   taskList

	try   func(fd uintptr) bool // sends what the socket takes now
	all   func(fd uintptr) bool // is not done before everything is sent
	again bool                  // try: the socket takes no more
	err   error
}

func (s *sender) init(c *conn) {
	s.c = c
	s.headers = make([]byte, 0, batchHeaders)
	s.vectors = make([]unix.Iovec, 0, batchVectors)
	s.try = func(fd uintptr) bool { s.write(fd); return true }
	s.all = func(fd uintptr) bool { s.write(fd); return !s.again }
}

// partDone is Done of all tasks.
func (c *conn) partDone(r *blockdev.Request) {
	t := r.Owner.(*task)
	h := t.head
	if h.thenFlush && r.Err == nil {
		h.thenFlush = false
		r.Op = blockdev.Flush
		c.queue.Submit(r)
		c.queue.Kick()
		return
	}
	c.mu.Lock()
	if r.Err != nil && h.err == nil {
		h.err = r.Err
	}
	if r.Op == blockdev.Write && t.lease != nil { // its buffer is free before the reply
		c.pool.Release(t.lease)
		t.lease = nil
	}
	if h.chunked {
		c.reply(t)
	} else {
		c.endPart(h)
	}
	c.unlockAndFlush()
}

// endPart counts one part as completed, and queues the reply after the last. mu is held.
func (c *conn) endPart(h *task) {
	if h.left--; h.left == 0 {
		c.reply(h)
	}
}

// reply queues t to be answered. mu is held.
func (c *conn) reply(t *task) {
	if c.broken != nil {
		c.recycle(t)
		return
	}
	c.replies.push(t)
}

// unlockAndFlush gives mu back, and sends what there is if run does not.
func (c *conn) unlockAndFlush() {
	mine := !c.awake && !c.sending && c.replies.first != nil
	c.mu.Unlock()
	if mine {
		c.flush()
	}
}

// flush sends what there is, unless somebody does already. It does not block.
func (c *conn) flush() {
	c.mu.Lock()
	for !c.sending && c.replies.first != nil {
		c.sending = true
		c.collect()
		c.mu.Unlock()
		s := &c.out
		if err := c.raw.Write(s.try); err != nil {
			s.err = err
		}
		if s.again && s.err == nil {
			c.writerDo <- struct{}{} // it owns the batch now; there is room, because sending is set
			return
		}
		c.mu.Lock()
		c.sent()
	}
	c.mu.Unlock()
}

// writer sends what the socket did not take at once.
func (c *conn) writer() {
	defer close(c.writerEnd)
	send := func() error { return c.raw.Write(c.out.all) }
	for range c.writerDo {
		s := &c.out
		if err := c.mayStall(time.Now(), c.sock.SetWriteDeadline, send); err != nil {
			s.err = err
		}
		c.mu.Lock()
		c.sent()
		c.mu.Unlock()
		c.flush()
	}
}

// sent gives back what a batch held. mu is held.
func (c *conn) sent() {
	s := &c.out
	if s.err != nil {
		c.failLocked(s.err)
	}
	for t := s.batch.pop(); t != nil; t = s.batch.pop() {
		c.recycle(t)
	}
	clear(s.vectors)
	s.vectors, s.headers, s.first, s.err = s.vectors[:0], s.headers[:0], 0, nil
	c.sending = false
}

// recycle frees an answered task, or the whole of a command that was answered at once. mu is held.
func (c *conn) recycle(t *task) {
	h := t.head
	if h.chunked {
		// The first part stays until the last is answered: the others look at it.
		c.release(t)
		if t != h {
			c.freeTask(t)
		}
		if h.left--; h.left == 0 {
			c.freeTask(h)
		}
		return
	}
	if h.large {
		h.large = false
		c.pool.EndCollect()
	}
	for t != nil {
		more := t.more
		c.release(t)
		c.freeTask(t)
		t = more
	}
}

// release gives t's buffer back, if it has one, after a Read was answered. mu is held.
func (c *conn) release(t *task) {
	if t.lease == nil {
		return
	}
	c.taken.Add(int64(cap(t.lease)))
	c.pool.Release(t.lease)
	t.lease = nil
	if c.wantsRoom {
		c.freed.Broadcast()
	}
}

// freeTask puts t back. mu is held.
func (c *conn) freeTask(t *task) {
	t.more, t.last, t.head, t.err, t.req.Data = nil, nil, nil, nil, nil
	c.free.push(t)
	if c.free.n == 1 || c.free.n == c.total {
		c.freed.Broadcast()
	}
}

// collect moves queued replies into the batch. mu is held, sending is set.
func (c *conn) collect() {
	s := &c.out
	s.again = false
	for c.replies.first != nil {
		if cap(s.headers)-len(s.headers) < headerRoom || cap(s.vectors)-len(s.vectors) < 2+maxPayload/blockdev.MaxLease {
			return
		}
		t := c.replies.pop()
		s.batch.push(t)
		s.append(t)
	}
}

// append adds the reply to t: its header, and the data of a Read from where they lie.
func (s *sender) append(t *task) {
	h := t.head
	from := len(s.headers)
	err := h.err
	if h.chunked {
		err = t.req.Err
	}
	errno := h.errno
	if errno == 0 {
		errno = errnoOf(err)
	}
	cookie := h.cookie
	flags := uint16(chunkDone)
	if h.chunked {
		if h.unsent--; h.unsent > 0 {
			flags = 0
		}
	}
	switch {
	case !h.structured:
		s.headers = appendSimple(s.headers, errno, cookie)
	case errno != 0 && h.chunked:
		s.headers = appendChunk(s.headers, flags, chunkErrorOffset, cookie, 6+8)
		s.headers = binary.BigEndian.AppendUint32(s.headers, errno)
		s.headers = binary.BigEndian.AppendUint16(s.headers, 0)
		s.headers = binary.BigEndian.AppendUint64(s.headers, uint64(t.req.Off))
	case errno != 0:
		s.headers = appendChunk(s.headers, flags, chunkError, cookie, 6)
		s.headers = binary.BigEndian.AppendUint32(s.headers, errno)
		s.headers = binary.BigEndian.AppendUint16(s.headers, 0)
	case h.command == cmdBlockStatus:
		// The device cannot say what is allocated: all is data.
		s.headers = appendChunk(s.headers, flags, chunkBlockStatus, cookie, 12)
		s.headers = binary.BigEndian.AppendUint32(s.headers, contextBaseID)
		s.headers = binary.BigEndian.AppendUint32(s.headers, h.length)
		s.headers = binary.BigEndian.AppendUint32(s.headers, 0)
	default: // a Read
		n := int(h.length)
		if h.chunked {
			n = len(t.req.Data)
		}
		s.headers = appendChunk(s.headers, flags, chunkOffsetData, cookie, 8+n)
		s.headers = binary.BigEndian.AppendUint64(s.headers, uint64(t.req.Off))
	}
	s.vector(s.headers[from:])
	if h.command != cmdRead || errno != 0 {
		return
	}
	for p := t; p != nil; p = p.more {
		s.vector(p.req.Data)
		if h.chunked {
			return
		}
	}
}

// vector appends b to what is to be sent, to the last piece if it follows that in memory.
func (s *sender) vector(b []byte) {
	if n := len(s.vectors); n > 0 {
		v := &s.vectors[n-1]
		if uintptr(unsafe.Pointer(v.Base))+uintptr(v.Len) == uintptr(unsafe.Pointer(unsafe.SliceData(b))) {
			v.Len += uint64(len(b))
			return
		}
	}
	s.vectors = append(s.vectors, unix.Iovec{Base: unsafe.SliceData(b), Len: uint64(len(b))})
}

// write sends until all is sent, the socket takes no more (again), or it fails (err). Like read it does not block.
func (s *sender) write(fd uintptr) {
	s.again = false
	for s.first < len(s.vectors) {
		v := s.vectors[s.first:]
		n, _, errno := unix.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
		runtime.KeepAlive(s.headers)
		switch errno {
		case 0:
			s.advance(uint64(n))
		case unix.EINTR:
		case unix.EAGAIN:
			s.again = true
			return
		default:
			s.err = errno
			return
		}
	}
}

// advance counts n bytes as sent.
func (s *sender) advance(n uint64) {
	for n > 0 {
		v := &s.vectors[s.first]
		if n < v.Len {
			v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), n))
			v.Len -= n
			return
		}
		n -= v.Len
		s.first++
	}
}
