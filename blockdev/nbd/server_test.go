package nbd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"farblk/blockdev"
)

func TestNegotiation(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 10 << 20, BlockSize: 4096})
	small := memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	_, path := serve(t, Config{}, Export{Name: "n1", Description: "first", Device: d}, Export{Name: "n2", Device: small, ReadOnly: true})
	c := dial(t, path)
	c.greet(flagFixedNewstyle | flagNoZeroes)
	one := func(what string, r []optionReply, kind uint32) {
		t.Helper()
		if len(r) != 1 || r[0].kind != kind {
			t.Errorf("%s: %+v, want one answer of type %#x", what, r, kind)
		}
	}
	one("STARTTLS", c.option(optStartTLS, nil), repErrUnsup)
	one("unknown option with data", c.option(4711, make([]byte, 1000)), repErrUnsup)
	one("option too big", c.option(optInfo, make([]byte, optionLimit+1)), repErrTooBig)
	one("INFO with no data", c.option(optInfo, nil), repErrInvalid)
	one("INFO of a stranger", c.option(optInfo, appendInfoRequest(nil, infoRequest{name: "n3"})), repErrUnknown)
	one("contexts before structured replies", c.option(optSetMetaContext, appendMetaRequest(nil, metaRequest{name: "n1"})), repErrInvalid)
	one("LIST with data", c.option(optList, []byte{0}), repErrInvalid)
	one("structured replies with data", c.option(optStructuredReply, []byte{0}), repErrInvalid)
	one("structured replies", c.option(optStructuredReply, nil), repAck)
	one("contexts, a stranger", c.option(optSetMetaContext, appendMetaRequest(nil, metaRequest{"n1", []string{"x:y"}})), repAck)
	if r := c.option(optSetMetaContext, appendMetaRequest(nil, metaRequest{"n1", []string{"x:y", contextBase}})); len(r) != 2 ||
		string(r[0].data[4:]) != contextBase || binary.BigEndian.Uint32(r[0].data) != contextBaseID {
		t.Errorf("contexts: %+v", r)
	}
	for _, q := range [][]string{nil, {"base:"}, {contextBase}} {
		if r := c.option(optListMetaContext, appendMetaRequest(nil, metaRequest{"n1", q})); len(r) != 2 {
			t.Errorf("contexts for %v: %+v", q, r)
		}
	}
	if r := c.option(optList, nil); len(r) != 3 || string(r[0].data) != "\x00\x00\x00\x02n1first" || string(r[1].data) != "\x00\x00\x00\x02n2" {
		t.Errorf("LIST: %+v", r)
	}
	r := c.option(optInfo, appendInfoRequest(nil, infoRequest{"", []uint16{infoBlockSize, infoName, infoDescription, 99}}))
	if len(r) != 5 || string(r[1].data[2:]) != "n1" || string(r[2].data[2:]) != "first" {
		t.Fatalf("INFO: %+v", r)
	}
	if size, flags := binary.BigEndian.Uint64(r[0].data[2:]), binary.BigEndian.Uint16(r[0].data[10:]); size != 10<<20 ||
		flags != transHasFlags|transFlush|transFUA|transTrim|transWriteZeroes|transDF|transCanMultiConn|transCache|transFastZero {
		t.Errorf("size %d, flags %#x", size, flags)
	}
	for i, want := range []uint32{4096, 4096, 8 << 20} {
		if got := binary.BigEndian.Uint32(r[3].data[2+4*i:]); got != want {
			t.Errorf("block size information %d: %d, want %d", i, got, want)
		}
	}
	r = c.option(optGo, appendInfoRequest(nil, infoRequest{name: "n2"}))
	if flags := binary.BigEndian.Uint16(r[0].data[10:]); flags != transHasFlags|transReadOnly|transDF|transCanMultiConn|transCache {
		t.Errorf("read-only flags %#x", flags)
	}
	if e := c.errno(request{command: cmdWrite, length: 512}, make([]byte, 512)); e != errnoPerm {
		t.Errorf("write to a read-only export: %d", e)
	}
	c.read(0, 512)
}

