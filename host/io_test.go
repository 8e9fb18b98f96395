package host

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
	"farblk/host/nvme"
	"farblk/transport"
)

// connectedDevice is a namespace with a connection of its own.
type connectedDevice struct{ *Namespace }

func (d connectedDevice) Close() error {
	return errors.Join(d.Namespace.Close(), d.Controller().Shutdown(bg))
}

func TestDevice(t *testing.T) {
	for _, lbads := range []uint8{9, 12} {
		t.Run(fmt.Sprint(1<<lbads), func(t *testing.T) {
			blockdevtest.Run(t, func(t *testing.T) blockdev.Device {
				ft := newFakeTarget()
				ft.add(1, 8<<20, lbads).id.DLFEAT = 1
				cfg := testConfig(ft)
				cfg.QueueSize, cfg.PoolSize = 16, 16<<20
				c, err := Connect(bg, cfg)
				if err != nil {
					t.Fatal(err)
				}
				return connectedDevice{c.Namespaces()[0]}
			})
		})
	}
}

func TestCaseH27Split(t *testing.T) {
	for _, x := range []struct {
		mdts  uint8
		noiob uint16
		want  []string
	}{
		{5, 0, []string{"0+256", "256+256", "512+256", "768+256", "1024+256", "1280+256", "1536+256", "1792+255"}},
		{0, 0, []string{"0+2047"}},
		{8, 600, []string{"0+600", "600+600", "1200+600", "1800+247"}},
	} {
		inTime(t, func(t *testing.T) {
			ft := newFakeTarget(2 << 20)
			ft.id.MDTS, ft.spaces[1].id.NOIOB = x.mdts, x.noiob
			c := connect(t, testConfig(ft))
			n := c.Namespaces()[0]
			b := lease(t, n, 1<<20-512)
			want := bytes.Clone(fill(b, 3))
			ft.takeLog()
			if err := do(n, blockdev.Write, 0, b, 0); err != nil {
				t.Fatal(err)
			}
			var writes []string
			for _, w := range x.want {
				writes = append(writes, "io1 Write "+w)
			}
			if got := ft.takeLog(); !slices.Equal(got, writes) {
				t.Errorf("got  %q\nwant %q", got, writes)
			}
			clear(b)
			if err := do(n, blockdev.Read, 0, b, 0); err != nil || !bytes.Equal(b, want) {
				t.Error("read:", err)
			}
			if s := c.Counters().Queues[0].Splits; s != uint64(2*len(x.want)-2) {
				t.Error(s, "splits")
			}
		})
	}
}

