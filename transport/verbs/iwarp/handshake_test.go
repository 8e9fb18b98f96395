package iwarp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// service runs handle for each TCP connection to it.
func service(t *testing.T, handle func(net.Conn)) verbs.Addr {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			handle(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	a := l.Addr().(*net.TCPAddr).AddrPort()
	return verbs.Addr{IP: a.Addr(), Port: a.Port()}
}

func request(c net.Conn) mpa.Frame {
	b := make([]byte, mpa.HeaderSize+mpa.MaxPrivate)
	n, _ := c.Read(b)
	f, _ := mpa.Parse(b[:n], mpa.Request)
	return f
}

// TestNotIWARP connects to what users point an RDMA host at by mistake; the error says what it looks like.
func TestNotIWARP(t *testing.T) {
	reply := func(change func(*mpa.Frame)) func(net.Conn) {
		return func(c net.Conn) {
			f, _ := mpa.Accept(request(c), mpa.Local{}, []byte("private"))
			change(&f)
			b, _ := f.Append(nil)
			c.Write(b)
			io.Copy(io.Discard, c)
		}
	}
	for name, c := range map[string]struct {
		handle func(net.Conn)
		want   string
	}{
		"closes":           {func(c net.Conn) { request(c) }, "closed it on the MPA request"},
		"resets":           {func(c net.Conn) { c.Read(make([]byte, 1)); c.(*net.TCPConn).SetLinger(0) }, "closed it on the MPA request"},
		"SSH":              {func(c net.Conn) { c.Write([]byte("SSH-2.0-OpenSSH_9.2\r\n")); io.Copy(io.Discard, c) }, `with "SSH-2.0`},
		"SMTP, one byte":   {func(c net.Conn) { c.Write([]byte("2")); io.Copy(io.Discard, c) }, `with "2"`},
		"NVMe/TCP":         {func(c net.Conn) { c.Write([]byte{1, 0, 128, 0, 128, 0, 0, 0}); io.Copy(io.Discard, c) }, "NVMe/TCP"},
		"NVMe/TCP, error":  {func(c net.Conn) { c.Write([]byte{3, 0, 24, 0, 80, 0, 0, 0}); io.Copy(io.Discard, c) }, "NVMe/TCP"},
		"cut reply":        {func(c net.Conn) { request(c); c.Write([]byte("MPA ID Rep Frame")) }, "inside its MPA reply"},
		"markers":          {reply(func(f *mpa.Frame) { f.Markers = true }), "markers"},
		"other revision":   {reply(func(f *mpa.Frame) { f.Revision = 1; f.IsEnhanced = false }), "revision"},
		"too many reads":   {reply(func(f *mpa.Frame) { f.Enhanced.ORD = 1000 }), "RDMA Reads"},
		"request as reply": {func(c net.Conn) { c.Write([]byte("MPA ID Req Frame")); io.Copy(io.Discard, c) }, "MPA ID Req"},
		"long private data": {func(c net.Conn) {
			c.Write(append([]byte("MPA ID Rep Frame"), 0, 2, 2, 1))
			io.Copy(io.Discard, c)
		}, "513 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			conn, err := iwarp.New(iwarp.Options{}).Resolve(ctx, verbs.Route{Remote: service(t, c.handle)})
			if err != nil {
				t.Fatal(err)
			}
			e := newEnd(t, conn)
			_, err = conn.Connect(ctx, params)
			var h *verbs.HandshakeError
			if !errors.As(err, &h) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want a HandshakeError with %q", err, c.want)
			}
			if errors.Is(err, verbs.ErrTimeout) {
				t.Error("is ErrTimeout")
			}
			if n, err := e.qp.Poll(make([]verbs.Completion, 1)); n != 0 || err != nil {
				t.Errorf("poll: %d, %v", n, err)
			}
		})
	}
}

// overdue is a context whose deadline passes when over is closed.
type overdue struct {
	context.Context
	over chan struct{}
}

func (o overdue) Done() <-chan struct{} { return o.over }

