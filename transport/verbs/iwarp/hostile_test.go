package iwarp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// raw is a peer that speaks by hand.
type raw struct {
	t *testing.T
	net.Conn
	wrote time.Time // the last time
}

// fpdu frames a segment with a right CRC.
func fpdu(h ddp.Header, payload []byte) []byte {
	b := h.Append([]byte{0, 0})
	b = append(b, payload...)
	ulpdu := len(b) - mpa.LengthSize
	binary.BigEndian.PutUint16(b, uint16(ulpdu))
	return mpa.AppendTrailer(b, ulpdu, mpa.Sum(0, b), true)
}

func (r *raw) write(b []byte) {
	r.t.Helper()
	r.wrote = time.Now()
	if _, err := r.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

// terminate reads until the peer's Terminate, and the end of the stream after it.
func (r *raw) terminate() rdmap.Term {
	r.t.Helper()
	_ = r.SetDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(r)
	defer r.Close()
	// A busy machine may have kept us from reading for as long as the peer waits for our end of the stream.
	slow := errors.Is(err, syscall.ECONNRESET) && time.Since(r.wrote) > 200*time.Millisecond
	if err != nil && !slow {
		r.t.Fatal(err)
	}
	for len(b) >= mpa.LengthSize {
		ulpdu := int(binary.BigEndian.Uint16(b))
		f := b[:mpa.Size(ulpdu)]
		b = b[len(f):]
		h, _ := ddp.Parse(f[mpa.LengthSize:])
		if _, op := rdmap.ParseControl(h.ULP); op != rdmap.Terminate {
			continue
		}
		if h.QN != ddp.QueueTerminate || h.MSN != 1 || h.MO != 0 || !h.Last || len(b) != 0 {
			r.t.Errorf("Terminate %+v with %d bytes after it", h, len(b))
		}
		m, ok := rdmap.ParseTerm(f[mpa.LengthSize+h.Size() : mpa.LengthSize+ulpdu])
		if !ok {
			r.t.Fatalf("no Terminate message in %x", f)
		}
		return m
	}
	r.t.Fatal("closed without a Terminate")
	return rdmap.Term{}
}

// against connects a raw initiator to a queue pair with one posted receive of 256 bytes and IRD 2.
func against(t *testing.T) (*raw, *end) {
	return againstWith(t, mpa.Local{CRC: true, Revision: 2, IRD: 4, ORD: 2})
}

func againstWith(t *testing.T, l mpa.Local) (*raw, *end) {
	ctx := testContext(t)
	at := listen(t, iwarp.New(iwarp.Options{DisableCRC: !l.CRC}), "127.0.0.1")
	tcp, err := net.Dial("tcp", at.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close() })
	request, err := mpa.NewRequest(l, nil).Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	r := &raw{t: t, Conn: tcp}
	r.write(request)
	c, err := at.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	e := newEnd(t, c)
	e.recv(1, recvAt, recvSize)
	if err := c.Accept(ctx, verbs.ConnParams{ResponderResources: 2, InitiatorDepth: 2}); err != nil {
		t.Fatal(err)
	}
	reply := make([]byte, mpa.HeaderSize+mpa.EnhancedSize)
	if _, err := io.ReadFull(r, reply); err != nil {
		t.Fatal(err)
	}
	if f, err := mpa.Parse(reply, mpa.Reply); err != nil || f.CRC != l.CRC || f.Enhanced.IRD != 2 || f.Enhanced.ORD != 2 || f.Enhanced.PeerToPeer != l.PeerToPeer {
		t.Fatalf("reply %+v, %v", f, err)
	}
	return r, e
}

const (
	recvAt   = 4096
	recvSize = 256
)

