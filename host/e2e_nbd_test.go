package host_test

import (
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"farblk/blockdev/nbd"
	"farblk/host"
	"farblk/target"
)

// nbdClient speaks just enough of the NBD protocol.
type nbdClient struct {
	t    *testing.T
	conn net.Conn
}

func dialNBD(t *testing.T, path, export string) *nbdClient {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(limit))
	c := &nbdClient{t, conn}
	c.read(18)
	b := binary.BigEndian.AppendUint32(nil, 3)                     // fixed newstyle, no zeroes
	b = binary.BigEndian.AppendUint32(append(b, "IHAVEOPT"...), 1) // NBD_OPT_EXPORT_NAME
	c.write(append(binary.BigEndian.AppendUint32(b, uint32(len(export))), export...))
	c.read(10)
	return c
}

func (c *nbdClient) write(b []byte) {
	c.t.Helper()
	if _, err := c.conn.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

func (c *nbdClient) read(n int) []byte {
	c.t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c.conn, b); err != nil {
		c.t.Fatal(err)
	}
	return b
}

// request sends one request at offset 0 and returns the error number of the reply.
func (c *nbdClient) request(command uint16, length int) uint32 {
	c.t.Helper()
	b := binary.BigEndian.AppendUint32(nil, 0x25609513)
	b = binary.BigEndian.AppendUint16(b, 0)
	b = binary.BigEndian.AppendUint16(b, command)
	b = append(b, make([]byte, 16)...) // handle, offset
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	if command == nbdWrite {
		b = append(b, make([]byte, length)...)
	}
	c.write(b)
	errno := binary.BigEndian.Uint32(c.read(16)[4:])
	if command == nbdRead && errno == 0 {
		c.read(length)
	}
	return errno
}

const (
	nbdRead  = 0
	nbdWrite = 1
	nbdFlush = 3
	nbdEIO   = 5
)

// A controller that is given up: clients that were there and new ones get errors, not a closed socket, after which the
// kernel's would try again for ever.
func TestDeadControllerOverNBD(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	cfg := b.config()
	cfg.ReconnectDelay, cfg.CtrlLossTimeout = 10*time.Millisecond, 50*time.Millisecond
	c := dial(t, cfg)
	s := nbd.NewServer(nbd.Config{})
	if err := s.Add(nbd.Export{Name: "n1", Device: c.Namespaces()[0]}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	l, err := nbd.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { defer close(served); _ = s.Serve(l) }()
	defer func() { _ = s.Close(); <-served }()
	old := dialNBD(t, path, "n1")
	if e := old.request(nbdRead, 4096); e != 0 {
		t.Fatal("while it lives:", e)
	}
	if err := b.Target.Close(); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if s := c.State(); s != host.StateDead {
		t.Fatal(s)
	}
	for _, client := range []*nbdClient{old, dialNBD(t, path, "n1")} {
		for _, command := range []uint16{nbdFlush, nbdRead, nbdWrite, nbdRead} {
			length := 4096
			if command == nbdFlush {
				length = 0
			}
			if e := client.request(command, length); e != nbdEIO {
				t.Errorf("command %d: error %d", command, e)
			}
		}
	}
}
