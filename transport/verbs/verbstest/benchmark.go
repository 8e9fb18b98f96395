package verbstest

import (
	"testing"

	"farblk/transport/verbs"
)

// Benchmark measures posting and polling, and reports allocations: the data path must have none. Write is a chain
// of an RDMA WRITE and a small READ; RoundTrip is a SEND of a command's size answered by another, both ends in one
// goroutine.
func Benchmark(b *testing.B, newProvider func(testing.TB) verbs.Provider, o Options) {
	o.Listen.Port = 0
	for _, c := range []struct {
		name string
		n    int
	}{{"Write64", 64}, {"Write4K", 4096}, {"Write128K", 128 << 10}} {
		b.Run(c.name, func(b *testing.B) {
			cl, sv := connect(b, newProvider(b), o, shape{})
			wrs := []verbs.SendWR{
				cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, c.n), cl.rdma(verbs.OpRDMARead, 0, sv, 0, 64),
			}
			b.SetBytes(int64(c.n))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := cl.qp.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				cl.collect(len(wrs))
			}
		})
	}
	b.Run("RoundTrip64", func(b *testing.B) {
		cl, sv := connect(b, newProvider(b), o, shape{})
		ends := []*end{cl, sv}
		sends := [][]verbs.SendWR{{cl.send(0, 64)}, {sv.send(0, 64)}}
		recvs := [][]verbs.RecvWR{{cl.recvWR(64, 64)}, {sv.recvWR(64, 64)}}
		b.ReportAllocs()
		for b.Loop() {
			for i, e := range ends {
				if _, err := e.qp.PostRecv(recvs[i]); err != nil {
					b.Fatal(err)
				}
			}
			for i, e := range ends {
				if _, err := e.qp.PostSend(sends[i]); err != nil {
					b.Fatal(err)
				}
				ends[1-i].collect(1)
				e.collect(1)
			}
		}
	})
}

// collect waits for n successful completions without keeping them.
func (e *end) collect(n int) {
	e.t.Helper()
	for n > 0 {
		k, err := e.qp.Poll(e.buf[:n])
		if err == nil && k == 0 {
			if err = e.qp.Arm(); err == nil {
				if k, err = e.qp.Poll(e.buf[:n]); err == nil && k == 0 {
					err = e.qp.Wait()
				}
			}
		}
		if err != nil {
			e.t.Fatal(err)
		}
		for _, c := range e.buf[:k] {
			if c.Status != verbs.StatusOK {
				e.t.Fatalf("%v: %v", c.Op, c.Status)
			}
		}
		n -= k
	}
}
