package iwarp

import (
	"bytes"
	"net"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// FuzzStream gives the receiver any bytes, in pieces of any size: it neither panics nor writes outside of what the
// peer may write to, nor completes what did not come. With CRC, which no input has right, it does not write at all.
func FuzzStream(f *testing.F) {
	h := ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 1}
	frame := func(h ddp.Header, payload []byte) []byte {
		b := h.Append([]byte{0, byte(h.Size() + len(payload))})
		return mpa.AppendTrailer(append(b, payload...), h.Size()+len(payload), 0, false)
	}
	f.Add(frame(h, []byte("hello")), uint8(7))
	f.Add(frame(ddp.Header{Tagged: true, Last: true, Version: 1, ULP: rdmap.Control(rdmap.Write), STag: 1, TO: 0x1000}, []byte("data")), uint8(3))
	f.Add(frame(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: 1}, make([]byte, 28)), uint8(255))
	f.Add(frame(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Terminate), QN: 2, MSN: 1}, make([]byte, 4)), uint8(1))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		receive(t, stream, int(piece)+1, false)
		receive(t, stream, int(piece)+1, true)
	})
}

func receive(t *testing.T, stream []byte, piece int, crc bool) {
	const size = 256
	mem := bytes.Repeat([]byte{0x5a}, 4*size)
	domain := &pd{keys: make(map[uint32]*region)}
	domain.keys[1] = &region{pd: domain, key: 1, mem: mem[size : 2*size], base: 0x1000, access: verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead}
	c := newConn(New(Options{}))
	q, err := newQP(c, domain, verbs.QPConfig{SendDepth: 4, RecvDepth: 4})
	if err != nil {
		t.Fatal(err)
	}
	q.link = link{tcp: &net.TCPConn{}, fd: -1}
	q.tx.start(terms{outcome: mpa.Outcome{IRD: 2, ORD: 2}, ulpdu: 1000})
	q.rx.crc = crc
	q.rq.ring[0] = verbs.RecvWR{ID: 9, SGE: verbs.SGE{Data: mem[3*size:]}}
	q.rq.count = 1
	q.state.Store(stateUp)
	for len(stream) > 0 && q.state.Load() == stateUp {
		rx := &q.rx
		free := rx.room()
		n := copy(free[:min(len(free), piece)], stream)
		if n == 0 {
			t.Fatal("the stream buffer is full and nothing of it is consumed")
		}
		rx.w += n
		stream = stream[n:]
		if q.consume() != nil {
			break
		}
		q.tx.answers.count = 0
	}
	for i, b := range mem {
		if b != 0x5a && (crc || i < size || i >= 2*size && i < 3*size) {
			t.Fatalf("byte %d was touched", i)
		}
	}
	var cs [8]verbs.Completion
	if n := q.cq.take(cs[:]); n > 1 || n > 0 && crc || n == 1 && (cs[0].ID != 9 || cs[0].Bytes > size) {
		t.Fatalf("completions %+v", cs[:n])
	}
}
