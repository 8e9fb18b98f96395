package rdma_test

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/target/misbehave"
	"farblk/transport"
	"farblk/transport/rdma"
	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

// These tests have real bytes cross a real connection, software iWARP over the loopback, and look at each.

const (
	limit   = 20 * time.Second
	nqn     = "nqn.2024-01.org.example:sub"
	hostNQN = "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef"
)

func mapped(t *testing.T, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func listen(t *testing.T) verbs.Listener {
	t.Helper()
	l, err := iwarp.New(iwarp.Options{}).Listen(context.Background(), verbs.Addr{IP: netip.MustParseAddr("127.0.0.1")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// dial makes an association with mem to the listener at addr.
func dial(t *testing.T, addr verbs.Addr, mem []byte, o rdma.Options) transport.Association {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	a, err := rdma.NewDialer(iwarp.New(iwarp.Options{}), o).Dial(ctx, transport.Address{Remote: addr.IP, Port: addr.Port}, mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func openQueue(t *testing.T, a transport.Association, p transport.QueueParams) transport.Queue {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	q, err := a.OpenQueue(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// pollUntil polls until ended counts n commands whose Done has returned.
func pollUntil(t *testing.T, q transport.Queue, ended *atomic.Int32, n int) {
	t.Helper()
	for late := time.Now().Add(limit); int(ended.Load()) < n; q.Poll(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("%d of %d commands have ended; the queue: %v", ended.Load(), n, q.Err())
		}
	}
}

// run gives one command and waits for its success.
func run(t *testing.T, q transport.Queue, fill func(*nvme.Command), data []byte, d transport.Direction) *nvme.Completion {
	t.Helper()
	var ended atomic.Int32
	r := &transport.Request{Data: data, Direction: d, Done: func(*transport.Request) { ended.Add(1) }}
	fill((*nvme.Command)(&r.Command))
	if err := q.Submit(r); err != nil {
		t.Fatal(err)
	}
	pollUntil(t, q, &ended, 1)
	c := (*nvme.Completion)(&r.Completion)
	if r.Err != nil || !c.Status().OK() {
		t.Fatalf("%v, %v", r.Err, c.Status())
	}
	return c
}

// TestCaseH26InCapsuleBytes has the far end checksum what came in the capsule: every length, from every alignment,
// many at once.
func TestCaseH26InCapsuleBytes(t *testing.T) {
	const depth, inCapsule = 16, 8192
	l := listen(t)
	served := make(chan error, 1)
	go func() { served <- checksums(l, depth, 64+inCapsule) }()
	mem := mapped(t, depth*2*inCapsule)
	for i := range mem {
		mem[i] = byte(rand.Uint32())
	}
	a := dial(t, l.Addr(), mem, rdma.Options{})
	q := openQueue(t, a, transport.QueueParams{ID: 1, Depth: depth, InCapsule: inCapsule})
	var sizes []int
	for n := 1; n <= 260; n++ {
		sizes = append(sizes, n)
	}
	for _, n := range []int{512, 1024, 1460, 4096, inCapsule - 64} {
		for k := -4; k <= 4; k++ {
			sizes = append(sizes, n+k)
		}
	}
	sizes = append(sizes, inCapsule)
	var ended atomic.Int32
	check := func(r *transport.Request) {
		defer ended.Add(1)
		want := uint64(crc32.ChecksumIEEE(r.Data)) | uint64(len(r.Data))<<32
		if got := (*nvme.Completion)(&r.Completion).Result64(); r.Err != nil || got != want {
			t.Errorf("%d bytes: length and checksum %x arrived, want %x; %v", len(r.Data), got, want, r.Err)
		}
	}
	for i, n := range sizes {
		at := i%(depth-1)*2*inCapsule + i%67
		r := &transport.Request{Data: mem[at : at+n : at+n], Direction: transport.ToController, Done: check}
		(*nvme.Command)(&r.Command).FillWrite(1, 0, 1, false)
		if err := q.Submit(r); err != nil {
			t.Fatal(err)
		}
		if i%(depth-1) == depth-2 {
			pollUntil(t, q, &ended, i+1) // their memory is used again
		}
	}
	pollUntil(t, q, &ended, len(sizes))
	if n := q.Counters().InCapsule; n != uint64(len(sizes)) {
		t.Errorf("%d of %d went in the capsule", n, len(sizes))
	}
	_ = a.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// checksums serves one connection of l: a command's result is the checksum of the data in its capsule, and above it
// their length.
func checksums(l verbs.Listener, depth, capsule int) (err error) {
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	pd, err := conn.NewPD()
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(-1, 0, depth*(capsule+nvme.CompletionSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	mr, err := pd.Register(mem, verbs.LocalWrite)
	if err != nil {
		return err
	}
	qp, err := conn.NewQP(pd, verbs.QPConfig{SendDepth: depth, RecvDepth: depth})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, qp.Close(), mr.Close(), pd.Close(), unix.Munmap(mem)) }()
	recv := func(slot uint64) error {
		sge := verbs.SGE{Data: mem[int(slot)*capsule:][:capsule:capsule], LKey: mr.LKey()}
		_, err := qp.PostRecv([]verbs.RecvWR{{ID: slot, SGE: sge}})
		return err
	}
	for i := range depth {
		if err := recv(uint64(i)); err != nil {
			return err
		}
	}
	if err := conn.Accept(ctx, verbs.ConnParams{PrivateData: nvme.CMAccept{RQSize: uint16(depth)}.Append(nil)}); err != nil {
		return err
	}
	comps := make([]verbs.Completion, depth)
	for armed := false; ; {
		n, err := qp.Poll(comps)
		switch {
		case err != nil:
			return err
		case n > 0:
			armed = false
		case !armed:
			armed, err = true, qp.Arm()
		default:
			armed, err = false, qp.Wait()
		}
		if err != nil {
			return err
		}
		for _, c := range comps[:n] {
			switch {
			case c.Status != verbs.StatusOK:
				return nil // the host has gone
			case c.Op != verbs.OpRecv:
				continue
			}
			b := mem[int(c.ID)*capsule:][:c.Bytes]
			out := mem[depth*capsule+int(c.ID)*nvme.CompletionSize:][:nvme.CompletionSize]
			data := b[nvme.CommandSize:]
			(*nvme.Completion)(out).Fill(uint64(crc32.ChecksumIEEE(data))|uint64(len(data))<<32, 0, 1, (*nvme.Command)(b).CID(), 0)
			if err := recv(c.ID); err != nil {
				return err
			}
			wr := verbs.SendWR{Op: verbs.OpSend, Flags: verbs.Signaled, NumSGE: 1}
			wr.SGEs[0] = verbs.SGE{Data: out, LKey: mr.LKey()}
			if _, err := qp.PostSend([]verbs.SendWR{wr}); err != nil {
				return err
			}
		}
	}
}

// TestCaseH37AnotherOrder reads and writes at depth 8 from a target half of whose namespace is slow, and that now and
// then lets later responses go first: every command gets its own data.
func TestCaseH37AnotherOrder(t *testing.T) {
	const blocks, most, depth, rounds = 2048, 16, 8, 600
	script, err := misbehave.Parse(`
		on io lba=0-1023 delay 2ms
		on io lba=1024-4095 every=3 times=100 reorder 2`)
	if err != nil {
		t.Fatal(err)
	}
	sub, addr := serve(t, script)
	// The namespace's first half is read and its second half, of as many blocks, is written: each block once.
	model := make([]byte, 2*blocks*512)
	for i := range model {
		model[i] = byte(rand.Uint32())
	}
	if err := sub.WriteAt(1, model, 0); err != nil {
		t.Fatal(err)
	}
	mem := mapped(t, depth*most*512)
	q := connect(t, dial(t, addr, mem, rdma.Options{}), mem, depth+1)

	var submitted, writes, swapped, last int // last: the newest command that has ended
	var ended atomic.Int32
	slots := make([]*transport.Request, depth)
	lba := make([]int, depth)
	next := func(slot int) {
		r := slots[slot]
		n := 1 + rand.IntN(most)
		lba[slot] = rand.IntN(blocks - n)
		r.Data, r.Direction = mem[slot*most*512:][:n*512], transport.ToHost
		c := (*nvme.Command)(&r.Command)
		if at := blocks + writes; rand.IntN(3) == 0 && at+n <= 2*blocks {
			writes += n
			lba[slot], r.Direction = at, transport.ToController
			c.FillWrite(1, uint64(at), uint32(n), false)
			for i := range r.Data {
				r.Data[i] = byte(rand.Uint32())
			}
			copy(model[at*512:], r.Data)
		} else {
			c.FillRead(1, uint64(lba[slot]), uint32(n))
			clear(r.Data)
		}
		submitted++
		r.Owner = [2]int{slot, submitted}
		if err := q.Submit(r); err != nil {
			t.Error(err)
		}
	}
	for i := range slots {
		slots[i] = &transport.Request{Done: func(r *transport.Request) {
			defer ended.Add(1)
			who := r.Owner.([2]int)
			if who[1] < last {
				swapped++
			}
			last = max(last, who[1])
			s := (*nvme.Completion)(&r.Completion).Status()
			if at := lba[who[0]] * 512; r.Err != nil || !s.OK() || !bytes.Equal(r.Data, model[at:at+len(r.Data)]) {
				t.Errorf("command %d, %d bytes at block %d: other data; %v, %v", who[1], len(r.Data), lba[who[0]], s, r.Err)
			}
			if submitted < rounds {
				next(who[0])
			}
		}}
		next(i)
	}
	pollUntil(t, q, &ended, rounds)
	if swapped < rounds/10 || script.Fired(2) < 100 || script.Fired(3) < 100 {
		t.Errorf("%d of %d commands ended after a later one; the rules applied %d and %d times", swapped, rounds, script.Fired(2), script.Fired(3))
	}
	got := make([]byte, len(model))
	if err := sub.ReadAt(1, got, 0); err != nil || !bytes.Equal(got, model) {
		t.Errorf("the namespace holds other data than was written, %v", err)
	}
}

// TestKeyPerCommandFromTheStart has every command of a controller, its admin queue's too, bring its own key: the region's
// own let nobody in.
func TestKeyPerCommandFromTheStart(t *testing.T) {
	script, err := misbehave.Parse("")
	if err != nil {
		t.Fatal(err)
	}
	_, addr := serve(t, script)
	mem := mapped(t, 1<<20)
	a := dial(t, addr, mem, rdma.Options{KeyPerCommand: true})
	q := connect(t, a, mem, 8)
	for _, blocks := range []int{1, 64} { // in the capsule, by key
		out, in := mem[:blocks*512], mem[1<<19:][:blocks*512]
		for i := range out {
			out[i] = byte(rand.Uint32())
		}
		run(t, q, func(c *nvme.Command) { c.FillWrite(1, 0, uint32(blocks), false) }, out, transport.ToController)
		run(t, q, func(c *nvme.Command) { c.FillRead(1, 0, uint32(blocks)) }, in, transport.ToHost)
		if !bytes.Equal(in, out) {
			t.Errorf("%d blocks: other data came back", blocks)
		}
	}
}

// serve starts a target that follows a script, with a namespace of 2 MiB.
func serve(t *testing.T, script *misbehave.Script) (*target.Subsystem, verbs.Addr) {
	t.Helper()
	tg, err := target.New(target.Config{})
	if err != nil {
		t.Fatal(err)
	}
	sub, err := tg.AddSubsystem(target.SubsystemConfig{NQN: nqn})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sub.AddNamespace(target.NamespaceConfig{Size: 2 << 20}); err != nil {
		t.Fatal(err)
	}
	l := listen(t)
	addr := l.Addr()
	served := make(chan error, 1)
	go func() { served <- tg.Serve(context.Background(), misbehave.Wrap(l, script)) }()
	t.Cleanup(func() {
		if err := errors.Join(tg.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return sub, addr
}

// connect brings a controller up and gives its I/O queue.
func connect(t *testing.T, a transport.Association, mem []byte, depth int) transport.Queue {
	t.Helper()
	id, _ := nvme.HostIDOf(hostNQN)
	join := func(q transport.Queue, qid uint16, depth int, cntlid uint16) uint16 {
		data := mem[:nvme.ConnectDataSize]
		copy(data, nvme.ConnectData{HostID: id, CNTLID: cntlid, SubNQN: nqn, HostNQN: hostNQN}.Append(nil))
		c := run(t, q, func(c *nvme.Command) { c.FillConnect(qid, uint16(depth), 0, 0) }, data, transport.ToController)
		return nvme.ConnectResult(c.Result()).CNTLID()
	}
	admin := openQueue(t, a, transport.QueueParams{Depth: 32})
	cntlid := join(admin, 0, 32, nvme.AnyController)
	run(t, admin, func(c *nvme.Command) { c.FillPropertySet(nvme.PropertyCC, uint64(nvme.EnableConfiguration)) }, nil, transport.None)
	q := openQueue(t, a, transport.QueueParams{ID: 1, Depth: depth, ControllerID: cntlid, InCapsule: 4096})
	join(q, 1, depth, cntlid)
	return q
}
