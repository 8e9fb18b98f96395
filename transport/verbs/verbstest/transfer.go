package verbstest

import (
	"bytes"
	"testing"
	"time"

	"farblk/transport/verbs"
)

func testSendSizes(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	sizes := []int{0, 1, 2, 3, 4, 63, 64, 65, 1023, 1024, 1025, 1460, 4096, 4097, 16383, 65535, 65536, 262144, 1}
	fill(cl.mem, 1)
	var ids []uint64
	var wrs []verbs.SendWR
	off := 0
	for _, n := range sizes {
		ids = append(ids, sv.recv(off, n))
		wrs = append(wrs, cl.send(off, n))
		off += n
	}
	cl.post(wrs...)
	for i, c := range sv.await(len(sizes), verbs.StatusOK) {
		if c.ID != ids[i] || c.Op != verbs.OpRecv || c.Bytes != sizes[i] || c.Invalidated {
			t.Errorf("message %d: %+v, want ID %d and %d bytes", i, c, ids[i], sizes[i])
		}
	}
	for i, c := range cl.await(len(sizes), verbs.StatusOK) {
		if c.ID != wrs[i].ID || c.Op != verbs.OpSend {
			t.Errorf("send %d completes as %+v", i, c)
		}
	}
	if !bytes.Equal(cl.mem[:off], sv.mem[:off]) {
		t.Error("data differs")
	}
	for i := off; i < len(sv.mem); i++ {
		if sv.mem[i] != 0 {
			t.Fatalf("byte %d after the last message was touched", i)
		}
	}
	// And back, into room larger than the message.
	cl.recv(0, 4096)
	fill(sv.mem[:100], 2)
	sv.post(sv.send(0, 100))
	if c := cl.await(1, verbs.StatusOK)[0]; c.Bytes != 100 || !bytes.Equal(cl.mem[:100], sv.mem[:100]) {
		t.Errorf("reply: %+v", c)
	}
}

func testGather(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	pieces := [][]int{{1}, {7, 1}, {1, 4095, 3}, {64, 0, 4097, 13}, {5, 1500, 9001, 1}, {65536, 17}}
	for i, lens := range pieces {
		if len(lens) > cl.conn.Device().MaxSGE {
			t.Errorf("the device takes %d elements, NVMe/RDMA wants %d", cl.conn.Device().MaxSGE, len(lens))
			continue
		}
		for _, op := range []verbs.Opcode{verbs.OpSend, verbs.OpRDMAWrite} {
			fill(cl.mem, i+1)
			clear(sv.mem)
			w := cl.rdma(op, 0, sv, 0, 0)
			w.NumSGE = len(lens)
			var want []byte
			for k, n := range lens {
				off := (len(lens) - k) * 300_001 // apart, and not in the order of addresses
				w.SGEs[k] = cl.sge(off, n)
				want = append(want, cl.mem[off:off+n]...)
			}
			if op == verbs.OpSend {
				w.RKey, w.RemoteAddr = 0, 0
				sv.recv(0, 1<<20)
				cl.post(w)
			} else {
				sv.recv(1<<20, 1)
				cl.post(w, cl.send(0, 1))
				cl.await(1, verbs.StatusOK)
			}
			cl.await(1, verbs.StatusOK)
			c := sv.await(1, verbs.StatusOK)[0]
			if op == verbs.OpSend && c.Bytes != len(want) {
				t.Errorf("%v of %v: received %d bytes", op, lens, c.Bytes)
			}
			if !bytes.Equal(sv.mem[:len(want)], want) || sv.mem[len(want)] != 0 {
				t.Errorf("%v of %v: data differs", op, lens)
			}
		}
	}
}

// spans are lengths and offsets of RDMA transfers.
var spans = []struct{ off, n int }{
	{0, 1}, {1, 1}, {4095, 2}, {0, 512}, {3, 1025}, {4096, 4096}, {8191, 65537}, {1, 131072}, {0, 1 << 20}, {12345, 1 << 20},
}

