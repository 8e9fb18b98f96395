package iwarp_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

func TestMain(m *testing.M) {
	for name, run := range map[string]func(string) error{"FARBLK_BENCH_TARGET": serve, dieEnv: die} {
		if what := os.Getenv(name); what != "" {
			if err := run(what); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	goleak.VerifyTestMain(m)
}

// patience bounds the waits of the tests, none of which waits for it to pass.
const patience = 30 * time.Second

// end is one side of a connection under test.
type end struct {
	t    testing.TB
	conn verbs.Conn
	pd   verbs.PD
	qp   verbs.QP
	mr   verbs.MR
	mem  []byte
}

const (
	endMemory = 5 << 20
	endDepth  = 128
)

func makeEnd(c verbs.Conn) (*end, error) {
	e := &end{conn: c}
	var err error
	if e.pd, err = c.NewPD(); err != nil {
		return nil, err
	}
	if e.qp, err = c.NewQP(e.pd, verbs.QPConfig{SendDepth: endDepth, RecvDepth: endDepth}); err != nil {
		return nil, err
	}
	if e.mem, err = unix.Mmap(-1, 0, endMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return nil, err
	}
	e.mr, err = e.pd.Register(e.mem, verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite|verbs.ReadSink)
	return e, err
}

func newEnd(t testing.TB, c verbs.Conn) *end {
	e, err := makeEnd(c)
	if err != nil {
		t.Fatal(err)
	}
	e.t = t
	t.Cleanup(func() {
		e.conn.Close()
		e.mr.Close()
		if err := e.pd.Close(); err != nil {
			t.Error(err)
		}
		unix.Munmap(e.mem)
	})
	return e
}

func (e *end) sge(off, n int) verbs.SGE {
	return verbs.SGE{Data: e.mem[off : off+n : off+n], LKey: e.mr.LKey()}
}

func (e *end) send(id uint64, op verbs.Opcode, flags verbs.SendFlags, off, n int) *verbs.SendWR {
	w := &verbs.SendWR{ID: id, Op: op, Flags: flags | verbs.Signaled, NumSGE: 1}
	w.SGEs[0] = e.sge(off, n)
	return w
}

func (e *end) post(ws ...*verbs.SendWR) {
	e.t.Helper()
	var chain []verbs.SendWR
	for _, w := range ws {
		chain = append(chain, *w)
	}
	if n, err := e.qp.PostSend(chain); err != nil || n != len(chain) {
		e.t.Fatalf("PostSend: %d of %d, %v", n, len(chain), err)
	}
}

func (e *end) recv(id uint64, off, n int) {
	e.t.Helper()
	if _, err := e.qp.PostRecv([]verbs.RecvWR{{ID: id, SGE: e.sge(off, n)}}); err != nil {
		e.t.Fatal(err)
	}
}

// next takes one completion, waiting as a program would.
func (e *end) next() verbs.Completion {
	e.t.Helper()
	var c [1]verbs.Completion
	for {
		if err := e.qp.Arm(); err != nil {
			e.t.Fatal(err)
		}
		n, err := e.qp.Poll(c[:])
		if err != nil {
			e.t.Fatal(err)
		}
		if n == 1 {
			return c[0]
		}
		if err := e.qp.Wait(); err != nil {
			e.t.Fatal(err)
		}
	}
}

func (e *end) expect(id uint64, s verbs.Status) verbs.Completion {
	e.t.Helper()
	c := e.next()
	if c.ID != id || c.Status != s {
		e.t.Fatalf("completion %d %v %v, want %d %v", c.ID, c.Op, c.Status, id, s)
	}
	return c
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func listen(t testing.TB, p verbs.Provider, ip string) verbs.Listener {
	l, err := p.Listen(testContext(t), verbs.Addr{IP: addr(ip)}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

var loopback = addr("127.0.0.1")

var params = verbs.ConnParams{ResponderResources: 16, InitiatorDepth: 16}

// pair connects two ends of two providers.
func pair(t testing.TB, active, passive iwarp.Options) (*end, *end) {
	return pairOf(t, active, passive, params)
}

func pairOf(t testing.TB, active, passive iwarp.Options, p verbs.ConnParams) (*end, *end) {
	ctx := testContext(t)
	l := listen(t, iwarp.New(passive), "127.0.0.1")
	c, err := iwarp.New(active).Resolve(ctx, verbs.Route{Remote: l.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	a := newEnd(t, c)
	done := make(chan error, 1)
	hello := p
	hello.PrivateData = []byte("hello")
	go func() {
		private, err := c.Connect(ctx, hello)
		if err == nil && string(private) != "welcome" {
			t.Errorf("accept's private data %q", private)
		}
		done <- err
	}()
	s, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if string(s.PrivateData()) != "hello" {
		t.Errorf("request's private data %q", s.PrivateData())
	}
	b := newEnd(t, s)
	p.PrivateData = []byte("welcome")
	if err := s.Accept(ctx, p); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return a, b
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i*7) + byte(i>>8) + seed
	}
}

// TestLoopback moves data by every operation, under every kind of agreement.
func TestLoopback(t *testing.T) {
	for name, o := range map[string][2]iwarp.Options{
		"default":      {},
		"no CRC":       {{DisableCRC: true}, {DisableCRC: true}},
		"one-side CRC": {{DisableCRC: true}, {}},
		"revision 1":   {{MPARevision: 1}, {}},
		"peer to peer": {{PeerToPeer: true}, {}},
		"small FPDUs":  {{MaxSegment: 1460}, {MaxSegment: 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, o[0], o[1])
			for _, n := range []int{0, 1, 3, 64, 1023, 4096, 65536, 1<<20 + 5} {
				fill(a.mem[:n], byte(n))
				clear(b.mem)
				b.recv(1, 0, n)
				a.post(a.send(2, verbs.OpSend, 0, 0, n))
				a.expect(2, verbs.StatusOK)
				if c := b.expect(1, verbs.StatusOK); c.Bytes != n || c.Op != verbs.OpRecv {
					t.Fatalf("received %d bytes of %d", c.Bytes, n)
				}
				check(t, "send", a.mem[:n], b.mem[:n])

				w := a.send(3, verbs.OpRDMAWrite, 0, 0, n)
				w.RKey, w.RemoteAddr = b.mr.RKey(), b.mr.RemoteAddr(b.mem[2<<20:])
				b.recv(4, 0, 0)
				a.post(w, a.send(5, verbs.OpSend, verbs.Solicited, 0, 0))
				a.expect(3, verbs.StatusOK)
				a.expect(5, verbs.StatusOK)
				b.expect(4, verbs.StatusOK)
				check(t, "write", a.mem[:n], b.mem[2<<20:][:n])

				r := a.send(6, verbs.OpRDMARead, 0, 2<<20, n)
				r.RKey, r.RemoteAddr = b.mr.RKey(), b.mr.RemoteAddr(b.mem[2<<20:])
				a.post(r)
				if c := a.expect(6, verbs.StatusOK); c.Bytes != n {
					t.Fatalf("read %d bytes of %d", c.Bytes, n)
				}
				check(t, "read", a.mem[:n], a.mem[2<<20:][:n])
			}
		})
	}
}

func check(t *testing.T, what string, want, got []byte) {
	t.Helper()
	if !bytes.Equal(want, got) {
		t.Fatalf("%s of %d bytes: data differ", what, len(want))
	}
}
