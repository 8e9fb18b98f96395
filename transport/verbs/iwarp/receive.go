package iwarp

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// Sizes of reading. Small FPDUs come many at a time through the stream buffer and are copied to where they belong. With
// CRC large ones do as well, since nothing of an FPDU is believed or placed before its CRC was found right (RFC 5044
// section 4.4). Without, the rest of a large one is read straight into its destination.
const (
	streamBuffer = 128 << 10 // room for the longest FPDU
	directFrom   = 4 << 10   // bytes missing of a segment, to read them directly
	readAhead    = 1 << 10   // what is read beside them into the stream buffer, while messages are large; not with CRC
	largeMessage = 32 << 10  // a tagged message of this size, in large FPDUs, makes the next reads expect another
	readBudget   = 512 << 10 // what one progress reads, so that Poll returns
	// longestWhole is the FPDU of the longest message that is never placed: a Terminate.
	longestWhole = mpa.LengthSize + ddp.UntaggedSize + rdmap.MaxTerminate + 8
)

// receiver is the receiving half: the stream buffer and the segment under way.
type receiver struct {
	mu   sync.Mutex
	crc  bool
	buf  []byte // bytes r to w are read and not yet consumed
	r, w int
	// need is the size of the FPDU at r, known when its header has come and it is not taken in pieces; else 0.
	need int

	sends, readRequests, terminates ddp.Queue

	begun    bool    // the first FPDU has come
	awaitRTR mpa.RTR // the responder expects this frame first

	recv     verbs.RecvWR // the receive of the message under way
	haveRecv bool

	seg     segment
	tagged  int  // bytes of the tagged message under way that came in large segments
	large   bool // the last tagged message was
	vectors [verbs.MaxSGE + 1]unix.Iovec
}

// segment is the one under way.
type segment struct {
	active bool // header seen, payload or trailer missing
	h      ddp.Header
	op     rdmap.Opcode
	ulpdu  int
	size   int                    // payload
	left   int                    // payload not yet placed
	into   [verbs.MaxSGE][]byte   // where it goes
	window source                 // RDMA Write: the region, to be entered around each placement
	raw    [ddp.UntaggedSize]byte // the header as it came, for a Terminate
}

// fault is a violation by the peer: what the Terminate says.
type fault struct {
	term rdmap.Term
	// recv is how the receive under way ends.
	recv verbs.Status
	// send is how the oldest send queue entry ends.
	send verbs.Status
}

func ddpFault(kind, code uint8) *fault {
	return &fault{term: rdmap.Term{Layer: rdmap.LayerDDP, Type: kind, Code: code}}
}

func rdmaFault(kind, code uint8) *fault {
	return &fault{term: rdmap.Term{Layer: rdmap.LayerRDMA, Type: kind, Code: code}}
}

func mpaFault(code uint8) *fault {
	return &fault{term: rdmap.Term{Layer: rdmap.LayerLLP, Code: code}}
}

// progress reads what the socket has and acts on it, until a completion is at hand. It tells whether the socket may
// have more. rx.mu is held.
func (q *qp) progress() (more bool) {
	if q.state.Load() != stateUp {
		if q.state.Load() == stateFailed {
			q.settleLocked()
		}
		return false
	}
	more = true
	for budget := readBudget; more && budget > 0; {
		n, full, err := q.fill()
		if err != nil {
			q.lost(err)
			return false
		}
		if n == 0 {
			more = false
			break
		}
		budget -= n
		if f := q.consume(); f != nil {
			q.terminate(f)
			return false
		}
		if q.state.Load() != stateUp {
			q.settleLocked() // a Terminate came
			return false
		}
		if !full || q.cq.ready.Load() > 0 {
			break
		}
	}
	// Answers to reads, and what waited for their answers.
	q.tx.mu.Lock()
	if !q.tx.pending {
		q.pump()
	}
	q.tx.mu.Unlock()
	return more
}

// lost ends the connection because of a read error or the end of the stream.
func (q *qp) lost(err error) {
	if err == io.EOF {
		err = verbs.ErrDisconnected
		if q.rx.seg.active || q.rx.r != q.rx.w {
			err = fmt.Errorf("%w inside a message", err)
		}
	}
	q.disconnect(err)
	q.settleLocked()
}

// fill reads once. full tells that there may be more; n is 0 when the socket has nothing.
func (q *qp) fill() (n int, full bool, err error) {
	rx := &q.rx
	free := rx.room()
	var want, direct int
	var errno error
	if s := &rx.seg; s.active && s.left >= directFrom && rx.r == rx.w {
		if !s.enter() {
			return 0, false, errEnded
		}
		v := rx.vectors[:0]
		for _, p := range s.into {
			if len(p) > 0 {
				v = append(v, vector(p))
			}
		}
		v = append(v, vector(free))
		direct = s.left
		want = direct + len(free)
		got, e := q.link.readv(v)
		if e == 0 {
			n = got
			s.placed(min(n, direct))
		} else {
			errno = e
		}
		s.exit()
	} else {
		want = len(free)
		got, e := q.link.read(free)
		if e == 0 {
			n = got
		} else {
			errno = e
		}
	}
	switch {
	case errno == errAgain:
		return 0, false, nil
	case errno != nil:
		return 0, false, socketError(errno)
	case n == 0:
		return 0, false, io.EOF
	}
	rx.w += max(0, n-direct)
	return n, n == want, nil
}