func (o overdue) Err() error {
	select {
	case <-o.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// TestSilence: no answer, or half of one, is a timeout and not a wrong peer.
func TestSilence(t *testing.T) {
	for _, reply := range []string{"", "MPA ID Rep Frame"} {
		ctx := overdue{t.Context(), make(chan struct{})}
		at := service(t, func(c net.Conn) {
			request(c)
			io.WriteString(c, reply)
			close(ctx.over)
			io.Copy(io.Discard, c)
		})
		conn, err := iwarp.New(iwarp.Options{}).Resolve(ctx, verbs.Route{Remote: at})
		if err != nil {
			t.Fatal(err)
		}
		newEnd(t, conn)
		_, err = conn.Connect(ctx, params)
		var h *verbs.HandshakeError
		if !errors.Is(err, verbs.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &h) ||
			!strings.Contains(err.Error(), "a slow target") {
			t.Errorf("%q: %v", reply, err)
		}
	}
}

// TestRevision1Depths: a peer of revision 1 cannot be told how many of its RDMA READs are served, so all are that it
// may well issue.
func TestRevision1Depths(t *testing.T) {
	a, b := pairOf(t, iwarp.Options{MPARevision: 1}, iwarp.Options{}, verbs.ConnParams{ResponderResources: 1, InitiatorDepth: 128})
	b.recv(0, 0, 0)
	a.post(a.send(0, verbs.OpSend, 0, 0, 0)) // from now on the responder may send
	a.expect(0, verbs.StatusOK)
	b.expect(0, verbs.StatusOK)
	for _, c := range []struct{ from, to *end }{{a, b}, {b, a}} {
		var reads []*verbs.SendWR
		for i := range uint64(128) {
			r := c.from.send(i, verbs.OpRDMARead, 0, int(i)*8, 8)
			r.RKey, r.RemoteAddr = c.to.mr.RKey(), c.to.mr.RemoteAddr(c.to.mem)
			reads = append(reads, r)
		}
		c.from.post(reads...)
		for i := range reads {
			c.from.expect(uint64(i), verbs.StatusOK)
		}
	}
}

// TestRevision1Peer is a responder that closes the connection when it sees revision 2.
func TestRevision1Peer(t *testing.T) {
	ctx := testContext(t)
	l := listen(t, iwarp.New(iwarp.Options{}), "127.0.0.1")
	at := service(t, func(c net.Conn) {
		f := request(c)
		if f.Revision != 1 {
			return
		}
		s, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		b, _ := f.Append(nil)
		s.Write(b)
		go io.Copy(c, s)
		io.Copy(s, c)
	})
	conn, err := iwarp.New(iwarp.Options{}).Resolve(ctx, verbs.Route{Remote: at})
	if err != nil {
		t.Fatal(err)
	}
	a := newEnd(t, conn)
	got := make(chan error, 1)
	go func() {
		_, err := conn.Connect(ctx, params)
		got <- err
	}()
	s, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if p := s.PeerParams(); p.ResponderResources != 1 {
		t.Errorf("a peer of revision 1 is trusted with %d reads", p.ResponderResources)
	}
	b := newEnd(t, s)
	b.recv(1, 0, 8)
	if err := s.Accept(ctx, params); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	a.post(a.send(1, verbs.OpSend, 0, 0, 8))
	b.expect(1, verbs.StatusOK)
	a.conn.Disconnect()
}

// TestResponderMaySend: what the responder posts goes out only after the initiator's first FPDU, which in
// peer-to-peer mode is any of the three RTR frames (RFC 5044 section 7.1.3, RFC 6581 section 9.2).
func TestResponderMaySend(t *testing.T) {
	for name, c := range map[string]struct {
		rtr   mpa.RTR
		frame []byte
	}{
		"first send": {0, fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.Send), MSN: 1}, nil)},
		"write":      {mpa.RTRWrite | mpa.RTRFPDU, fpdu(ddp.Header{Tagged: true, Last: true, Version: 1}, nil)},
		"read":       {mpa.RTRRead, fpdu(ddp.Header{Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadRequest), QN: 1, MSN: 1}, make([]byte, 28))},
		"empty FPDU": {mpa.RTRFPDU, mpa.AppendTrailer([]byte{0, 0}, 0, mpa.Sum(0, []byte{0, 0}), true)},
	} {
		if c.rtr&mpa.RTRWrite != 0 {
			c.frame = fpdu(ddp.Header{Tagged: true, Last: true, Version: 1, ULP: rdmap.Control(rdmap.Write)}, nil)
		}
		t.Run(name, func(t *testing.T) {
			r, e := againstWith(t, mpa.Local{CRC: true, Revision: 2, IRD: 4, ORD: 2, PeerToPeer: c.rtr != 0, RTR: c.rtr})
			e.post(e.send(7, verbs.OpSend, 0, 0, 5))
			if n, err := e.qp.Poll(make([]verbs.Completion, 1)); n != 0 || err != nil {
				t.Fatalf("sent before the initiator: %d, %v", n, err)
			}
			r.write(c.frame)
			for {
				if done := e.next(); done.ID == 7 {
					break
				}
			}
			r.Close()
		})
	}
}