func TestExportName(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	for flags, tail := range map[uint32]int{flagFixedNewstyle | flagNoZeroes: 0, flagFixedNewstyle: 124, 0: 124} {
		c := dial(t, path)
		c.greet(flags)
		c.send(appendOption(nil, optExportName, []byte("n1")))
		b := c.receive(10 + tail)
		if binary.BigEndian.Uint64(b) != 1<<20 || !bytes.Equal(b[10:], make([]byte, tail)) {
			t.Errorf("flags %d: % x", flags, b)
		}
		c.read(0, 512)
		c.send(appendRequest(nil, request{command: cmdDisc}))
		c.closed()
	}
	c := dial(t, path)
	c.greet(flagFixedNewstyle)
	c.send(appendOption(nil, optExportName, []byte("stranger")))
	c.closed()
	c = dial(t, path)
	c.greet(flagFixedNewstyle)
	if r := c.option(optAbort, nil); r[0].kind != repAck {
		t.Errorf("ABORT: %+v", r)
	}
	c.closed()
	c = dial(t, path)
	c.greet(1 << 7)
	c.closed()
	c = dial(t, path)
	c.greet(flagFixedNewstyle)
	c.send(make([]byte, optionHeaderSize))
	c.closed()
}

// TestErrors checks the number of each error, and that the connection goes on after it.
func TestErrors(t *testing.T) {
	const size = 4 << 20
	d := memory(t, blockdev.MemoryConfig{Size: size, BlockSize: 4096, PoolSize: 4 << 20})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	for _, structured := range []bool{false, true} {
		c := dial(t, path)
		c.open("", structured)
		for _, x := range []struct {
			name string
			r    request
			want uint32
		}{
			{"read past the end", request{command: cmdRead, offset: size - 4096, length: 8192}, errnoInval},
			{"read far past the end", request{command: cmdRead, offset: 1<<64 - 4096, length: 4096}, errnoInval},
			{"read, unaligned offset", request{command: cmdRead, offset: 512, length: 4096}, errnoInval},
			{"read, unaligned length", request{command: cmdRead, length: 100}, errnoInval},
			{"read of nothing", request{command: cmdRead}, errnoInval},
			{"read, too long", request{command: cmdRead, length: 3 << 20}, errnoInval},
			{"write past the end", request{command: cmdWrite, offset: size, length: 4096}, errnoNoSpace},
			{"write far past the end", request{command: cmdWrite, offset: 1 << 63, length: 4096}, errnoNoSpace},
			{"write, unaligned", request{command: cmdWrite, offset: 1, length: 4097}, errnoInval},
			{"write of nothing", request{command: cmdWrite}, errnoInval},
			{"write, too long", request{command: cmdWrite, length: 3 << 20}, errnoInval},
			{"write, unknown flag", request{command: cmdWrite, flags: 1 << 15, length: 4096}, errnoInval},
			{"write, flag of another command", request{command: cmdWrite, flags: cmdFlagDF, length: 4096}, errnoInval},
			{"trim past the end", request{command: cmdTrim, offset: size - 4096, length: 8192}, errnoInval},
			{"trim, unaligned", request{command: cmdTrim, length: 512}, errnoInval},
			{"zeroes past the end", request{command: cmdWriteZeroes, offset: size - 4096, length: 8192}, errnoNoSpace},
			{"cache past the end", request{command: cmdCache, offset: size, length: 4096}, errnoInval},
			{"unknown command", request{command: 99, length: 4096}, errnoInval},
			{"flush with an unknown flag", request{command: cmdFlush, flags: 1 << 9}, errnoInval},
			{"trim", request{command: cmdTrim, length: size}, 0},
			{"trim with FUA", request{command: cmdTrim, flags: cmdFlagFUA, length: size}, 0},
			{"zeroes, all flags", request{command: cmdWriteZeroes, flags: cmdFlagFUA | cmdFlagNoHole | cmdFlagFastZero, length: size}, 0},
			{"cache", request{command: cmdCache, length: 1 << 20}, 0},
			{"flush", request{command: cmdFlush}, 0},
			{"flush with FUA", request{command: cmdFlush, flags: cmdFlagFUA}, 0},
			{"read with FUA and DF", request{command: cmdRead, flags: cmdFlagFUA | cmdFlagDF, length: 2 << 20}, 0},
			{"read, the longest", request{command: cmdRead, length: 2 << 20}, 0},
		} {
			var payload []byte
			if x.r.command == cmdWrite {
				payload = make([]byte, x.r.length)
			}
			if got := c.errno(x.r, payload); got != x.want {
				t.Errorf("structured %v: %s: error %d, want %d", structured, x.name, got, x.want)
			}
		}
		status := c.do(request{command: cmdBlockStatus, flags: cmdFlagReqOne, length: 8192}, nil)
		if want := errnoInval; !structured && status[0].errno != uint32(want) {
			t.Errorf("block status without its context: %+v", status)
		}
		if want := "\x00\x00\x00\x01\x00\x00\x20\x00\x00\x00\x00\x00"; structured && (status[0].kind != chunkBlockStatus || string(status[0].data) != want) {
			t.Errorf("block status: %+v", status)
		}
	}
	if n := d.Count(blockdev.Flush); n != 6 { // one for each of two flushes and a trim with FUA
		t.Errorf("%d flushes reached the device", n)
	}
	if d.FUACount() != 2 {
		t.Errorf("%d requests with FUA reached the device", d.FUACount())
	}
}