func testWrite(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	for i, s := range spans {
		fill(cl.mem, i+1)
		clear(sv.mem)
		sv.recv(len(sv.mem)-1, 1)
		cl.post(cl.rdma(verbs.OpRDMAWrite, 777, sv, s.off, s.n), cl.send(0, 0))
		if c := cl.await(2, verbs.StatusOK)[0]; c.Op != verbs.OpRDMAWrite {
			t.Errorf("completion %+v", c)
		}
		sv.await(1, verbs.StatusOK)
		exactly(t, sv.mem, s.off, cl.mem[777:777+s.n])
	}
}

// exactly checks that mem has data at off and zeros elsewhere.
func exactly(t *testing.T, mem []byte, off int, data []byte) {
	t.Helper()
	if !bytes.Equal(mem[off:off+len(data)], data) {
		t.Errorf("%d bytes at %d: data differs", len(data), off)
	}
	for i, b := range mem {
		if b != 0 && (i < off || i >= off+len(data)) {
			t.Fatalf("%d bytes at %d: byte %d was touched", len(data), off, i)
		}
	}
}

func testRead(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	for i, s := range spans {
		fill(sv.mem, i+1)
		clear(cl.mem)
		w := cl.rdma(verbs.OpRDMARead, s.off, sv, 777, s.n)
		cl.post(w)
		if c := cl.await(1, verbs.StatusOK)[0]; c.ID != w.ID || c.Op != verbs.OpRDMARead {
			t.Errorf("completion %+v", c)
		}
		exactly(t, cl.mem, s.off, sv.mem[777:777+s.n])
	}
}

func testWriteThenSend(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	const n = 256 << 10
	for i := range 20 {
		fill(cl.mem[:n], i)
		sv.recv(n, 16)
		w := cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, n)
		w.Flags = 0
		cl.post(w, cl.send(n, 16))
		sv.await(1, verbs.StatusOK)
		if !bytes.Equal(sv.mem[:n], cl.mem[:n]) {
			t.Fatalf("round %d: the SEND arrived before the data written ahead of it", i)
		}
		cl.await(1, verbs.StatusOK)
	}
}

func testReadThenFencedSend(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	const n = 256 << 10
	want := make([]byte, n)
	for i := range 20 {
		fill(sv.mem[:n], i)
		copy(want, sv.mem)
		sv.recv(n, 16)
		s := cl.send(n, 16)
		s.Flags |= verbs.Fence
		cl.post(cl.rdma(verbs.OpRDMARead, 0, sv, 0, n), s)
		sv.await(1, verbs.StatusOK)
		clear(sv.mem[:n]) // the SEND says that the read is over
		cl.await(2, verbs.StatusOK)
		if !bytes.Equal(cl.mem[:n], want) {
			t.Fatalf("round %d: a fenced SEND overtook the read ahead of it", i)
		}
	}
}

func testReadsAtOnce(t *testing.T, p verbs.Provider, o Options) {
	const ird, n = 8, 32 << 10
	cl, sv := connect(t, p, o, shape{reads: ird})
	fill(sv.mem, 5)
	for _, count := range []int{ird, 4 * ird} { // beyond IRD the initiator must hold back by itself
		clear(cl.mem)
		var wrs []verbs.SendWR
		for i := range count {
			wrs = append(wrs, cl.rdma(verbs.OpRDMARead, i*n, sv, i*n, n))
		}
		cl.post(wrs...)
		for i, c := range cl.await(count, verbs.StatusOK) {
			if c.ID != wrs[i].ID {
				t.Errorf("read %d of %d completes as %+v", i, count, c)
			}
		}
		if !bytes.Equal(cl.mem[:count*n], sv.mem[:count*n]) {
			t.Errorf("%d reads at once: data differs", count)
		}
	}
}

// testLateReceive sends to a queue that has no receive for it yet: the sender tries again soon after there is one
// (RNR NAK, IBA 9.7.5.2.8). iWARP knows no such thing, and ends the connection.
func testLateReceive(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	if cl.conn.Device().Link == verbs.LinkIWARP {
		return
	}
	for i := range 3 {
		fill(cl.mem[:64], i)
		cl.post(cl.send(0, 64))
		time.Sleep(5 * time.Millisecond) // it is refused meanwhile; nothing tells when
		begin := time.Now()
		sv.recv(0, 64)
		sv.await(1, verbs.StatusOK)
		cl.await(1, verbs.StatusOK)
		if d := time.Since(begin); d > 300*time.Millisecond || !bytes.Equal(sv.mem[:64], cl.mem[:64]) {
			t.Errorf("a message that had to wait for its receive came %v after it", d)
		}
	}
}

