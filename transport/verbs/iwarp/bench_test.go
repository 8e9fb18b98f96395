package iwarp_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

// owner takes completions as a queue's owner does: it polls for a while, then arms and sleeps.
type owner struct {
	qp    verbs.QP
	spins int
	cs    [64]verbs.Completion
}

func (o *owner) take() ([]verbs.Completion, error) {
	for i := 0; ; i++ {
		n, err := o.qp.Poll(o.cs[:])
		if n > 0 || err != nil {
			return o.cs[:n], err
		}
		if i < o.spins {
			runtime.Gosched()
			continue
		}
		if err := o.qp.Arm(); err != nil {
			return nil, err
		}
		if n, err := o.qp.Poll(o.cs[:]); n > 0 || err != nil {
			return o.cs[:n], err
		}
		if err := o.qp.Wait(); err != nil {
			return nil, err
		}
	}
}

// serveReads is a target: for each 64-byte command it writes size bytes to where the command says and sends a response.
func serveReads(e *end, size, spins int) error {
	o := owner{qp: e.qp, spins: spins}
	var sends []verbs.SendWR
	var recvs []verbs.RecvWR
	for {
		cs, err := o.take()
		if err != nil {
			return err
		}
		sends, recvs = sends[:0], recvs[:0]
		for i := range cs {
			c := &cs[i]
			if c.Status != verbs.StatusOK {
				return nil
			}
			if c.Op != verbs.OpRecv {
				continue
			}
			cmd := e.mem[int(c.ID)*64:][:64]
			if size > 0 {
				w := verbs.SendWR{Op: verbs.OpRDMAWrite, NumSGE: 1, RemoteAddr: binary.LittleEndian.Uint64(cmd), RKey: binary.LittleEndian.Uint32(cmd[8:])}
				w.SGEs[0] = e.sge(1<<20, size)
				sends = append(sends, w)
			}
			r := verbs.SendWR{Op: verbs.OpSend, NumSGE: 1}
			at := 1<<16 + int(c.ID)*16
			copy(e.mem[at:at+16], cmd[12:])
			r.SGEs[0] = e.sge(at, 16)
			sends = append(sends, r)
			recvs = append(recvs, verbs.RecvWR{ID: c.ID, SGE: e.sge(int(c.ID)*64, 64)})
		}
		if len(recvs) > 0 {
			if _, err := e.qp.PostRecv(recvs); err != nil {
				return err
			}
			if _, err := e.qp.PostSend(sends); err != nil {
				return err
			}
		}
	}
}

// serve is the target in a process of its own: TestMain calls it with what remoteTarget asked for.
func serve(what string) error {
	var size, spins int
	var crc bool
	if _, err := fmt.Sscan(what, &size, &spins, &crc); err != nil {
		return err
	}
	ctx := context.Background()
	l, err := iwarp.New(iwarp.Options{DisableCRC: !crc}).Listen(ctx, verbs.Addr{IP: loopback}, 0)
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	c, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	e, err := makeEnd(c)
	if err != nil {
		return err
	}
	for i := range uint64(endDepth) {
		if _, err := e.qp.PostRecv([]verbs.RecvWR{{ID: i, SGE: e.sge(int(i)*64, 64)}}); err != nil {
			return err
		}
	}
	if err := c.Accept(ctx, params); err != nil {
		return err
	}
	return serveReads(e, size, spins)
}

// remoteTarget starts a target in a process of its own and connects to it.
func remoteTarget(b *testing.B, size, spins int, crc bool) *end {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("FARBLK_BENCH_TARGET=%d %d %v", size, spins, crc))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	var at string
	if _, err := fmt.Fscan(out, &at); err != nil {
		b.Fatal(err)
	}
	ap := netip.MustParseAddrPort(at)
	c, err := iwarp.New(iwarp.Options{DisableCRC: !crc}).Resolve(b.Context(), verbs.Route{Remote: verbs.Addr{IP: ap.Addr(), Port: ap.Port()}})
	if err != nil {
		b.Fatal(err)
	}
	h := newEnd(b, c)
	if _, err := c.Connect(testContext(b), params); err != nil {
		b.Fatal(err)
	}
	return h
}