// TestHostilePeer breaks each rule once, in two writes: the answer is the right Terminate, the connection ends, the receive is
// flushed, and not a byte of memory changes but in the receive buffer.
func TestHostilePeer(t *testing.T) {
	send := func(change func(*ddp.Header)) ddp.Header {
		h := ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 1}
		if change != nil {
			change(&h)
		}
		return h
	}
	write := func(e *end, off int64, change func(*ddp.Header)) ddp.Header {
		h := ddp.Header{
			Tagged: true, Last: true, Version: 1, ULP: rdmap.Control(rdmap.Write), STag: e.mr.RKey(),
			TO: e.mr.RemoteAddr(e.mem) + uint64(off),
		}
		if change != nil {
			change(&h)
		}
		return h
	}
	read := func(msn uint32, r rdmap.Read) []byte {
		return fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: msn}, r.Append(nil))
	}
	data := bytes.Repeat([]byte{0xee}, 300)
	type term struct {
		layer      rdmap.Layer
		kind, code uint8
	}
	dt := func(code uint8) term { return term{rdmap.LayerDDP, ddp.TypeTagged, code} }
	du := func(code uint8) term { return term{rdmap.LayerDDP, ddp.TypeUntagged, code} }
	rp := func(code uint8) term { return term{rdmap.LayerRDMA, rdmap.TypeProtection, code} }
	ro := func(code uint8) term { return term{rdmap.LayerRDMA, rdmap.TypeOperation, code} }
	for name, c := range map[string]struct {
		bytes func(e *end) []byte
		want  term
	}{
		"unknown key":         {func(e *end) []byte { return fpdu(write(e, 0, func(h *ddp.Header) { h.STag++ }), data) }, dt(ddp.TaggedInvalidSTag)},
		"before the region":   {func(e *end) []byte { return fpdu(write(e, -1, nil), data) }, dt(ddp.TaggedBounds)},
		"past the region":     {func(e *end) []byte { return fpdu(write(e, endMemory-299, nil), data) }, dt(ddp.TaggedBounds)},
		"far past the region": {func(e *end) []byte { return fpdu(write(e, endMemory+1, nil), data) }, dt(ddp.TaggedBounds)},
		"offset wraps":        {func(e *end) []byte { return fpdu(write(e, 0, func(h *ddp.Header) { h.TO = ^uint64(0) - 9 }), data) }, dt(ddp.TaggedWrap)},
		"no right to write": {func(e *end) []byte {
			return fpdu(write(e, 0, func(h *ddp.Header) { h.STag, h.TO = e.readOnly() }), data)
		}, rp(rdmap.ProtectionAccess)},
		"second segment outside": {func(e *end) []byte {
			return append(fpdu(write(e, endMemory-4, func(h *ddp.Header) { h.Last = false }), make([]byte, 4)), fpdu(write(e, endMemory, nil), data)...)
		}, dt(ddp.TaggedBounds)},
		"response nobody wants": {func(e *end) []byte {
			return fpdu(write(e, 0, func(h *ddp.Header) { h.ULP = rdmap.Control(rdmap.ReadResponse) }), data)
		}, ro(rdmap.OperationOpcode)},

		"read with unknown key": {func(e *end) []byte {
			return read(1, rdmap.Read{Size: 8, SourceSTag: e.mr.RKey() + 1, SourceTO: e.mr.RemoteAddr(e.mem)})
		}, rp(rdmap.ProtectionInvalidSTag)},
		"read past the region": {func(e *end) []byte {
			return read(1, rdmap.Read{Size: 8, SourceSTag: e.mr.RKey(), SourceTO: e.mr.RemoteAddr(e.mem) + endMemory - 7})
		}, rp(rdmap.ProtectionBounds)},
		"read of 4 GiB": {func(e *end) []byte {
			return read(1, rdmap.Read{Size: ^uint32(0), SourceSTag: e.mr.RKey(), SourceTO: e.mr.RemoteAddr(e.mem)})
		}, rp(rdmap.ProtectionBounds)},
		"read offset wraps": {func(e *end) []byte {
			return read(1, rdmap.Read{Size: 8, SourceSTag: e.mr.RKey(), SourceTO: ^uint64(0) - 3})
		}, rp(rdmap.ProtectionWrap)},
		"no right to read": {func(e *end) []byte {
			key, to := e.writeOnly()
			return read(1, rdmap.Read{Size: 8, SourceSTag: key, SourceTO: to})
		}, rp(rdmap.ProtectionAccess)},
		"read out of turn": {func(e *end) []byte { return read(2, rdmap.Read{}) }, du(ddp.UntaggedMSN)},
		"read request too long": {func(e *end) []byte {
			return fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: 1}, make([]byte, 29))
		}, du(ddp.UntaggedTooLong)},
		"read request of 60 KiB": {func(e *end) []byte {
			return fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: 1}, make([]byte, 60000))
		}, du(ddp.UntaggedTooLong)},
		"read request in parts": {func(e *end) []byte {
			return fpdu(ddp.Header{Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: 1}, make([]byte, 28))
		}, du(ddp.UntaggedTooLong)},
		"read on the send queue": {func(e *end) []byte {
			return fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), MSN: 1}, make([]byte, 28))
		}, ro(rdmap.OperationOpcode)},
		"more reads than IRD": {func(e *end) []byte { return e.reads(read, 3) }, du(ddp.UntaggedNoBuffer)},
		"message too long":    {func(e *end) []byte { return fpdu(send(nil), data) }, du(ddp.UntaggedTooLong)},
		"message of 60 KiB":   {func(e *end) []byte { return fpdu(send(nil), make([]byte, 60000)) }, du(ddp.UntaggedTooLong)},
		"second part too long": {func(e *end) []byte {
			return append(fpdu(send(func(h *ddp.Header) { h.Last = false }), data[:200]), fpdu(send(func(h *ddp.Header) { h.MO = 200 }), data[:57])...)
		}, du(ddp.UntaggedTooLong)},
		"no receive posted": {func(e *end) []byte {
			return append(fpdu(send(nil), data[:8]), fpdu(send(func(h *ddp.Header) { h.MSN = 2 }), data[:8])...)
		}, du(ddp.UntaggedNoBuffer)},
		"message 0":              {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.MSN = 0 }), data[:8]) }, du(ddp.UntaggedMSN)},
		"message 2 first":        {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.MSN = 2 }), data[:8]) }, du(ddp.UntaggedMSN)},
		"offset ahead":           {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.MO = 1 }), data[:8]) }, du(ddp.UntaggedMO)},
		"offset of 4 GiB":        {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.MO = ^uint32(0) }), data[:8]) }, du(ddp.UntaggedMO)},
		"queue 3":                {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.QN = 3 }), data[:8]) }, du(ddp.UntaggedQueue)},
		"send on the read queue": {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.QN = 1 }), data[:8]) }, ro(rdmap.OperationOpcode)},
		"opcode 8":               {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.ULP = 0x48 }), data[:8]) }, ro(rdmap.OperationOpcode)},
		"tagged send": {func(e *end) []byte {
			return fpdu(write(e, 0, func(h *ddp.Header) { h.ULP = rdmap.Control(rdmap.Send) }), data)
		}, ro(rdmap.OperationOpcode)},
		"untagged write": {func(e *end) []byte {
			return fpdu(send(func(h *ddp.Header) { h.ULP = rdmap.Control(rdmap.Write) }), data[:8])
		}, ro(rdmap.OperationOpcode)},
		"RDMAP version 0":       {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.ULP &= 0x3f }), data[:8]) }, ro(rdmap.OperationVersion)},
		"DDP version 0":         {func(e *end) []byte { return fpdu(send(func(h *ddp.Header) { h.Version = 0 }), data[:8]) }, du(ddp.UntaggedVersion)},
		"DDP version 2, tagged": {func(e *end) []byte { return fpdu(write(e, 0, func(h *ddp.Header) { h.Version = 2 }), data) }, dt(ddp.TaggedVersion)},
		"key not to invalidate": {func(e *end) []byte {
			return fpdu(send(func(h *ddp.Header) { h.ULP, h.STag = rdmap.Control(rdmap.SendInvalidate), e.mr.RKey() }), data[:8])
		}, rp(rdmap.ProtectionCannotInvalidate)},
		"invalidation of no key": {func(e *end) []byte {
			return fpdu(send(func(h *ddp.Header) { h.ULP, h.STag = rdmap.Control(rdmap.SendSEInvalidate), e.mr.RKey()+1 }), data[:8])
		}, rp(rdmap.ProtectionCannotInvalidate)},
		"bad CRC": {func(e *end) []byte { b := fpdu(write(e, 0, nil), data); b[30] ^= 1; return b }, term{rdmap.LayerLLP, 0, mpa.CodeCRC}},
		"bad CRC of a long write": {func(e *end) []byte {
			const bit = 2 << 20 // of the tagged offset, which is set by mistake
			b := fpdu(write(e, int64(e.mr.RemoteAddr(e.mem)&bit), nil), bytes.Repeat(data, 200))
			b[mpa.LengthSize+11] |= bit >> 16
			return b
		}, term{rdmap.LayerLLP, 0, mpa.CodeCRC}},
		"bad CRC of a send":       {func(e *end) []byte { b := fpdu(send(nil), data[:8]); b[len(b)-1] ^= 0x80; return b }, term{rdmap.LayerLLP, 0, mpa.CodeCRC}},
		"empty FPDU":              {func(e *end) []byte { return mpa.AppendTrailer([]byte{0, 0}, 0, mpa.Sum(0, []byte{0, 0}), true) }, term{rdmap.LayerDDP, ddp.TypeLocal, 0}},
		"shorter than its header": {func(e *end) []byte { return []byte{0, 5, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0} }, term{rdmap.LayerDDP, ddp.TypeLocal, 0}},
		"garbage":                 {func(e *end) []byte { return bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 2000) }, term{rdmap.LayerLLP, 0, mpa.CodeCRC}},
	} {
		run := func(t *testing.T, crc bool) {
			t.Parallel()
			r, e := againstWith(t, mpa.Local{CRC: crc, Revision: 2, IRD: 4, ORD: 2})
			fill(e.mem, 1)
			before := append([]byte(nil), e.mem...)
			if name == "second segment outside" {
				clear(before[endMemory-4:])
			}
			b := c.bytes(e)
			cut := len(b) / 2
			if name == "more reads than IRD" {
				cut = 0 // the first ones would be answered, and be no more
			}
			r.write(b[:cut])
			var last [1]verbs.Completion
			n, _ := e.qp.Poll(last[:]) // reads the first half
			r.write(b[cut:])
			m := r.terminate()
			if got := (term{m.Layer, m.Type, m.Code}); got != c.want {
				t.Errorf("Terminate says %v (%+v), want %+v", &m, got, c.want)
			}
			if m.Layer != rdmap.LayerLLP && c.want.kind != ddp.TypeLocal && m.Header == nil {
				t.Error("the Terminate lacks the segment in error")
			}
			if n == 0 {
				last[0] = e.next()
			}
			if c := last[0]; c.ID != 1 || name != "no receive posted" && c.Status == verbs.StatusOK {
				t.Errorf("receive ended as %+v", c)
			}
			<-e.conn.Disconnected()
			if !errors.Is(e.conn.Err(), verbs.ErrDisconnected) {
				t.Error(e.conn.Err())
			}
			copy(before[recvAt:recvAt+recvSize], e.mem[recvAt:])
			if !bytes.Equal(before, e.mem) {
				t.Error("memory was touched")
			}
		}
		t.Run(name, func(t *testing.T) { run(t, true) })
		if c.want.layer != rdmap.LayerLLP {
			t.Run(name+", no CRC", func(t *testing.T) { run(t, false) })
		}
	}
}

