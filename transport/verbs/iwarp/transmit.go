package iwarp

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// Sizes of a batch, which is what one writev sends.
const (
	batchBytes   = 256 << 10 // payload
	batchVectors = 512       // at most IOV_MAX
	batchHeaders = 64 << 10  // headers, trailers and copied payload
	// copyBelow is the payload that is copied beside its header instead of taking a vector of its own.
	copyBelow = 1 << 10
	// segmentRoom is the most that a segment takes of batchHeaders: header, Read Request or copied payload, trailer.
	segmentRoom = mpa.LengthSize + ddp.UntaggedSize + copyBelow + 8
)

// transmitter is the sending half: the send queue, the peer's RDMA Reads to answer, and the batch under way.
type transmitter struct {
	mu   sync.Mutex
	crc  bool
	ulp  int  // largest ULPDU
	hold bool // the responder may not send before the initiator did (RFC 5044 section 7.1.1)

	// The send queue. Indexes only grow; an entry is at its index and mask. done <= next <= tail.
	ring  []sendEntry
	depth int32
	mask  uint32
	done  uint32 // the oldest entry without completion
	next  uint32 // the next one to put into a batch
	tail  uint32
	known *region // see checkSGE

	// RDMA Reads under way, at most ord: indexes of their entries, oldest first, in a ring.
	reads              [maxReads]uint32
	readHead, readsOut int
	ord                int
	rtrRead            bool   // the answer to the RTR frame's empty read is still to come
	sinkSTag           uint32 // of all reads: placement goes by the entry, so the key names no memory
	sinkTO             uint64

	answers answers
	msn     [ddp.QueueTerminate + 1]uint32
	message message

	// The batch: vectors over headers and payload, written up to first.
	headers  []byte
	marked   int // headers up to here are in vectors
	vectors  []unix.Iovec
	first    int
	bytes    int
	sent     uint32 // entries below are complete with this batch
	sources  []source
	pending  bool // a batch is built and not wholly written
	cut      bool // the connection ended inside an FPDU
	failWith verbs.Status
}

// sendEntry is a work request in the send queue.
type sendEntry struct {
	wr     verbs.SendWR
	length int
	done   bool
	sinkTO uint64 // RDMA READ: the tagged offset of its first byte
	got    int    // ... and the bytes placed
}

// source is a region that a batch reads from on the peer's behalf.
type source struct {
	region *region
	key    uint32
}

// message is the one that is being cut into segments.
type message struct {
	active bool
	header ddp.Header
	pieces [verbs.MaxSGE][]byte // what is left
	left   int
	offset uint64
	source source
	entry  bool // a work request: next moves on at its end
}

func (t *transmitter) init(depth int) {
	size := 1
	for size < depth {
		size <<= 1
	}
	t.ring, t.mask, t.depth = make([]sendEntry, size), uint32(size-1), int32(depth)
	t.headers = make([]byte, 0, batchHeaders)
	t.vectors = make([]unix.Iovec, 0, batchVectors)
	t.sources = make([]source, 0, batchVectors)
	t.hold = true
	t.sinkSTag, t.sinkTO = rand.Uint32(), uint64(rand.Uint32())<<16
	for i := range t.msn {
		t.msn[i] = 1 // RFC 5041 section 5.3
	}
}

func (t *transmitter) start(x terms) {
	t.crc, t.ulp, t.ord = x.outcome.CRC, x.ulpdu, int(x.outcome.ORD)
	t.answers.limit = int(x.outcome.IRD)
	t.hold = !x.initiator
}

// pump transmits until nothing more may be sent or the socket is full. tx.mu is held.
func (q *qp) pump() {
	t := &q.tx
	for q.state.Load() == stateUp {
		if !t.pending && !q.build() {
			return
		}
		if errno := q.flush(); errno == errAgain {
			q.engine.writeLater(q)
			return
		} else if errno != 0 {
			t.cut = true
			q.markFailed(socketError(errno))
			return
		}
		q.finishBatch()
	}
}

