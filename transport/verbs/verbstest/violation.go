package verbstest

import (
	"testing"

	"farblk/transport/verbs"
)

// violation posts w, which the passive side must refuse with a remote access error, and checks that the
// connection goes down on both sides and that no byte was written anywhere.
func violation(t *testing.T, o Options, cl, sv *end, w verbs.SendWR) {
	t.Helper()
	before := append([]byte(nil), sv.mem...)
	clear(cl.mem)
	cl.post(w)
	c := cl.take(1)[0]
	ok := c.Status == verbs.StatusRemoteAccess
	if o.Terminates {
		ok = c.Status != verbs.StatusOK || w.Op != verbs.OpRDMARead
	}
	if c.ID != w.ID || !ok {
		t.Errorf("completion %d %q (vendor error %#x), want %q", c.ID, c.Status, c.VendorError, verbs.StatusRemoteAccess)
	}
	_, _ = cl.down(), sv.down()
	for i := range before {
		if sv.mem[i] != before[i] {
			t.Fatalf("byte %d of the passive side was touched", i)
		}
	}
	for i, b := range cl.mem {
		if b != 0 {
			t.Fatalf("byte %d of the active side was touched", i)
		}
	}
}

func testViolations(t *testing.T, p verbs.Provider, o Options) {
	const mem = 1 << 16
	read, write := verbs.OpRDMARead, verbs.OpRDMAWrite
	for _, c := range []struct {
		name   string
		access verbs.Access
		op     verbs.Opcode
		bend   func(w *verbs.SendWR)
	}{
		{"WriteWrongKey", allAccess, write, func(w *verbs.SendWR) { w.RKey ^= 0x5a5a00 }},
		{"ReadWrongKey", allAccess, read, func(w *verbs.SendWR) { w.RKey ^= 0x5a5a00 }},
		{"WritePastTheEnd", allAccess, write, func(w *verbs.SendWR) { w.RemoteAddr += mem - 1 }},
		{"ReadPastTheEnd", allAccess, read, func(w *verbs.SendWR) { w.RemoteAddr += mem - 1 }},
		{"WriteBeforeTheStart", allAccess, write, func(w *verbs.SendWR) { w.RemoteAddr-- }},
		{"ReadBeforeTheStart", allAccess, read, func(w *verbs.SendWR) { w.RemoteAddr-- }},
		{"WriteAddressWraps", allAccess, write, func(w *verbs.SendWR) { w.RemoteAddr = ^uint64(0) - 7 }},
		{"WriteWithoutRight", verbs.LocalWrite | verbs.RemoteRead, write, func(*verbs.SendWR) {}},
		{"ReadWithoutRight", verbs.LocalWrite | verbs.RemoteWrite | verbs.ReadSink, read, func(*verbs.SendWR) {}},
	} {
		if c.name == "ReadWithoutRight" && o.ReadsUnchecked {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			l := listen(t, p, o)
			cl, sv := connectTo(t, p, l, shape{mem: mem, access: c.access})
			fill(sv.mem, 9)
			w := cl.rdma(c.op, 0, sv, 0, 4096)
			c.bend(&w)
			violation(t, o, cl, sv, w)
		})
	}
}

func testForeignDomain(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{mem: 1 << 16})
	pd, err := sv.conn.NewPD()
	if err != nil {
		t.Fatal(err)
	}
	other := &end{t: t, mem: mapped(t, 1<<16)}
	if other.mr, err = pd.Register(other.mem, allAccess); err != nil {
		t.Fatal(err)
	}
	defer func() { mustClose(t, "foreign domain", pd.Close) }()
	defer func() { mustClose(t, "foreign region", other.mr.Close) }()
	violation(t, o, cl, sv, cl.rdma(verbs.OpRDMAWrite, 0, other, 0, 4096))
	for i, b := range other.mem {
		if b != 0 {
			t.Fatalf("byte %d of the foreign region was touched", i)
		}
	}
}

func testMessageTooLong(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{mem: 1 << 16})
	fill(cl.mem, 4)
	sv.recv(4096, 512)
	cl.post(cl.send(0, 513))
	if c := sv.take(1)[0]; c.Status == verbs.StatusOK {
		t.Errorf("a message of 513 bytes was received into 512: %+v", c)
	}
	if c := cl.take(1)[0]; c.Status == verbs.StatusOK && !o.Terminates {
		t.Errorf("the sender was not told: %+v", c)
	}
	_, _ = cl.down(), sv.down()
	for i, b := range sv.mem {
		if b != 0 && i != 0 && (i < 4096 || i >= 4096+512) {
			t.Fatalf("byte %d outside the receive buffer was touched", i)
		}
	}
}

func testWrongLocalKey(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{mem: 1 << 16})
	sv.recv(4096, 512)
	w := cl.send(0, 512)
	w.SGEs[0].LKey ^= 0x5a5a00
	if n, err := cl.qp.PostSend([]verbs.SendWR{w}); n == 0 && err != nil {
		return // checked when posted
	}
	if c := cl.take(1)[0]; c.ID != w.ID || c.Status == verbs.StatusOK {
		t.Errorf("a SEND with another key ended as %+v", c)
	}
	_ = cl.down()
}