// BenchmarkReads is the host's and target's share of NVMe reads, on one machine, in two processes: capsule, RDMA
// WRITE, response.
func BenchmarkReads(b *testing.B) {
	for _, c := range []struct{ size, depth, spins int }{
		{0, 1, 0}, {0, 1, 1000}, {4096, 1, 0}, {4096, 1, 1000}, {4096, 32, 0}, {4096, 32, 1000}, {128 << 10, 8, 0}, {128 << 10, 8, 1000},
	} {
		for _, crc := range []bool{true, false} {
			b.Run(fmt.Sprintf("size=%d/depth=%d/spins=%d/crc=%v", c.size, c.depth, c.spins, crc), func(b *testing.B) {
				h := remoteTarget(b, c.size, c.spins, crc)
				for i := range uint64(c.depth) {
					h.recv(i, int(i)*16, 16)
				}
				var sends []verbs.SendWR
				var recvs []verbs.RecvWR
				post := func(slot int) {
					at := 1<<16 + slot*64
					binary.LittleEndian.PutUint64(h.mem[at:], h.mr.RemoteAddr(h.mem[1<<20+slot*c.size:]))
					binary.LittleEndian.PutUint32(h.mem[at+8:], h.mr.RKey())
					binary.LittleEndian.PutUint32(h.mem[at+12:], uint32(slot))
					w := verbs.SendWR{Op: verbs.OpSend, NumSGE: 1}
					w.SGEs[0] = h.sge(at, 64)
					sends = append(sends, w)
				}
				o := owner{qp: h.qp, spins: c.spins}
				b.SetBytes(int64(c.size))
				b.ReportAllocs()
				b.ResetTimer()
				posted, finished := 0, 0
				for ; posted < min(c.depth, b.N); posted++ {
					post(posted)
				}
				for {
					if len(recvs) > 0 {
						if _, err := h.qp.PostRecv(recvs); err != nil {
							b.Fatal(err)
						}
					}
					if len(sends) > 0 {
						if _, err := h.qp.PostSend(sends); err != nil {
							b.Fatal(err)
						}
					}
					sends, recvs = sends[:0], recvs[:0]
					if finished == b.N {
						break
					}
					cs, err := o.take()
					if err != nil {
						b.Fatal(err)
					}
					for i := range cs {
						if cs[i].Status != verbs.StatusOK {
							b.Fatal(cs[i].Status, h.conn.Err())
						}
						finished++
						slot := int(binary.LittleEndian.Uint32(h.mem[cs[i].ID*16:]))
						recvs = append(recvs, verbs.RecvWR{ID: cs[i].ID, SGE: h.sge(int(cs[i].ID)*16, 16)})
						if posted < b.N {
							post(slot)
							posted++
						}
					}
				}
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IO/s")
				h.conn.Disconnect()
			})
		}
	}
}

// BenchmarkTCP is the reference for latency: a ping-pong of as many bytes between goroutines.
func BenchmarkTCP(b *testing.B) {
	for _, size := range []int{16, 4096 + 60} {
		b.Run(fmt.Sprint("size=", size), func(b *testing.B) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			done := make(chan struct{})
			go func() {
				defer close(done)
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				buf := make([]byte, max(size, 64))
				for {
					if _, err := io.ReadFull(c, buf[:64]); err != nil {
						return
					}
					c.Write(buf[:size])
				}
			}()
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			buf := make([]byte, max(size, 64))
			for b.Loop() {
				c.Write(buf[:64])
				if _, err := io.ReadFull(c, buf[:size]); err != nil {
					b.Fatal(err)
				}
			}
			c.Close()
			<-done
		})
	}
}
