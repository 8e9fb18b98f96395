package iwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

// Connect dials and shakes hands as MPA initiator.
func (c *conn) Connect(ctx context.Context, p verbs.ConnParams) ([]byte, error) {
	ctx, done, err := c.begin(ctx, true)
	if err != nil {
		return nil, err
	}
	defer done()
	revisions := []uint8{mpa.Revision2, mpa.Revision1}
	if r := c.p.opt.MPARevision; r != 0 {
		revisions = []uint8{uint8(r)}
	}
	var private []byte
	for _, r := range revisions {
		private, err = c.connect(ctx, p, r)
		if !errors.Is(err, errUnanswered) {
			break
		}
	}
	if err != nil {
		return nil, c.ended(ctx, err)
	}
	return private, nil
}

// errUnanswered is a peer that closed the connection on our request, as one of revision 1 may on seeing 2.
var errUnanswered error = &verbs.HandshakeError{Detail: "it accepted the TCP connection and closed it on the MPA request: " +
	"perhaps an NVMe/TCP target or another TCP service, or an iWARP port that refuses this host"}

func (c *conn) connect(ctx context.Context, p verbs.ConnParams, revision uint8) ([]byte, error) {
	tcp, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	l := c.p.negotiable(p, revision)
	request := mpa.NewRequest(l, p.PrivateData)
	frame, err := request.Append(nil)
	if err != nil {
		tcp.Close()
		return nil, err
	}
	var reply mpa.Frame
	err = during(ctx, tcp, func() error {
		if _, err := tcp.Write(frame); err != nil {
			return handshakeError(err)
		}
		var err error
		reply, err = readReply(tcp)
		return err
	})
	if err != nil {
		tcp.Close()
		return nil, err
	}
	if reply.Reject {
		tcp.Close()
		return nil, &verbs.RejectError{Consumer: true, PrivateData: reply.Private}
	}
	o, err := mpa.Conclude(request, reply, l)
	if err != nil {
		if n := (*mpa.NegotiationError)(nil); errors.As(err, &n) {
			_, _ = tcp.Write(terminateFPDU(mpaFault(n.Code).term, request.CRC || reply.CRC))
		}
		refuse(tcp)
		return nil, &verbs.HandshakeError{Detail: err.Error()}
	}
	if err := c.setUp(tcp, o, true); err != nil {
		tcp.Close()
		return nil, err
	}
	return reply.Private, nil
}

func (c *conn) dial(ctx context.Context) (*net.TCPConn, error) {
	d := net.Dialer{FallbackDelay: -1, KeepAlive: -1}
	r := c.route
	if r.Local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(r.Local.IP, 0))
	}
	if r.TOSSet {
		d.Control = func(_, _ string, raw syscall.RawConn) error { return setTOS(raw, r) }
	}
	s, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(r.Remote.IP, r.Remote.Port).String())
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, fmt.Errorf("%w (no TCP listener at %v: a target that offers RoCE or InfiniBand only looks like this, "+
			"and needs an RDMA device on this machine)", verbs.ErrRefused, r.Remote)
	}
	if err != nil {
		return nil, socketError(err)
	}
	tcp := s.(*net.TCPConn)
	if err := configure(tcp); err != nil {
		tcp.Close()
		return nil, err
	}
	return tcp, nil
}

func setTOS(raw syscall.RawConn, r verbs.Route) error {
	var opt error
	err := raw.Control(func(fd uintptr) {
		if r.Remote.IP.Is4() || r.Remote.IP.Is4In6() {
			opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, int(r.TOS))
		} else {
			opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int(r.TOS))
		}
	})
	if err != nil {
		return err
	}
	return opt
}

// readReply reads one MPA reply and not a byte more. A wrong key is noticed with the first bytes.
func readReply(r io.Reader) (mpa.Frame, error) {
	b := make([]byte, mpa.HeaderSize+mpa.MaxPrivate)
	got, want := 0, mpa.HeaderSize
	for got < want {
		n, err := r.Read(b[got:want])
		got += n
		size, bad := mpa.Length(b[:got], mpa.Reply)
		switch {
		case errors.Is(bad, mpa.ErrShort):
		case bad != nil:
			return mpa.Frame{}, &verbs.HandshakeError{Detail: describe(b[:got], bad)}
		default:
			want = size
		}
		if err != nil && got < want {
			if got > 0 && errors.Is(err, io.EOF) {
				return mpa.Frame{}, &verbs.HandshakeError{Detail: "it closed the connection inside its MPA reply"}
			}
			return mpa.Frame{}, handshakeError(err)
		}
	}
	f, err := mpa.Parse(b[:want], mpa.Reply)
	if err != nil {
		return mpa.Frame{}, &verbs.HandshakeError{Detail: err.Error()}
	}
	return f, nil
}

// errSilent is a peer that has not answered when the time is over, which alone does not make it the wrong one.
var errSilent = errors.New("it accepted the TCP connection but has not answered the MPA request: a slow target, " +
	"or a port that does not speak iWARP")

// handshakeError says what a failed read or write means in the handshake.
func handshakeError(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSilent
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return errUnanswered
	}
	return socketError(err)
}

// describe says what answered instead of an iWARP peer.
func describe(b []byte, bad error) string {
	if !errors.Is(bad, mpa.ErrKey) {
		return bad.Error()
	}
	// An NVMe/TCP target answers with an ICResp (type 1) or a C2HTermReq (type 3): PDU type, flags, header length.
	if len(b) >= 3 && (b[0] == 1 && b[2] == 128 || b[0] == 3 && b[2] == 24) {
		return "an NVMe/TCP target answered (use transport tcp, or the target's RDMA port)"
	}
	first, _, _ := bytes.Cut(b, []byte("\n"))
	return fmt.Sprintf("another TCP service answered, with %.40q", first)
}
