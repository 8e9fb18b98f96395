package target_test

import (
	"encoding/binary"
	"testing"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
)

// BenchmarkRead is host and target together, 4 KiB random reads at depth 32
// over software iWARP, with a host that does nothing else.
func BenchmarkRead(b *testing.B)  { benchmarkIO(b, "", 4096, 32, false) }
func BenchmarkWrite(b *testing.B) { benchmarkIO(b, "", 4096, 32, true) }

func BenchmarkRead128K(b *testing.B)  { benchmarkIO(b, "", 128<<10, 8, false) }
func BenchmarkWrite128K(b *testing.B) { benchmarkIO(b, "", 128<<10, 8, true) }
func BenchmarkReadQD1(b *testing.B)   { benchmarkIO(b, "", 4096, 1, false) }
func BenchmarkReadFile(b *testing.B)  { benchmarkIO(b, b.TempDir()+"/disk", 4096, 32, false) }

func benchmarkIO(b *testing.B, file string, size, depth int, write bool) {
	const space = 256 << 20
	bd := newBed(b, target.Config{})
	bd.subsystem(target.NamespaceConfig{Size: space, File: file})
	q := connectHost(b, bd.addr, subNQN, 1, depth+1, 0).io[0]
	wrs := make([]verbs.SendWR, 0, depth)
	recvs := make([]verbs.RecvWR, 0, depth)
	rnd := uint64(1)
	next := func(slot int) {
		at := slot * slotSize
		c := (*nvme.Command)(q.mem[at:])
		rnd = rnd*6364136223846793005 + 1442695040888963407
		lba := (rnd >> 33) % uint64(space/size) * uint64(size/512)
		_, sgl := q.data(slot*size, size)
		n := 64
		if write {
			c.FillWrite(1, lba, uint32(size/512), false)
			if size <= 8192 {
				sgl = nvme.InCapsuleSGL(uint32(size))
				n += size
			}
		} else {
			c.FillRead(1, lba, uint32(size/512))
		}
		c.SetSGL(sgl)
		c.SetCID(uint16(slot))
		wr := verbs.SendWR{ID: 1 << 32, Op: verbs.OpSend, Flags: verbs.Signaled, NumSGE: 1}
		wr.SGEs[0] = verbs.SGE{Data: q.mem[at : at+n : at+n], LKey: q.mr.LKey()}
		wrs = append(wrs, wr)
	}
	post := func() {
		if _, err := q.qp.PostRecv(recvs); err != nil {
			b.Fatal(err)
		}
		if _, err := q.qp.PostSend(wrs); err != nil {
			b.Fatal(err)
		}
		recvs, wrs = recvs[:0], wrs[:0]
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	started, ended := 0, 0
	for ; started < min(depth, b.N); started++ {
		next(started)
	}
	post()
	for ended < b.N {
		n, err := q.qp.Poll(q.comps[:])
		if err != nil {
			b.Fatal(err)
		}
		for _, e := range q.comps[:n] {
			if e.Status != verbs.StatusOK {
				b.Fatal(e.Op, e.Status)
			}
			if e.Op != verbs.OpRecv {
				continue
			}
			at := q.depth*slotSize + int(e.ID)*64
			r := q.mem[at : at+64 : at+64]
			if binary.LittleEndian.Uint16(r[14:]) != 0 {
				b.Fatalf("status %#x", r[14:16])
			}
			ended++
			recvs = append(recvs, verbs.RecvWR{ID: e.ID, SGE: verbs.SGE{Data: r, LKey: q.mr.LKey()}})
			if started < b.N {
				next(int(binary.LittleEndian.Uint16(r[12:])))
				started++
			}
		}
		if len(recvs) > 0 {
			post()
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}