// room is where the next bytes go, with at least as much of it as the FPDU under way needs.
func (rx *receiver) room() []byte {
	if rx.r == rx.w {
		rx.r, rx.w = 0, 0
	} else if len(rx.buf)-rx.r < max(rx.need, longestWhole) {
		rx.w = copy(rx.buf, rx.buf[rx.r:rx.w])
		rx.r = 0
	}
	free := rx.buf[rx.w:]
	if rx.large && !rx.crc {
		missing := min(rx.seg.left, directFrom)
		if rx.need > 0 {
			missing = rx.need - (rx.w - rx.r)
		}
		free = free[:min(len(free), missing+readAhead)]
	}
	return free
}

// placed records n bytes that were read directly to the segment's destination.
func (s *segment) placed(n int) {
	s.left -= n
	for i := range s.into {
		p := s.into[i][:min(n, len(s.into[i]))]
		s.into[i] = s.into[i][len(p):]
		n -= len(p)
	}
}

// put copies b to the segment's destination.
func (s *segment) put(b []byte) {
	s.left -= len(b)
	for i := range s.into {
		n := copy(s.into[i], b)
		s.into[i], b = s.into[i][n:], b[n:]
	}
}

func (s *segment) enter() bool {
	return s.window.region == nil || s.window.region.enter(s.window.key)
}

func (s *segment) exit() {
	if s.window.region != nil {
		s.window.region.exit()
	}
}

// abandon forgets the segment under way.
func (rx *receiver) abandon() {
	rx.seg = segment{}
	rx.r, rx.w, rx.need = 0, 0, 0
}

// consume takes FPDUs from the stream buffer.
func (q *qp) consume() *fault {
	for {
		var done bool
		var f *fault
		if q.rx.seg.active {
			done, f = q.resume()
		} else {
			done, f = q.next()
		}
		if !done || f != nil {
			return f
		}
	}
}

// next begins with the FPDU at the head of the stream buffer. done means that the stream buffer may hold more
// to act on: the FPDU was complete, or is one to be taken in pieces by resume.
func (q *qp) next() (done bool, f *fault) {
	rx := &q.rx
	s := &rx.seg
	b := rx.buf[rx.r:rx.w]
	if len(b) < rx.need {
		return false, nil
	}
	rx.need = 0
	if len(b) < mpa.LengthSize {
		return false, nil
	}
	ulpdu := int(binary.BigEndian.Uint16(b))
	if ulpdu == 0 {
		if len(b) < mpa.Size(0) {
			return false, nil
		}
		rx.r += mpa.Size(0)
		s.ulpdu = 0 // a Terminate has no header to show
		return true, q.emptyFPDU(b[:mpa.Size(0)])
	}
	if len(b) == mpa.LengthSize {
		return false, nil
	}
	head := mpa.LengthSize + ddp.Size(b[mpa.LengthSize])
	size := ulpdu + mpa.LengthSize - head
	if size < 0 {
		s.ulpdu = 0
		return false, ddpFault(ddp.TypeLocal, 0) // shorter than its own header: there is no code for it
	}
	if len(b) < head {
		return false, nil
	}
	whole := len(b) >= mpa.Size(ulpdu)
	if rx.crc {
		if !whole {
			rx.need = mpa.Size(ulpdu)
			return false, nil
		}
		end := mpa.LengthSize + ulpdu
		if !mpa.CheckTrailer(b[end:mpa.Size(ulpdu)], mpa.Sum(0, b[:end])) {
			return false, mpaFault(mpa.CodeCRC)
		}
	}
	s.h, _ = ddp.Parse(b[mpa.LengthSize:])
	s.ulpdu, s.size, s.left = ulpdu, size, size
	copy(s.raw[:], b[mpa.LengthSize:head])
	if f := q.begin(); f != nil {
		return false, f
	}
	if f := q.target(); f != nil {
		return false, f
	}
	switch {
	case whole:
		return true, q.whole(b[head : head+size])
	case s.placeable():
		s.active = true
		rx.r += head
		return true, nil
	case mpa.Size(ulpdu) > longestWhole:
		return false, ddpFault(ddp.TypeUntagged, ddp.UntaggedTooLong)
	default:
		return false, nil
	}
}

// whole acts on an FPDU that has come in one piece, with that payload.
func (q *qp) whole(payload []byte) *fault {
	s := &q.rx.seg
	if !s.placeable() {
		f := q.control(payload)
		if f == nil {
			q.rx.r += mpa.Size(s.ulpdu)
		}
		return f
	}
	if !s.enter() {
		return ddpFault(ddp.TypeTagged, ddp.TaggedInvalidSTag)
	}
	s.put(payload)
	s.exit()
	q.rx.r += mpa.Size(s.ulpdu)
	return q.deliver()
}

// resume goes on with a segment whose header came before. done means that it is complete.
func (q *qp) resume() (done bool, f *fault) {
	rx := &q.rx
	s := &rx.seg
	if n := min(s.left, rx.w-rx.r); n > 0 {
		b := rx.buf[rx.r : rx.r+n]
		if !s.enter() {
			return false, ddpFault(ddp.TypeTagged, ddp.TaggedInvalidSTag)
		}
		s.put(b)
		s.exit()
		rx.r += n
	}
	trailer := mpa.Trailer(s.ulpdu)
	if s.left > 0 || rx.w-rx.r < trailer {
		return false, nil
	}
	rx.r += trailer
	s.active = false
	return true, q.deliver()
}