func testUnsignaled(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{qp: verbs.QPConfig{SendDepth: 16, RecvDepth: 16}})
	for range 20 {
		var wrs []verbs.SendWR
		for i := range 8 {
			sv.recv(64*i, 64)
			w := cl.send(0, 8)
			if i < 7 {
				w.Flags = 0
			}
			wrs = append(wrs, w)
		}
		cl.post(wrs...)
		sv.await(8, verbs.StatusOK)
		if c := cl.await(1, verbs.StatusOK)[0]; c.ID != wrs[7].ID {
			t.Fatalf("completion %+v, want only the signaled one", c)
		}
	}
	if n, err := cl.poll(); n != 0 || err != nil {
		t.Errorf("%d more completions, %v", n, err)
	}
}

// testCompletionsInOrder mixes operations that are answered with such that are not.
func testCompletionsInOrder(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	for range 20 {
		var wrs []verbs.SendWR
		for i := range 30 {
			op := verbs.OpRDMAWrite
			if i%3 == 0 {
				op = verbs.OpRDMARead
			}
			w := cl.rdma(op, i<<12, sv, i<<12, 4096)
			if i%5 == 4 {
				w.Flags = 0
			}
			wrs = append(wrs, w)
		}
		wrs[len(wrs)-1].Flags = verbs.Signaled
		cl.post(wrs...)
		for _, w := range wrs {
			if w.Flags&verbs.Signaled == 0 {
				continue
			}
			if c := cl.await(1, verbs.StatusOK)[0]; c.ID != w.ID || c.Op != w.Op {
				t.Fatalf("%+v, want %v %d", c, w.Op, w.ID)
			}
		}
	}
}

func testWindows(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{})
	w, err := sv.pd.NewWindow()
	if !sv.conn.Device().MemoryWindows {
		if err == nil {
			t.Error("the device says that it has no memory windows, but gives one")
		}
		return
	}
	if err != nil {
		t.Fatalf("NewWindow: %v", err)
	}
	defer func() { mustClose(t, "window", w.Close) }()
	const off, n = 4096, 8192
	fill(cl.mem[:n], 3)
	closed, err := sv.pd.Register(sv.mem, verbs.LocalWrite) // open to nobody but through a window
	if err != nil {
		t.Fatal(err)
	}
	defer func() { mustClose(t, "region", closed.Close) }()
	var old uint32
	for round := range 3 {
		clear(sv.mem)
		mr := sv.mr
		if round == 2 {
			mr = closed
		}
		key, addr, err := w.Bind(mr, sv.mem[off:off+n], verbs.RemoteWrite|verbs.RemoteRead|verbs.LocalWrite)
		if err != nil {
			t.Fatalf("round %d: bind: %v", round, err)
		}
		if key == old || key == mr.RKey() {
			t.Errorf("round %d: key %#x is not fresh", round, key)
		}
		old = key
		sv.recv(0, 16)
		write := cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, n)
		write.RKey, write.RemoteAddr = key, addr
		inv := cl.send(0, 0)
		inv.Op, inv.RKey = verbs.OpSendInvalidate, key
		cl.post(write, inv)
		cl.await(2, verbs.StatusOK)
		if c := sv.await(1, verbs.StatusOK)[0]; !c.Invalidated || c.InvalidatedKey != key {
			t.Errorf("round %d: %+v does not tell of key %#x", round, c, key)
		}
		exactly(t, sv.mem, off, cl.mem[:n])
		if err := w.Invalidate(); err != nil {
			t.Errorf("round %d: invalidate after the peer did: %v", round, err)
		}
	}
	clear(sv.mem)
	stale := cl.rdma(verbs.OpRDMAWrite, 0, sv, off, 16)
	stale.RKey = old
	violation(t, o, cl, sv, stale)
}
