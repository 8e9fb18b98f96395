package target_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"farblk/target"
	"farblk/transport/verbs"
)

// asDevice has software iWARP pass for an RDMA device of another link, so that memory is used as with one.
func asDevice(link verbs.Link) func(verbs.Listener) verbs.Listener {
	return func(l verbs.Listener) verbs.Listener { return deviceListener{l, link} }
}

type deviceListener struct {
	verbs.Listener
	link verbs.Link
}

func (l deviceListener) Accept(ctx context.Context) (verbs.Conn, error) {
	c, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return deviceConn{c, l.link}, nil
}

type deviceConn struct {
	verbs.Conn
	link verbs.Link
}

func (deviceConn) Provider() string { return "verbs" }

func (c deviceConn) Device() verbs.Device {
	d := c.Conn.Device()
	d.Link = c.link
	return d
}

func (c deviceConn) NewPD() (verbs.PD, error) {
	pd, err := c.Conn.NewPD()
	return devicePD{pd, c.link}, err
}

func (c deviceConn) NewQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	return c.Conn.NewQP(pd.(devicePD).PD, cfg)
}

type devicePD struct {
	verbs.PD
	link verbs.Link
}

// Register refuses to lay what is larger than all buffers, a namespace, open to the peer's writes.
func (p devicePD) Register(b []byte, access verbs.Access) (verbs.MR, error) {
	if p.link == verbs.LinkIWARP && access&verbs.ReadSink != 0 {
		access |= verbs.RemoteWrite
	}
	if len(b) > 8<<20 && access&verbs.RemoteWrite != 0 {
		return nil, fmt.Errorf("a host can write to all of %d bytes", len(b))
	}
	return p.PD.Register(b, access)
}

// TestHostsCannotWriteOnTheirOwn: an iWARP adapter, which lets the peer write where an RDMA READ does, is given buffers to
// read into and no namespace.
func TestHostsCannotWriteOnTheirOwn(t *testing.T) {
	b := newBed(t, target.Config{}, asDevice(verbs.LinkIWARP))
	b.subsystem(target.NamespaceConfig{Size: 16 << 20})
	q := connectHost(t, b.addr, subNQN, 1, 32, 0).io[0]
	want := random(64 << 10)
	if err := q.write(1, 8, want, false, false); err != nil {
		t.Fatal(err)
	}
	if got, err := q.read(1, 8, len(want)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("data differ, %v", err)
	}
}