// flush writes the batch. 0 means all of it.
func (q *qp) flush() syscall.Errno {
	t := &q.tx
	for i := range t.sources {
		if !t.sources[i].region.enter(t.sources[i].key) {
			// The program took away the memory that the peer was reading; there is no way to end the FPDU.
			for j := range i {
				t.sources[j].region.exit()
			}
			return syscall.ECONNABORTED
		}
	}
	errno := t.write(&q.link)
	for i := range t.sources {
		t.sources[i].region.exit()
	}
	return errno
}

func (t *transmitter) write(l *link) syscall.Errno {
	for t.first < len(t.vectors) {
		n, errno := l.writev(t.vectors[t.first:])
		if errno != 0 {
			return errno
		}
		for t.first < len(t.vectors) && n >= int(t.vectors[t.first].Len) {
			n -= int(t.vectors[t.first].Len)
			t.first++
		}
		if n > 0 {
			v := &t.vectors[t.first]
			v.Base = advance(v.Base, n)
			v.SetLen(int(v.Len) - n)
		}
	}
	return 0
}

// finishBatch completes what the batch sent.
func (q *qp) finishBatch() {
	t := &q.tx
	t.pending = false
	for i := t.done; i != t.sent; i++ {
		if e := &t.ring[i&t.mask]; e.wr.Op != verbs.OpRDMARead {
			e.done = true
		}
	}
	q.completeSends()
}

// build fills the batch; false means that there is nothing to send. It reads payload, for the CRC and where it is short.
func (q *qp) build() bool {
	t := &q.tx
	t.reset()
	for t.bytes < batchBytes && len(t.vectors)+verbs.MaxSGE+2 < batchVectors && cap(t.headers)-len(t.headers) > segmentRoom {
		if !t.message.active && !t.nextMessage() {
			break
		}
		if s := t.message.source; s.region == nil {
			t.segment()
		} else if s.region.enter(s.key) {
			t.segment()
			s.region.exit()
		} else {
			t.cut = true
			q.markFailed(errReadEnded)
			return false
		}
	}
	t.seal()
	t.pending = len(t.vectors) > 0
	return t.pending
}

// reset empties the batch.
func (t *transmitter) reset() {
	t.headers, t.vectors, t.sources = t.headers[:0], t.vectors[:0], t.sources[:0]
	t.marked, t.first, t.bytes, t.sent = 0, 0, 0, t.next
}

// nextMessage chooses what to send: an answer to the peer's reads before work requests, since the peer waits for it.
func (t *transmitter) nextMessage() bool {
	if t.hold {
		return false
	}
	if a, ok := t.answers.next(); ok {
		t.message = message{
			active: true, left: len(a.data), offset: a.sinkTO,
			header: ddp.Header{Tagged: true, Version: ddp.Version, ULP: rdmap.Control(rdmap.ReadResponse), STag: a.sinkSTag},
			source: a.source,
		}
		t.message.pieces[0] = a.data
		return true
	}
	if t.next == t.tail {
		return false
	}
	e := &t.ring[t.next&t.mask]
	w := &e.wr
	if w.Flags&verbs.Fence != 0 && t.readsOut > 0 || w.Op == verbs.OpRDMARead && t.readsOut >= t.ord {
		return false
	}
	m := &t.message
	*m = message{active: true, entry: true, left: e.length}
	m.header.Version = ddp.Version
	op := rdmap.Send
	switch w.Op {
	case verbs.OpRDMAWrite:
		m.header.Tagged, m.header.STag, m.offset = true, w.RKey, w.RemoteAddr
		op = rdmap.Write
	case verbs.OpRDMARead:
		e.sinkTO = t.sinkTO
		t.sinkTO += uint64(e.length) + 1
		t.reads[(t.readHead+t.readsOut)%maxReads] = t.next
		t.readsOut++
		t.untagged(ddp.QueueRead)
		m.header.ULP = rdmap.Control(rdmap.ReadRequest)
		return true
	case verbs.OpSendInvalidate:
		op = rdmap.SendInvalidate
		m.header.STag = w.RKey
		if w.Flags&verbs.Solicited != 0 {
			op = rdmap.SendSEInvalidate
		}
		t.untagged(ddp.QueueSend)
	default:
		if w.Flags&verbs.Solicited != 0 {
			op = rdmap.SendSE
		}
		t.untagged(ddp.QueueSend)
	}
	m.header.ULP = rdmap.Control(op)
	for i := range w.NumSGE {
		m.pieces[i] = w.SGEs[i].Data
	}
	return true
}