func TestDiscardAndWriteZeroes(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(64 << 20)
		ft.nvm = nvme.NVMController{WZSL: 10, DMRL: 3, DMRSL: 1000, DMSL: 2500}
		ft.spaces[1].id.DLFEAT = 1 | 1<<3
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		fill(ft.spaces[1].data, 1)
		var ranges []nvme.Range
		var unmaps []bool
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				cmd := (*nvme.Command)(&r.Command)
				if isIO(q, r, nvme.IODatasetManagement) {
					if !cmd.DatasetDeallocate() || r.Direction != transport.ToController {
						t.Error("not a deallocation")
					}
					for i := range cmd.Ranges() {
						rg, _ := nvme.ParseRange(r.Data[16*i:])
						ranges = append(ranges, rg)
					}
				}
				if isIO(q, r, nvme.IOWriteZeroes) {
					unmaps = append(unmaps, cmd.Deallocate())
				}
				return false
			}
		})
		ft.takeLog()
		if err := do(n, blockdev.Discard, 512, nil, 4000*512); err != nil {
			t.Fatal(err)
		}
		if got := ft.takeLog(); !slices.Equal(got, []string{"io1 Dataset Management 3 ranges", "io1 Dataset Management 2 ranges"}) {
			t.Error(got)
		}
		want := []nvme.Range{{Blocks: 1000, SLBA: 1}, {Blocks: 1000, SLBA: 1001}, {Blocks: 500, SLBA: 2001}, {Blocks: 1000, SLBA: 2501}, {Blocks: 500, SLBA: 3501}}
		if !slices.Equal(ranges, want) {
			t.Error(ranges)
		}
		r := &blockdev.Request{Op: blockdev.WriteZeroes, Off: 4001 * 512, Len: 12000 * 512, Flags: blockdev.FUA | blockdev.NoUnmap}
		if _, err := blockdev.SubmitWait(bg, n, r); err != nil {
			t.Fatal(err)
		}
		if got := ft.takeLog(); !slices.Equal(got, []string{"io1 Write Zeroes 4001+8192 FUA", "io1 Write Zeroes 12193+3808 FUA"}) {
			t.Error(got)
		}
		if err := do(n, blockdev.WriteZeroes, 0, nil, 512); err != nil || !slices.Equal(unmaps, []bool{false, false, true}) {
			t.Error(err, unmaps)
		}
		if d := ft.spaces[1].data; bytes.ContainsFunc(d[:16001*512], func(r rune) bool { return r != 0 }) || d[16001*512] == 0 && d[16001*512+1] == 0 {
			t.Error("not what was asked for was zeroed")
		}
		b := lease(t, n, 4096)
		w := &blockdev.Request{Op: blockdev.Write, Data: b, Flags: blockdev.FUA}
		ft.takeLog()
		if _, err := blockdev.SubmitWait(bg, n, w); err != nil || ft.takeLog()[0] != "io1 Write 0+8 FUA" {
			t.Error(err)
		}
	})
}

// More data than memory holds, with numbers that need all 64 bits.
func TestHugeNamespace(t *testing.T) {
	id := &nvme.IdentifyNamespace{NSZE: 1<<54 - 1}
	id.LBAF[0].LBADS = 9
	g, err := newGeometry(&limits{maxTransfer: maxUnlimited, discard: true}, 1, id)
	if err != nil {
		t.Fatal(err)
	}
	size := g.info.Size
	if size != 1<<63-512 {
		t.Fatal(size)
	}
	c := &command{ranges: make([]byte, nvme.MaxRanges*nvme.RangeSize)}
	r := &blockdev.Request{Op: blockdev.Read, Off: size - 512, Data: make([]byte, 512)}
	if end, err := g.check(r); end || err != nil {
		t.Error(err)
	}
	g.fill(c, r, 0)
	if lba := (*nvme.Command)(&c.tr.Command).SLBA(); lba != 1<<54-2 {
		t.Error(lba)
	}
	r = &blockdev.Request{Op: blockdev.Discard, Len: size}
	if n, more := g.fill(c, r, 0); n != maxDiscard || !more {
		t.Error(n, more)
	}
}

func TestStatusOfRequests(t *testing.T) {
	for _, x := range []struct {
		status nvme.StatusCode
		op     blockdev.Op
		want   error
		sent   int
	}{
		{nvme.StatusUnrecoveredRead, blockdev.Read, blockdev.ErrMedia, 1},
		{nvme.StatusWriteFault.WithDNR(), blockdev.Write, blockdev.ErrMedia, 1},
		{nvme.StatusWriteFault, blockdev.Write, blockdev.ErrMedia, 1 + maxRetries},
		{nvme.StatusLBAOutOfRange, blockdev.Read, blockdev.ErrRange, 1},
		{nvme.StatusCapacityExceeded.WithDNR(), blockdev.Write, blockdev.ErrNoSpace, 1},
		{nvme.StatusNamespaceWriteProtected, blockdev.Write, blockdev.ErrReadOnly, 1},
		{nvme.StatusInvalidOpcode.WithDNR(), blockdev.WriteZeroes, blockdev.ErrUnsupported, 1},
		{nvme.StatusInvalidNamespace.WithDNR(), blockdev.Read, blockdev.ErrLost, 1},
		{nvme.StatusInternalError.WithDNR(), blockdev.Flush, nvme.StatusInternalError, 1},
		{nvme.StatusNamespaceNotReady, blockdev.Read, nvme.StatusNamespaceNotReady, 1 + maxRetries},
		{nvme.StatusANAPersistentLoss, blockdev.Read, blockdev.ErrLost, 1},
	} {
		inTime(t, func(t *testing.T) {
			ft := newFakeTarget(1 << 20)
			c := connect(t, testConfig(ft))
			n := c.Namespaces()[0]
			b := lease(t, n, 8192)
			sent := 0
			ft.change(func() {
				ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
					if isIO(q, r) {
						sent++
						answer(q, r, 0, x.status)
					}
					return isIO(q, r)
				}
			})
			var status *nvme.StatusError
			if err := do(n, x.op, 0, b, 4096); !errors.Is(err, x.want) || !errors.As(err, &status) || sent != x.sent {
				t.Errorf("%v: %v, sent %d times", x.status, err, sent)
			}
			ft.change(func() { ft.intercept = nil })
			if err := do(n, blockdev.Read, 0, b, 0); err != nil { // one bad request harms no other
				t.Error(err)
			}
		})
	}
}

