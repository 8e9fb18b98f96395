package nbd

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// client is the other side, for tests: it says exactly what it is told to.
type client struct {
	t    testing.TB
	sock net.Conn
}

const testLimit = 20 * time.Second

// serve starts a server on a Unix socket and gives the socket's path.
func serve(t testing.TB, c Config, exports ...Export) (*Server, string) {
	t.Helper()
	s := NewServer(c)
	for _, e := range exports {
		if err := s.Add(e); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Serve: %v", err)
		}
	})
	return s, path
}

func dial(t testing.TB, path string) *client {
	t.Helper()
	sock, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sock.Close() })
	_ = sock.SetDeadline(time.Now().Add(testLimit))
	return &client{t, sock}
}

func (c *client) send(b []byte) {
	c.t.Helper()
	if _, err := c.sock.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) receive(n int) []byte {
	c.t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c.sock, b); err != nil {
		c.t.Fatal(err)
	}
	return b
}

// closed checks that the server closed the connection, and had nothing more to say.
func (c *client) closed() {
	c.t.Helper()
	c.closedAfter(0)
}

// closedAfter is closed, but for n bytes.
func (c *client) closedAfter(n int) {
	c.t.Helper()
	got, err := io.Copy(io.Discard, c.sock)
	var timeout net.Error
	if got != int64(n) || errors.As(err, &timeout) && timeout.Timeout() {
		c.t.Fatalf("the connection is still open (%d bytes, %v)", got, err)
	}
}

// greet does the first exchange, with flags as the client's.
func (c *client) greet(flags uint32) {
	c.t.Helper()
	b := c.receive(18)
	if binary.BigEndian.Uint64(b) != magicServer || binary.BigEndian.Uint64(b[8:]) != magicOption ||
		binary.BigEndian.Uint16(b[16:]) != flagFixedNewstyle|flagNoZeroes {
		c.t.Fatalf("greeting % x", b)
	}
	c.send(binary.BigEndian.AppendUint32(nil, flags))
}

// optionReply is one answer to an option.
type optionReply struct {
	kind uint32
	data []byte
}

// option sends an option and gives the answers, up to the last.
func (c *client) option(option uint32, data []byte) (all []optionReply) {
	c.t.Helper()
	c.send(appendOption(nil, option, data))
	for {
		b := c.receive(20)
		if binary.BigEndian.Uint64(b) != magicReply || binary.BigEndian.Uint32(b[8:]) != option {
			c.t.Fatalf("answer to option %d: % x", option, b)
		}
		r := optionReply{kind: binary.BigEndian.Uint32(b[12:])}
		r.data = c.receive(int(binary.BigEndian.Uint32(b[16:])))
		all = append(all, r)
		if r.kind == repAck || r.kind&(1<<31) != 0 {
			return all
		}
	}
}

// open begins the transmission phase, and gives the export's size and flags.
func (c *client) open(name string, structured bool) (size uint64, flags uint16) {
	c.t.Helper()
	c.greet(flagFixedNewstyle | flagNoZeroes)
	if structured {
		c.option(optStructuredReply, nil)
		c.option(optSetMetaContext, appendMetaRequest(nil, metaRequest{name, []string{contextBase}}))
	}
	r := c.option(optGo, appendInfoRequest(nil, infoRequest{name: name}))
	if len(r) != 2 || r[0].kind != repInfo || len(r[0].data) != 12 || r[1].kind != repAck {
		c.t.Fatalf("answers to GO: %+v", r)
	}
	return binary.BigEndian.Uint64(r[0].data[2:]), binary.BigEndian.Uint16(r[0].data[10:])
}

// reply is a simple reply, or a chunk of a structured one.
type reply struct {
	simple bool
	done   bool
	kind   uint16
	errno  uint32
	cookie uint64
	offset uint64
	data   []byte
}

// next reads one reply or chunk; n is how many bytes of data a simple reply without an error has.
func (c *client) next(n int) (r reply) {
	c.t.Helper()
	head := c.receive(simpleSize)
	switch binary.BigEndian.Uint32(head) {
	case magicSimple:
		r = reply{simple: true, done: true, errno: binary.BigEndian.Uint32(head[4:]), cookie: binary.BigEndian.Uint64(head[8:])}
		if r.errno == 0 {
			r.data = c.receive(n)
		}
	case magicStructured:
		r = reply{done: binary.BigEndian.Uint16(head[4:])&chunkDone != 0, kind: binary.BigEndian.Uint16(head[6:]), cookie: binary.BigEndian.Uint64(head[8:])}
		r.data = c.receive(int(binary.BigEndian.Uint32(c.receive(4))))
		switch r.kind {
		case chunkOffsetData:
			r.offset, r.data = binary.BigEndian.Uint64(r.data), r.data[8:]
		case chunkError, chunkErrorOffset:
			r.errno = binary.BigEndian.Uint32(r.data)
		}
	default:
		c.t.Fatalf("reply % x", head)
	}
	return r
}

// do sends one request, with its payload, and gives the reply or the chunks.
func (c *client) do(r request, payload []byte) []reply {
	c.t.Helper()
	r.cookie = 0x0123456789abcdef ^ uint64(r.command)<<32 ^ r.offset
	go func() { _, _ = c.sock.Write(append(appendRequest(nil, r), payload...)) }()
	var all []reply
	for len(all) == 0 || !all[len(all)-1].done {
		n := 0
		if r.command == cmdRead {
			n = int(r.length)
		}
		x := c.next(n)
		if x.cookie != r.cookie {
			c.t.Fatalf("cookie %#x, want %#x", x.cookie, r.cookie)
		}
		all = append(all, x)
	}
	return all
}

// errno sends one request and gives the error number of the reply.
func (c *client) errno(r request, payload []byte) uint32 {
	c.t.Helper()
	all := c.do(r, payload)
	for _, x := range all {
		if x.errno != 0 {
			return x.errno
		}
	}
	return 0
}

// read reads, and fails the test if it cannot.
func (c *client) read(off uint64, n int) []byte {
	c.t.Helper()
	b := make([]byte, n)
	for _, x := range c.do(request{command: cmdRead, offset: off, length: uint32(n)}, nil) {
		if x.errno != 0 {
			c.t.Fatalf("read of %d at %d: error %d", n, off, x.errno)
		}
		if x.simple {
			return x.data
		}
		copy(b[x.offset-off:], x.data)
	}
	return b
}

func (c *client) write(off uint64, b []byte, flags uint16) {
	c.t.Helper()
	if e := c.errno(request{command: cmdWrite, flags: flags, offset: off, length: uint32(len(b))}, b); e != 0 {
		c.t.Fatalf("write of %d at %d: error %d", len(b), off, e)
	}
}
