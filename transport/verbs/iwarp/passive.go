package iwarp

import (
	"context"
	"errors"
	"net"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

// PrivateData is what came with the request.
func (c *conn) PrivateData() []byte { return c.request.Private }

// PeerParams is what the request asked for. Revision 1 does not tell: one RDMA READ at a time is then safe.
func (c *conn) PeerParams() verbs.ConnParams {
	p := verbs.ConnParams{PrivateData: c.request.Private, ResponderResources: 1, InitiatorDepth: maxReads}
	if c.request.IsEnhanced {
		p.ResponderResources = uint8(min(c.request.Enhanced.IRD, 255))
		p.InitiatorDepth = uint8(min(c.request.Enhanced.ORD, 255))
	}
	return p
}

// takeSocket gives the passive side's socket to the caller.
func (c *conn) takeSocket() (*net.TCPConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	tcp := c.tcp
	c.tcp = nil
	if tcp == nil {
		return nil, errors.New("this side made the connection: there is no request to answer")
	}
	return tcp, nil
}

// send writes a frame of the handshake.
func send(ctx context.Context, tcp *net.TCPConn, f mpa.Frame) error {
	b, err := f.Append(nil)
	if err != nil {
		return err
	}
	return during(ctx, tcp, func() error {
		_, err := tcp.Write(b)
		return err
	})
}

// Accept sends the positive reply. The connection is up with it; nothing is sent before the initiator's first FPDU.
func (c *conn) Accept(ctx context.Context, p verbs.ConnParams) error {
	ctx, done, err := c.begin(ctx, true)
	if err != nil {
		return err
	}
	defer done()
	tcp, err := c.takeSocket()
	if err != nil {
		return err
	}
	l := c.p.negotiable(p, c.request.Revision)
	reply, o := mpa.Accept(c.request, l, p.PrivateData)
	if err = send(ctx, tcp, reply); err == nil {
		err = c.setUp(tcp, o, false)
	}
	if err != nil {
		tcp.Close()
		return c.ended(ctx, socketError(err))
	}
	return nil
}

// Reject sends the negative reply.
func (c *conn) Reject(private []byte) error {
	ctx, done, err := c.begin(context.Background(), false)
	if err != nil {
		return err
	}
	defer done()
	tcp, err := c.takeSocket()
	if err != nil {
		return err
	}
	err = send(ctx, tcp, mpa.Refuse(c.request, private))
	refuse(tcp)
	c.end(verbs.ErrClosed)
	return err
}