func TestRetryDelayOfTheController(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		ft.id.CRDT = [3]uint16{10, 35, 0}
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		b := lease(t, n, 4096)
		ft.once(func(q *fakeQueue, r *transport.Request) bool {
			if isIO(q, r) {
				answer(q, r, 0, nvme.StatusNamespaceNotReady|2<<11)
			}
			return isIO(q, r)
		})
		begin := time.Now()
		if o := <-start(n, blockdev.Write, 0, b); o.err != nil || o.at.Sub(begin) < 3500*time.Millisecond-c.tick || o.at.Sub(begin) > 4500*time.Millisecond {
			t.Error(o.err, o.at.Sub(begin))
		}
	})
}

// One failed part fails the request, once, after all its parts have come back.
func TestPartFails(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(2 << 20)
		cfg := testConfig(ft)
		cfg.QueueSize = 16
		c := connect(t, cfg)
		n := c.Namespaces()[0]
		b := lease(t, n, 1<<20)
		var late *transport.Request
		var lateQueue *fakeQueue
		parts := 0
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if !isIO(q, r) {
					return false
				}
				switch parts++; parts {
				case 2:
					late, lateQueue = r, q
					return true
				case 3:
					answer(q, r, 0, nvme.StatusUnrecoveredRead)
					return true
				}
				return false
			}
		})
		end := start(n, blockdev.Read, 0, b)
		synctest.Wait()
		select {
		case <-end:
			t.Error("ended while a part was under way")
		default:
		}
		lateQueue.ctrl.perform(lateQueue, late)
		if o := <-end; !errors.Is(o.err, blockdev.ErrMedia) {
			t.Error(o.err)
		}
	})
}

// Completions in any order find their own requests.
func TestCaseH37OutOfOrder(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		fill(ft.spaces[1].data, 7)
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if isIO(q, r) {
					q.performLater(r, time.Duration(rand.N(5000))*time.Microsecond)
				}
				return isIO(q, r)
			}
		})
		b := lease(t, n, 64*4096)
		for range 20 {
			clear(b)
			var ends []<-chan outcome
			for i := range 64 {
				ends = append(ends, start(n, blockdev.Read, int64(i)*4096, b[i*4096:][:4096]))
			}
			for _, e := range ends {
				if o := <-e; o.err != nil {
					t.Fatal(o.err)
				}
			}
			if !bytes.Equal(b, ft.spaces[1].data[:len(b)]) {
				t.Fatal("another request's data")
			}
		}
	})
}