func (t *transmitter) untagged(queue uint32) {
	t.message.header.QN, t.message.header.MSN = queue, t.msn[queue]
	t.msn[queue]++
}

// segment adds the next FPDU of the message to the batch.
func (t *transmitter) segment() {
	m := &t.message
	h := &m.header
	if h.ULP == rdmap.Control(rdmap.ReadRequest) {
		t.readRequest()
		t.endMessage()
		return
	}
	n := min(m.left, t.ulp-h.Size())
	h.Last = n == m.left
	if h.Tagged {
		h.TO = m.offset
	} else {
		h.MO = uint32(m.offset)
	}
	start := len(t.headers)
	ulpdu := h.Size() + n
	t.headers = binary.BigEndian.AppendUint16(t.headers, uint16(ulpdu))
	t.headers = h.Append(t.headers)
	var crc uint32
	if n <= copyBelow {
		for left := n; left > 0; {
			p := m.take(left)
			t.headers = append(t.headers, p...)
			left -= len(p)
		}
		if t.crc {
			crc = mpa.Sum(0, t.headers[start:])
		}
	} else {
		t.seal()
		if t.crc {
			crc = mpa.Sum(0, t.headers[start:])
		}
		for left := n; left > 0; {
			p := m.take(left)
			if len(p) == 0 {
				continue
			}
			if t.crc {
				crc = mpa.Sum(crc, p)
			}
			t.vectors = append(t.vectors, vector(p))
			left -= len(p)
		}
	}
	t.headers = mpa.AppendTrailer(t.headers, ulpdu, crc, t.crc)
	t.bytes += n
	m.left -= n
	m.offset += uint64(n)
	if m.source.region != nil && n > 0 {
		t.sources = append(t.sources, m.source)
	}
	if h.Last {
		t.endMessage()
	}
}

func (t *transmitter) endMessage() {
	t.message.active = false
	if t.message.entry {
		t.next++
		t.sent = t.next
	}
}

// readRequest adds the FPDU of an RDMA Read Request.
func (t *transmitter) readRequest() {
	e := &t.ring[t.next&t.mask]
	r := rdmap.Read{
		SinkSTag: t.sinkSTag, SinkTO: e.sinkTO, Size: uint32(e.length),
		SourceSTag: e.wr.RKey, SourceTO: e.wr.RemoteAddr,
	}
	t.message.header.Last = true
	t.small(&t.message.header, r.Append)
}

// small adds an FPDU with a payload that is encoded in place.
func (t *transmitter) small(h *ddp.Header, payload func([]byte) []byte) {
	start := len(t.headers)
	t.headers = append(t.headers, 0, 0)
	t.headers = h.Append(t.headers)
	if payload != nil {
		t.headers = payload(t.headers)
	}
	ulpdu := len(t.headers) - start - mpa.LengthSize
	binary.BigEndian.PutUint16(t.headers[start:], uint16(ulpdu))
	var crc uint32
	if t.crc {
		crc = mpa.Sum(0, t.headers[start:])
	}
	t.headers = mpa.AppendTrailer(t.headers, ulpdu, crc, t.crc)
}

// take gives the next piece of at most n bytes.
func (m *message) take(n int) []byte {
	for i := range m.pieces {
		if p := m.pieces[i]; len(p) > 0 {
			p = p[:min(n, len(p))]
			m.pieces[i] = m.pieces[i][len(p):]
			return p
		}
	}
	return nil
}

// seal puts the headers since the last payload into a vector.
func (t *transmitter) seal() {
	if h := t.headers[t.marked:]; len(h) > 0 {
		t.vectors = append(t.vectors, vector(h))
		t.marked = len(t.headers)
	}
}