// TestCaseE11MediaError lets the device fail, and checks that only the request at hand is answered so.
func TestCaseE11MediaError(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 16 << 20})
	bad := blockdev.NewFaulty(d, func(r *blockdev.Request) blockdev.Fault {
		if r.Off <= 5<<20 && r.Off+r.Bytes() > 5<<20 && r.Op != blockdev.Flush {
			return blockdev.Fault{Err: blockdev.ErrMedia}
		}
		return blockdev.Fault{}
	})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: bad})
	for _, structured := range []bool{false, true} {
		c := dial(t, path)
		c.open("n1", structured)
		for _, n := range []int{512, 4 << 20} {
			off := uint64(5<<20 - n + 512)
			if e := c.errno(request{command: cmdRead, offset: off, length: uint32(n)}, nil); e != errnoIO {
				t.Errorf("read of %d: %d", n, e)
			}
			if e := c.errno(request{command: cmdWrite, offset: off, length: uint32(n)}, make([]byte, n)); e != errnoIO {
				t.Errorf("write of %d: %d", n, e)
			}
			c.read(8<<20, n)
		}
		if structured { // the good parts arrive all the same
			all := c.do(request{command: cmdRead, offset: 3 << 20, length: 4 << 20}, nil)
			var good int
			for _, x := range all {
				good += len(x.data) * int(1-min(x.errno, 1))
			}
			if len(all) != 4 || good != 3<<20 {
				t.Errorf("%d chunks, %d good bytes", len(all), good)
			}
		}
	}
}

// TestCaseE10Flush: FLUSH and FUA are offered, and reach the device.
func TestCaseE10Flush(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c := dial(t, path)
	if _, flags := c.open("n1", false); flags&transFlush == 0 || flags&transFUA == 0 {
		t.Errorf("flags %#x", flags)
	}
	c.write(0, make([]byte, 512), 0)
	if d.Count(blockdev.Flush) != 0 || d.FUACount() != 0 {
		t.Error("a plain write was made durable")
	}
	c.write(0, make([]byte, 512), cmdFlagFUA)
	if e := c.errno(request{command: cmdFlush}, nil); e != 0 || d.Count(blockdev.Flush) != 1 || d.FUACount() != 1 {
		t.Errorf("error %d, %d flushes, %d writes with FUA", e, d.Count(blockdev.Flush), d.FUACount())
	}
}

// TestModel has several connections do random requests on areas of their own, in random pieces.
func TestModel(t *testing.T) {
	for name, c := range map[string]blockdev.MemoryConfig{
		"inline":     {Size: 32 << 20, Queues: 2, Latency: -1, PoolSize: 8 << 20},
		"own":        {Size: 32 << 20, Queues: 3, PoolSize: 4 << 20},
		"latency":    {Size: 32 << 20, Queues: 2, Latency: 50 * time.Microsecond, PoolSize: 64 << 20},
		"tight pool": {Size: 32 << 20, Queues: 2, Latency: 20 * time.Microsecond, PoolSize: 2 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			d := memory(t, c)
			s, path := serve(t, Config{}, Export{Name: "n1", Device: d})
			limit := s.lookup("n1").maxPayload
			var all sync.WaitGroup
			for w := range 4 {
				cl := dial(t, path)
				cl.open("n1", w%2 == 0)
				all.Go(func() { modelClient(cl, uint64(w)*8<<20, 8<<20, limit, uint64(w)) })
			}
			all.Wait()
		})
	}
}