// Discards, which may take long and whose range buffers are few, do not keep others waiting.
func TestManyDiscards(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		ft.nvm = nvme.NVMController{DMSL: 64}
		cfg := testConfig(ft)
		cfg.NrIOQueues = 1
		c := connect(t, cfg)
		n, other := c.Namespaces()[0], c.Namespaces()[1]
		b := lease(t, n, 4096)
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if isIO(q, r, nvme.IODatasetManagement) {
					q.performLater(r, time.Second)
				}
				return isIO(q, r, nvme.IODatasetManagement)
			}
		})
		var ends []<-chan outcome
		discard := func(n *Namespace) {
			c := make(chan outcome, 1)
			r := &blockdev.Request{Op: blockdev.Discard, Len: 1 << 17, Done: func(r *blockdev.Request) { c <- outcome{r.Err, time.Now()} }}
			n.Queue(0).Submit(r)
			n.Queue(0).Kick()
			ends = append(ends, c)
		}
		begin := time.Now()
		for range 5 {
			discard(n)
			discard(other)
		}
		for _, n := range []*Namespace{n, other} {
			if o := <-start(n, blockdev.Read, 0, b); o.err != nil || !o.at.Equal(begin) {
				t.Error(o.err, o.at.Sub(begin))
			}
		}
		time.Sleep(1500 * time.Millisecond)
		ft.cut() // with some under way and more waiting
		for _, e := range ends {
			if o := <-e; o.err != nil {
				t.Error(o.err)
			}
		}
		q := c.queues[0]
		if len(q.ranges) != rangeBuffers || q.inFlight != 0 || n.queues[0].used+other.queues[0].used != 0 {
			t.Error(len(q.ranges), q.inFlight)
		}
		for range 10 {
			discard(other)
		}
		if err := other.Close(); err != nil {
			t.Error(err)
		}
		for _, e := range ends[10:] {
			if o := <-e; o.err != nil && !errors.Is(o.err, blockdev.ErrClosed) {
				t.Error(o.err)
			}
		}
		if len(q.ranges) != rangeBuffers || q.backlog != nil {
			t.Error("something is left")
		}
	})
}

// A namespace that floods the queue does not starve another.
func TestNamespacesTakeTurns(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		cfg := testConfig(ft)
		cfg.NrIOQueues, cfg.QueueSize = 1, 16
		c := connect(t, cfg)
		flood, other := c.Namespaces()[0], c.Namespaces()[1]
		b := lease(t, flood, 4096)
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if isIO(q, r) {
					q.performLater(r, time.Millisecond)
				}
				return isIO(q, r)
			}
		})
		var ends []<-chan outcome
		for range 300 {
			ends = append(ends, start(flood, blockdev.Read, 0, b))
		}
		begin := time.Now()
		if o := <-start(other, blockdev.Read, 0, b); o.err != nil || o.at.Sub(begin) > 3*time.Millisecond {
			t.Error(o.err, o.at.Sub(begin))
		}
		for _, e := range ends {
			if o := <-e; o.err != nil {
				t.Error(o.err)
			}
		}
	})
}

func TestNamespaceClose(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1<<20, 1<<20)
		cfg := testConfig(ft)
		cfg.NrIOQueues, cfg.QueueSize = 1, 16
		c := connect(t, cfg)
		n, other := c.Namespaces()[0], c.Namespaces()[1]
		b := lease(t, n, 4096)
		ft.change(func() {
			ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
				if isIO(q, r) {
					q.performLater(r, time.Second)
				}
				return isIO(q, r)
			}
		})
		var ends, others []<-chan outcome
		for i := range 40 {
			ends = append(ends, start(n, blockdev.Read, 0, b))
			if i%2 == 0 {
				others = append(others, start(other, blockdev.Read, 0, b))
			}
		}
		begin := time.Now()
		if err := n.Close(); err != nil || time.Since(begin) != time.Second {
			t.Error(err, time.Since(begin))
		}
		closed := 0
		for _, e := range ends {
			o := <-e
			if errors.Is(o.err, blockdev.ErrClosed) {
				closed++
			} else if o.err != nil {
				t.Error(o.err)
			}
		}
		for _, e := range others {
			if o := <-e; o.err != nil {
				t.Error(o.err)
			}
		}
		if closed < 25 || len(c.Namespaces()) != 1 {
			t.Error(closed, "of 40 closed")
		}
	})
}
