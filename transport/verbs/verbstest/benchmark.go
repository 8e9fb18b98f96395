package verbstest

import (
	"testing"

	"farblk/transport/verbs"
)

// Benchmark measures posting a chain of two work requests and polling their completions, and reports
// allocations: the data path must have none.
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
			var cs [16]verbs.Completion
			b.SetBytes(int64(c.n))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := cl.qp.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				for left := len(wrs); left > 0; {
					n, err := cl.qp.Poll(cs[:])
					if err == nil && n == 0 {
						if err = cl.qp.Arm(); err == nil {
							if n, err = cl.qp.Poll(cs[:]); err == nil && n == 0 {
								err = cl.qp.Wait()
							}
						}
					}
					if err != nil {
						b.Fatal(err)
					}
					for _, c := range cs[:n] {
						if c.Status != verbs.StatusOK {
							b.Fatalf("%v: %v", c.Op, c.Status)
						}
					}
					left -= n
				}
			}
		})
	}
}