// readOnly is the key and address of a window that the peer may only read.
func (e *end) readOnly() (uint32, uint64) { return e.window(verbs.RemoteRead) }

func (e *end) writeOnly() (uint32, uint64) { return e.window(verbs.RemoteWrite) }

func (e *end) window(access verbs.Access) (uint32, uint64) {
	w, err := e.pd.NewWindow()
	if err != nil {
		e.t.Fatal(err)
	}
	key, to, err := w.Bind(e.mr, e.mem[:4096], access)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { w.Close() })
	return key, to
}

// reads is n good Read Requests at once.
func (e *end) reads(read func(uint32, rdmap.Read) []byte, n int) (b []byte) {
	for i := range n {
		b = append(b, read(uint32(i+1), rdmap.Read{Size: 8, SourceSTag: e.mr.RKey(), SourceTO: e.mr.RemoteAddr(e.mem)})...)
	}
	return b
}

// TestHostileResponder answers our RDMA READ wrongly: the READ fails, and only its own buffer may have changed.
func TestHostileResponder(t *testing.T) {
	const size = 64
	for name, change := range map[string]func(h *ddp.Header, payload []byte) []byte{
		"another key":     func(h *ddp.Header, p []byte) []byte { h.STag++; return p },
		"another offset":  func(h *ddp.Header, p []byte) []byte { h.TO += 8; return p },
		"too long":        func(h *ddp.Header, p []byte) []byte { return append(p, 0) },
		"too short":       func(h *ddp.Header, p []byte) []byte { return p[1:] },
		"not the last":    func(h *ddp.Header, p []byte) []byte { h.Last = false; return p },
		"write, not read": func(h *ddp.Header, p []byte) []byte { h.ULP = rdmap.Control(rdmap.Write); return p },
	} {
		t.Run(name, func(t *testing.T) {
			r, e := against(t)
			r.write(fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 1}, nil))
			e.expect(1, verbs.StatusOK)
			w := e.send(2, verbs.OpRDMARead, 0, 0, size)
			w.RKey, w.RemoteAddr = 1, 2
			e.post(w, e.send(3, verbs.OpSend, verbs.Fence, 0, 4))
			b := make([]byte, mpa.Size(ddp.UntaggedSize+rdmap.ReadSize))
			if _, err := io.ReadFull(r, b); err != nil {
				t.Fatal(err)
			}
			q, ok := rdmap.ParseRead(b[mpa.LengthSize+ddp.UntaggedSize:][:rdmap.ReadSize])
			if !ok || q.Size != size || q.SourceSTag != 1 || q.SourceTO != 2 {
				t.Fatalf("%+v", q)
			}
			h := ddp.Header{Tagged: true, Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadResponse), STag: q.SinkSTag, TO: q.SinkTO}
			payload := change(&h, bytes.Repeat([]byte{0xee}, size))
			r.write(fpdu(h, payload))
			r.terminate()
			if c := e.next(); c.ID != 2 || c.Status == verbs.StatusOK {
				t.Errorf("READ ended as %+v", c)
			}
			e.expect(3, verbs.StatusFlushed)
			if i := bytes.IndexFunc(e.mem[size:], func(r rune) bool { return r != 0 }); i >= 0 {
				t.Errorf("byte %d was touched", size+i)
			}
		})
	}
}