// TestReadAfterRTR: the answer to the RTR frame that is an RDMA Read is not taken for that to the first RDMA READ.
func TestReadAfterRTR(t *testing.T) {
	const size = 8
	at := service(t, func(c net.Conn) {
		f, _ := mpa.Accept(request(c), mpa.Local{CRC: true, IRD: 2, RTR: mpa.RTRRead}, nil)
		b, _ := f.Append(nil)
		c.Write(b)
		var answers []byte
		for _, n := range []int{0, size} {
			b := make([]byte, mpa.Size(ddp.UntaggedSize+rdmap.ReadSize))
			io.ReadFull(c, b)
			r, _ := rdmap.ParseRead(b[mpa.LengthSize+ddp.UntaggedSize:][:rdmap.ReadSize])
			h := ddp.Header{Tagged: true, Last: true, Version: 1, ULP: rdmap.Control(rdmap.ReadResponse), STag: r.SinkSTag, TO: r.SinkTO}
			if answers = append(answers, fpdu(h, make([]byte, n))...); n == size {
				c.Write(answers) // both requests were on the way before the first answer
			}
		}
		io.Copy(io.Discard, c)
	})
	conn, err := iwarp.New(iwarp.Options{PeerToPeer: true}).Resolve(t.Context(), verbs.Route{Remote: at})
	if err != nil {
		t.Fatal(err)
	}
	e := newEnd(t, conn)
	if _, err := conn.Connect(t.Context(), params); err != nil {
		t.Fatal(err)
	}
	e.post(e.send(1, verbs.OpRDMARead, 0, 0, size))
	e.expect(1, verbs.StatusOK)
}

// TestListenerUnderAttack: connections that say nothing, nonsense or too much do not keep others out.
func TestListenerUnderAttack(t *testing.T) {
	ctx := testContext(t)
	p := iwarp.New(iwarp.Options{})
	l, err := p.Listen(ctx, verbs.Addr{IP: loopback}, 4)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	attack := func(s string) {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := io.WriteString(c, s); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		attack("") // silence
		attack("MPA ID Req Fra")
		attack("GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
		attack("MPA ID Req Frame\x40\x02\xff\xff")
		attack("MPA ID Rep Frame\x40\x02\x00\x00")
	}
	// Markers, and a revision of the future, are refused by a reply.
	for _, f := range []mpa.Frame{{Markers: true, Revision: 2}, {Revision: 3}, {Revision: 0}} {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		b, _ := f.Append(nil)
		c.Write(b)
		b, err = io.ReadAll(c)
		if r, err2 := mpa.Parse(b, mpa.Reply); err != nil || err2 != nil || !r.Reject {
			t.Errorf("%+v was answered with %+v, %v, %v", f, r, err, err2)
		}
		c.Close()
	}
	c, err := p.Resolve(ctx, verbs.Route{Remote: l.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	newEnd(t, c)
	got := make(chan error, 1)
	go func() {
		_, err := c.Connect(ctx, params)
		got <- err
	}()
	s, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	newEnd(t, s)
	if err := s.Accept(ctx, params); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

// TestListenerTimeout: a request that does not come in time ends the connection.
func TestListenerTimeout(t *testing.T) {
	l := listen(t, iwarp.New(iwarp.Options{HandshakeTimeout: 20 * time.Millisecond}), "127.0.0.1")
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("%d, %v", n, err)
	}
}

func TestResolveErrors(t *testing.T) {
	p := iwarp.New(iwarp.Options{})
	for name, c := range map[string]struct {
		r    verbs.Route
		want error
	}{
		"InfiniBand":   {verbs.Route{Remote: verbs.Addr{Family: verbs.FamilyIB, IP: loopback, Port: 1}}, verbs.ErrNoDevice},
		"other device": {verbs.Route{Remote: verbs.Addr{IP: loopback, Port: 1}, Device: "mlx5_0"}, verbs.ErrNoDevice},
		"no address":   {verbs.Route{}, verbs.ErrUnreachable},
		"not ours":     {verbs.Route{Remote: verbs.Addr{IP: loopback, Port: 1}, Local: verbs.Addr{IP: addr("192.0.2.1")}}, verbs.ErrAddrNotAvailable},
		"no zone":      {verbs.Route{Remote: verbs.Addr{IP: addr("fe80::1"), Port: 1}}, verbs.ErrUnreachable},
		"unknown zone": {verbs.Route{Remote: verbs.Addr{IP: addr("fe80::1%nosuch0"), Port: 1}}, verbs.ErrUnreachable},
	} {
		if _, err := p.Resolve(t.Context(), c.r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
