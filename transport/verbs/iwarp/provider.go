// Package iwarp is a verbs provider in pure Go that needs no RDMA device, no kernel module and no privilege: it
// speaks iWARP (RFC 5040, 5041, 5044, 6581) over an ordinary TCP socket. The peer may be Linux's siw, an iWARP
// adapter, or this package.
//
// Layers: internal/mpa frames, internal/ddp places, internal/rdmap gives the operations; they are codecs and
// pure state. This package owns the sockets, the memory keys, the queues and the threads.
//
// No goroutine stands in the data path. QP.Poll reads the socket itself, places what came and returns the
// completions; QP.PostSend writes a whole chain with one writev, from registered memory. One goroutine for each
// connection (engine.go) waits on the socket while nobody polls; another writes what a full socket left over,
// and lives only as long.
//
// With CRC, nothing of an FPDU is believed or placed before its CRC was found right; without, payload is placed as it comes.
// A connection that is closed, or whose process has died, sends nothing more: what the kernel still holds is dropped.
//
// As with any RDMA device, memory handed to a posted work request, or readable by the peer, must not change while
// it is being sent: with CRC on, that would end the connection.
package iwarp

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

// Limits of the one software device.
const (
	maxQPDepth = 1 << 14
	maxReads   = 128 // RDMA Reads at once on one connection, each way
)

// Options of New. The zero value is right for all but tests.
type Options struct {
	// DisableCRC does not ask for CRC; it is used all the same if the peer does (RFC 5044 section 7.1.1).
	DisableCRC bool
	// MPARevision is the first revision tried when connecting: 1 or 2. 0 means 2, and then 1 with a peer that
	// closes the connection on seeing revision 2 (RFC 6581 section 9).
	MPARevision int
	// PeerToPeer asks, when connecting, that the listening side may send first (RFC 6581 section 9.2).
	PeerToPeer bool
	// HandshakeTimeout bounds how long a listener waits for a connection's MPA request; 0 means 10 s.
	HandshakeTimeout time.Duration
	// MaxSegment bounds the bytes of one DDP segment, header included. 0 means what fits a TCP segment, as
	// RFC 5044 section 4.5 asks.
	MaxSegment int
	// Logger gets connection events, at debug level. nil logs nothing.
	Logger *slog.Logger
}

// Provider implements verbs.Provider.
type Provider struct {
	opt Options
	log *slog.Logger
}

// New makes a provider. It holds no resources itself.
func New(o Options) *Provider {
	if o.HandshakeTimeout <= 0 {
		o.HandshakeTimeout = 10 * time.Second
	}
	p := &Provider{opt: o, log: o.Logger}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	return p
}

// Name is "iwarp".
func (p *Provider) Name() string { return "iwarp" }

var device = verbs.Device{
	Name: "tcp", Link: verbs.LinkIWARP,
	MaxQPDepth: maxQPDepth, MaxSGE: verbs.MaxSGE, MaxCQE: 2 * maxQPDepth,
	MaxResponderResources: maxReads, MaxInitiatorDepth: maxReads,
	MaxMR: 1 << 40, MemoryWindows: true,
}

// Devices is the one software device, always there.
func (p *Provider) Devices() ([]verbs.Device, error) { return []verbs.Device{device}, nil }

// Resolve asks the kernel for a route to r.Remote. Nothing is sent.
func (p *Provider) Resolve(ctx context.Context, r verbs.Route) (verbs.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if r.Device != "" && r.Device != device.Name {
		return nil, fmt.Errorf("%q: %w", r.Device, verbs.ErrNoDevice)
	}
	if r.Remote.Family != verbs.FamilyIP || r.Local.IsValid() && r.Local.Family != verbs.FamilyIP {
		return nil, fmt.Errorf("%v is no IP address: %w", r.Remote, verbs.ErrNoDevice)
	}
	if !r.Remote.IP.IsValid() || r.Remote.Port == 0 {
		return nil, fmt.Errorf("%v: no address and port to connect to: %w", r.Remote, verbs.ErrUnreachable)
	}
	local, err := route(ctx, r)
	if err != nil {
		return nil, err
	}
	c := newConn(p)
	c.route = r
	c.local, c.remote = verbs.Addr{IP: local}, r.Remote
	return c, nil
}

// route finds the source address that the kernel would take, by connecting a datagram socket.
func route(ctx context.Context, r verbs.Route) (netip.Addr, error) {
	d := net.Dialer{}
	if r.Local.IsValid() {
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(r.Local.IP, 0))
	}
	u, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(r.Remote.IP, r.Remote.Port).String())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("route to %v: %w", r.Remote, socketError(err))
	}
	defer u.Close()
	return u.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

func addrOf(a net.Addr) verbs.Addr {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return verbs.Addr{}
	}
	ap := t.AddrPort()
	return verbs.Addr{IP: ap.Addr().Unmap(), Port: ap.Port()}
}

// negotiable is this side's offer for the handshake.
func (p *Provider) negotiable(c verbs.ConnParams, revision uint8) mpa.Local {
	return mpa.Local{
		CRC: !p.opt.DisableCRC, Revision: revision,
		IRD: uint16(min(c.ResponderResources, maxReads)), ORD: uint16(min(c.InitiatorDepth, maxReads)), MaxIRD: maxReads,
		PeerToPeer: p.opt.PeerToPeer, RTR: mpa.RTRWrite | mpa.RTRRead | mpa.RTRFPDU,
	}
}