// TestSlowReader asks for two regions' memory and takes it slowly: when the second is closed before its turn has come, it
// is not touched any more, and may be unmapped.
func TestSlowReader(t *testing.T) {
	r, e := against(t)
	mem, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	mr, err := e.pd.Register(mem, verbs.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	for i, read := range []rdmap.Read{
		{Size: endMemory, SourceSTag: e.mr.RKey(), SourceTO: e.mr.RemoteAddr(e.mem)}, // more than the sockets hold
		{Size: uint32(len(mem)), SourceSTag: mr.RKey(), SourceTO: mr.RemoteAddr(mem)},
	} {
		h := ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: uint32(i + 1)}
		r.write(fpdu(h, read.Append(nil)))
	}
	r.write(fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 1}, nil))
	e.expect(1, verbs.StatusOK)
	mr.Close()
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	_ = r.SetDeadline(time.Now().Add(patience))
	if n, err := io.Copy(io.Discard, r); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%d bytes and %v", n, err)
	}
}

// TestSlowPeer sends good traffic byte by byte, and stops in the middle: others are served meanwhile.
func TestSlowPeer(t *testing.T) {
	r, e := against(t)
	h := ddp.Header{Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 1}
	first := fpdu(h, []byte("one"))
	h.Last, h.MO = true, 3
	for _, b := range append(first, fpdu(h, []byte("two"))...) {
		r.write([]byte{b})
	}
	if c := e.expect(1, verbs.StatusOK); c.Bytes != 6 || string(e.mem[recvAt:recvAt+6]) != "onetwo" {
		t.Errorf("%+v, %q", c, e.mem[recvAt:recvAt+6])
	}
	e.recv(2, recvAt, recvSize)
	h = ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 2}
	r.write(fpdu(h, make([]byte, 100))[:50])
	a, b := pair(t, iwarp.Options{}, iwarp.Options{})
	b.recv(1, 0, 8)
	a.post(a.send(1, verbs.OpSend, 0, 0, 8))
	b.expect(1, verbs.StatusOK)
	r.Close()
	e.expect(2, verbs.StatusFlushed)
	<-e.conn.Disconnected()
	if !errors.Is(e.conn.Err(), verbs.ErrDisconnected) {
		t.Error(e.conn.Err())
	}
}
