//go:build interop && cgo

package iwarp_test

import (
	"context"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/rdmacm"
	"farblk/transport/verbs/verbstest"
)

// mixed connects with one provider and listens with another.
type mixed struct {
	verbs.Provider
	passive verbs.Provider
}

func (m mixed) Listen(ctx context.Context, a verbs.Addr, backlog int) (verbs.Listener, error) {
	return m.passive.Listen(ctx, a, backlog)
}

// windowless hides the memory windows of the listening side: Linux's user-space siw library sends the wrong key with
// SEND with invalidate (rdma-core's providers/siw takes it from the RDMA address, not from invalidate_rkey). The
// kernel's own users send the right one; TestLinuxHost has an example the other way.
type windowless struct{ verbs.Provider }

type (
	windowlessListener struct{ verbs.Listener }
	windowlessConn     struct{ verbs.Conn }
	windowlessPD       struct{ verbs.PD }
)

func (p windowless) Listen(ctx context.Context, a verbs.Addr, backlog int) (verbs.Listener, error) {
	l, err := p.Provider.Listen(ctx, a, backlog)
	return windowlessListener{l}, err
}

func (l windowlessListener) Accept(ctx context.Context) (verbs.Conn, error) {
	c, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return windowlessConn{c}, nil
}

func (c windowlessConn) Device() verbs.Device {
	d := c.Conn.Device()
	d.MemoryWindows = false
	return d
}

func (c windowlessConn) NewPD() (verbs.PD, error) {
	p, err := c.Conn.NewPD()
	return windowlessPD{p}, err
}

func (c windowlessConn) NewQP(p verbs.PD, q verbs.QPConfig) (verbs.QP, error) {
	return c.Conn.NewQP(p.(windowlessPD).PD, q)
}

func (windowlessPD) NewWindow() (verbs.Window, error) { return nil, verbs.ErrUnsupported }

// TestConformanceWithLinux runs the suite between this package and Linux's siw, both ways.
func TestConformanceWithLinux(t *testing.T) {
	o := verbstest.Options{
		Listen:     verbs.Addr{IP: addr(env(t, "FARBLK_SIW_ADDR"))},
		Terminates: true, PlainReject: true, ReadsUnchecked: true, PingPongs: 1000,
	}
	for name, opt := range map[string]iwarp.Options{"CRC": {}, "no CRC": {DisableCRC: true}, "small segments": {MaxSegment: 1456}} {
		t.Run(name, func(t *testing.T) {
			soft, linux := iwarp.New(opt), rdmacm.New(rdmacm.Options{})
			t.Run("connecting", func(t *testing.T) {
				verbstest.Run(t, func(*testing.T) verbs.Provider { return mixed{soft, linux} }, o)
			})
			t.Run("listening", func(t *testing.T) {
				verbstest.Run(t, func(*testing.T) verbs.Provider { return mixed{linux, windowless{soft}} }, o)
			})
		})
	}
}