func modelClient(c *client, base uint64, area, limit int, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, rand.Uint64()))
	model := make([]byte, area)
	for range 120 {
		n := 512 * (1 + rnd.IntN(64))
		if rnd.IntN(8) == 0 {
			n = 512 * (1 + rnd.IntN(min(limit, area)/512))
		}
		off := 512 * rnd.IntN((area-n)/512+1)
		part := model[off : off+n]
		switch rnd.IntN(5) {
		case 0, 1:
			fillRandom(part[:512])
			for done := 512; done < n; done *= 2 {
				copy(part[done:], part[:done])
			}
			c.write(base+uint64(off), part, uint16(rnd.IntN(2)))
		case 2:
			clear(part)
			if e := c.errno(request{command: uint16(cmdTrim + 2*rnd.IntN(2)), offset: base + uint64(off), length: uint32(n)}, nil); e != 0 {
				c.t.Errorf("error %d", e)
			}
		default:
			if !bytes.Equal(c.read(base+uint64(off), n), part) {
				c.t.Errorf("%d bytes at %d differ", n, off)
				return
			}
		}
	}
}

// TestPieces sends requests cut at random, many in one piece or one in many, and counts the replies.
func TestPieces(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20, Queues: 2})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c := dial(t, path)
	c.open("n1", false)
	const count = 600 // more than may be under way at once
	var stream []byte
	for i := range count {
		b := bytes.Repeat([]byte{byte(i)}, 512*(1+i%9))
		stream = append(appendRequest(stream, request{command: cmdWrite, cookie: uint64(i), offset: uint64(i) * 8192, length: uint32(len(b))}), b...)
	}
	go func() {
		for len(stream) > 0 {
			n := min(len(stream), 1+rand.IntN(20000))
			if _, err := c.sock.Write(stream[:n]); err != nil {
				return
			}
			stream = stream[n:]
		}
	}()
	seen := make(map[uint64]bool)
	for range count {
		r := c.next(0)
		if r.errno != 0 || seen[r.cookie] || r.cookie >= count {
			t.Fatalf("reply %+v, seen %v", r, seen[r.cookie])
		}
		seen[r.cookie] = true
	}
	for i := range count {
		if b := c.read(uint64(i)*8192, 512); b[0] != byte(i) || b[511] != byte(i) {
			t.Fatalf("write %d is not there", i)
		}
	}
}

// TestPoolClosed has a device give up its buffers while a client is at work: the client gets errors, and keeps its
// connection.
func TestPoolClosed(t *testing.T) {
	const n = 3 << 19 // more than one buffer
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c := dial(t, path)
	c.open("n1", false)
	c.write(0, make([]byte, n), 0)
	if err := d.Pool().Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if e := c.errno(request{command: cmdRead, length: n}, nil); e != errnoIO {
			t.Errorf("Read: error %d", e)
		}
		if e := c.errno(request{command: cmdWrite, length: n}, make([]byte, n)); e != errnoIO {
			t.Errorf("Write: error %d", e)
		}
		if e := c.errno(request{command: cmdFlush}, nil); e != 0 {
			t.Errorf("Flush: error %d", e)
		}
	}
}

// TestLeave has clients leave in the midst of everything: nothing may be lost or held.
func TestLeave(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, Queues: 2, Latency: 100 * time.Microsecond, PoolSize: 8 << 20})
	s, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	for i := range 40 {
		c := dial(t, path)
		c.open("n1", i%2 == 0)
		for k := range uint64(8) {
			c.send(appendRequest(nil, request{command: cmdRead, offset: k << 20, length: 1 << 20}))
		}
		half := append(appendRequest(nil, request{command: cmdWrite, length: 2 << 20}), make([]byte, 1000*i)...)
		go func() { _, _ = c.sock.Write(half); c.sock.Close() }()
	}
	s.mu.Lock()
	for l := range s.listeners {
		l.Close()
	}
	s.mu.Unlock()
	s.running.Wait() // for all connections to end by themselves
	if n := d.Pool().Leased(); n > 0 {
		t.Errorf("%d bytes are leased by nobody", n)
	}
}

// TestHalfClose closes the sending half: what was asked is still answered.
func TestHalfClose(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 1 << 20, Latency: 5 * time.Millisecond})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c := dial(t, path)
	c.open("n1", false)
	c.send(appendRequest(nil, request{command: cmdRead, length: 4096}))
	if err := c.sock.(*net.UnixConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if r := c.next(4096); r.errno != 0 {
		t.Errorf("%+v", r)
	}
	c.closed()
}

func TestLimits(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	_, path := serve(t, Config{HandshakeTimeout: 50 * time.Millisecond}, Export{Name: "n1", Device: d})
	dial(t, path).closedAfter(18)
	_, path = serve(t, Config{MaxConnections: 2}, Export{Name: "n1", Device: d})
	a, b := dial(t, path), dial(t, path)
	a.open("", false)
	b.open("", false)
	dial(t, path).closedAfter(0)
	b.send(make([]byte, requestSize)) // no magic
	b.closed()
	a.read(0, 512)
}

// TestSilent has more sockets than there may be connections say nothing: who speaks is served all the same.
func TestSilent(t *testing.T) {
	const limit = 8
	d := memory(t, blockdev.MemoryConfig{Size: 1 << 20})
	_, path := serve(t, Config{MaxConnections: limit, HandshakeTimeout: 2 * testLimit}, Export{Name: "n1", Device: d})
	var good, silent []*client
	for range limit {
		for range limit {
			silent = append(silent, dial(t, path))
		}
		c := dial(t, path)
		c.open("n1", false)
		good = append(good, c)
	}
	for _, c := range good { // no silent one has driven one out that had spoken
		c.read(0, 512)
	}
	for _, c := range silent {
		n, _ := io.Copy(io.Discard, c.sock)
		if n != 0 && n != 18 { // the greeting
			t.Errorf("a silent client was told %d bytes", n)
		}
	}
	dial(t, path).closedAfter(0) // now there is no room
}

func TestRemoveAndClose(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 1 << 20, Latency: time.Millisecond})
	s, path := serve(t, Config{CloseTimeout: testLimit}, Export{Name: "n1", Device: d}, Export{Name: "n2", Device: d})
	if err := s.Add(Export{Name: "n1", Device: d}); err == nil {
		t.Error("a name was given twice")
	}
	if err := s.Add(Export{Name: strings.Repeat("n", 5000), Device: d}); err == nil {
		t.Error("a name of 5000 bytes was taken")
	}
	one, two := dial(t, path), dial(t, path)
	one.open("n1", false)
	two.open("n2", false)
	if err := s.Remove("n1"); err != nil {
		t.Error(err)
	}
	if err := s.Remove("n1"); err == nil {
		t.Error("an export was removed twice")
	}
	one.closed()
	two.read(0, 512)
	three := dial(t, path)
	if _, flags := three.open("", false); flags&transReadOnly != 0 { // n2 is the default now
		t.Error("flags", flags)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	two.closed()
	three.closed()
	if err := s.Add(Export{Name: "n3", Device: d}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Add after Close: %v", err)
	}
	x, y := net.Pipe()
	defer y.Close()
	if err := s.ServeConn(x); !errors.Is(err, net.ErrClosed) {
		t.Errorf("ServeConn after Close: %v", err)
	}
}

// TestResize checks against the size as it is, not as it was.
func TestResize(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 2 << 20})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c := dial(t, path)
	c.open("n1", false)
	if err := d.Resize(1 << 20); err != nil {
		t.Fatal(err)
	}
	if e := c.errno(request{command: cmdWrite, offset: 1 << 20, length: 512}, make([]byte, 512)); e != errnoNoSpace {
		t.Errorf("write past the new end: %d", e)
	}
}
