package target_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
)

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1, byte(n), byte(n >> 8), byte(n >> 16)}).Read(b) // never fails
	return b
}

// store is a kind of namespace that I/O tests run on, and how it is reached.
type store struct {
	config func(t *testing.T) target.NamespaceConfig
	wrap   []func(verbs.Listener) verbs.Listener
}

var stores = map[string]store{
	"memory":  {config: inMemory},
	"direct":  {config: inMemory, wrap: []func(verbs.Listener) verbs.Listener{asDevice(verbs.LinkRoCE)}},
	"adapter": {config: inMemory, wrap: []func(verbs.Listener) verbs.Listener{asDevice(verbs.LinkIWARP)}},
	"file": {config: func(t *testing.T) target.NamespaceConfig {
		return target.NamespaceConfig{Size: 8 << 20, File: filepath.Join(t.TempDir(), "disk")}
	}},
}

func inMemory(*testing.T) target.NamespaceConfig { return target.NamespaceConfig{Size: 8 << 20} }

func TestReadWrite(t *testing.T) {
	for name, store := range stores {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, target.Config{}, store.wrap...)
			s := b.subsystem(store.config(t))
			h := connectHost(t, b.addr, subNQN, 1, 32, 0)
			q := h.io[0]
			for _, tt := range []struct {
				n         int
				inCapsule bool
			}{{512, true}, {4096, true}, {8192, true}, {512, false}, {4096, false}, {128 << 10, false}, {1 << 20, false}} {
				want := random(tt.n)
				if err := q.write(1, 8, want, tt.inCapsule, tt.n == 4096); err != nil {
					t.Fatalf("write of %d: %v", tt.n, err)
				}
				got := make([]byte, tt.n)
				if err := s.ReadAt(1, got, 8*512); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%d bytes written differ, %v", tt.n, err)
				}
				buf, _ := q.data(0, tt.n)
				clear(buf)
				if got, err := q.read(1, 8, tt.n); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%d bytes read differ, %v", tt.n, err)
				}
			}
			q.do(func(c *nvme.Command) { c.FillFlush(1) })
			q.do(func(c *nvme.Command) { c.FillFlush(nvme.AllNamespaces) })
			q.do(func(c *nvme.Command) { c.FillWriteZeroes(1, 8, 1024, true, true) })
			got, err := q.read(1, 8, 1<<20)
			if err != nil || !bytes.Equal(got[:1024*512], make([]byte, 1024*512)) || bytes.Equal(got[1024*512:], make([]byte, 1024*512)) {
				t.Fatalf("write zeroes cleared the wrong blocks, %v", err)
			}
			st := s.Stats()
			want := target.Stats{
				Reads: 8, Writes: 7, InCapsuleWrites: 3, FUAWrites: 2, Flushes: 2, WriteZeroes: 1, Queues: 1,
				ReadBytes: st.ReadBytes, WriteBytes: 512*2 + 4096*2 + 8192 + 128<<10 + 1<<20,
			}
			if st != want {
				t.Errorf("stats %+v\nwant  %+v", st, want)
			}
		})
	}
}

func TestDeallocate(t *testing.T) {
	for name, store := range stores {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, target.Config{}, store.wrap...)
			s := b.subsystem(store.config(t))
			q := connectHost(t, b.addr, subNQN, 1, 32, 0).io[0]
			if err := s.WriteAt(1, random(8<<20), 0); err != nil {
				t.Fatal(err)
			}
			trim := func(inCapsule bool, ranges ...nvme.Range) error {
				var p []byte
				for _, r := range ranges {
					p = r.Append(p)
				}
				buf, sgl := q.data(0, len(p))
				copy(buf, p)
				if inCapsule {
					sgl = nvme.InCapsuleSGL(uint32(len(p)))
				} else {
					p = nil
				}
				_, err := q.try(func(c *nvme.Command) { c.FillDatasetManagement(1, len(ranges)); c.SetSGL(sgl) }, p)
				return err
			}
			if err := trim(true, nvme.Range{SLBA: 1, Blocks: 1000}, nvme.Range{SLBA: 4000, Blocks: 1}); err != nil {
				t.Fatal(err)
			}
			if err := trim(false, nvme.Range{SLBA: 8192, Blocks: 8192}); err != nil {
				t.Fatal(err)
			}
			if err := trim(false, nvme.Range{SLBA: 2000, Blocks: 1}, nvme.Range{SLBA: 16384, Blocks: 1}); !errors.Is(err, nvme.StatusLBAOutOfRange) {
				t.Errorf("range past the end: %v", err)
			}
			got, want := make([]byte, 8<<20), random(8<<20)
			clear(want[512 : 1001*512])
			clear(want[4000*512 : 4001*512])
			clear(want[8192*512:])
			if err := s.ReadAt(1, got, 0); err != nil || !bytes.Equal(got, want) {
				t.Errorf("deallocate cleared the wrong blocks, %v", err)
			}
			if st := s.Stats(); st.Deallocates != 2 || st.DeallocatedRanges != 3 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// TestManyAtOnce keeps a queue full with overlapping sizes, so that commands
// have to wait for bounce memory, for RDMA READs and for work requests.
func TestManyAtOnce(t *testing.T) {
	for name, store := range stores {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, target.Config{ReadDepth: 3}, store.wrap...)
			b.subsystem(store.config(t))
			q := connectHost(t, b.addr, subNQN, 1, 64, 0).io[0]
			const n = 48 << 10
			want := random(63 * n)
			var ids []uint16
			for i := range 63 {
				p, sgl := q.data(i*n, n)
				copy(p, want[i*n:])
				var c nvme.Command
				c.FillWrite(1, uint64(i*n/512), n/512, false)
				c.SetSGL(sgl)
				ids = append(ids, q.send(c, nil))
			}
			settle := func() {
				for _, id := range ids {
					if cqe, err := q.await(id); err != nil || !cqe.Status().OK() {
						t.Fatalf("%v, %v", cqe.Status(), err)
					}
				}
				ids = nil
			}
			settle()
			for range 3 {
				all, _ := q.data(0, 63*n)
				clear(all)
				for i := range 63 {
					_, sgl := q.data(i*n, n)
					var c nvme.Command
					c.FillRead(1, uint64(i*n/512), n/512)
					c.SetSGL(sgl)
					ids = append(ids, q.send(c, nil))
				}
				settle()
				if !bytes.Equal(all, want) {
					t.Fatal("data differ")
				}
			}
		})
	}
}

func TestRefusedCommands(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem(target.NamespaceConfig{Size: 1 << 20}, target.NamespaceConfig{Size: 1 << 20, BlockSize: 4096, ReadOnly: true})
	q := connectHost(t, b.addr, subNQN, 1, 32, 0).io[0]
	_, keyed := q.data(0, 4096)
	short := keyed
	short.Length = 2048
	for _, tt := range []struct {
		name string
		fill func(*nvme.Command)
		want nvme.StatusCode
	}{
		{"no such namespace", func(c *nvme.Command) { c.FillRead(3, 0, 8); c.SetSGL(keyed) }, nvme.StatusInvalidNamespace},
		{"past the end", func(c *nvme.Command) { c.FillRead(1, 2041, 8); c.SetSGL(keyed) }, nvme.StatusLBAOutOfRange},
		{"wraps around", func(c *nvme.Command) { c.FillRead(1, ^uint64(0), 8); c.SetSGL(keyed) }, nvme.StatusLBAOutOfRange},
		{"short descriptor", func(c *nvme.Command) { c.FillRead(1, 0, 8); c.SetSGL(short) }, nvme.StatusSGLInvalidLength},
		{"read into the capsule", func(c *nvme.Command) { c.FillRead(1, 0, 8); c.SetSGL(nvme.InCapsuleSGL(4096)) }, nvme.StatusSGLInvalidType},
		{"no data in the capsule", func(c *nvme.Command) { c.FillWrite(1, 0, 8, false); c.SetSGL(nvme.InCapsuleSGL(4096)) }, nvme.StatusSGLInvalidOffset},
		{"offset into the capsule", func(c *nvme.Command) {
			c.FillWrite(1, 0, 8, false)
			c.SetSGL(nvme.SGL{Type: nvme.SGLOffset, Address: 64, Length: 4096})
		}, nvme.StatusSGLInvalidOffset},
		{"list of descriptors", func(c *nvme.Command) {
			c.FillWrite(1, 0, 8, false)
			c.SetSGL(nvme.SGL{Type: nvme.SGLLastSegment, Length: 16})
		}, nvme.StatusSGLInvalidType},
		{"read only", func(c *nvme.Command) { c.FillWrite(2, 0, 1, false); c.SetSGL(keyed) }, nvme.StatusNamespaceWriteProtected},
		{"zero read only", func(c *nvme.Command) { c.FillWriteZeroes(2, 0, 1, false, false) }, nvme.StatusNamespaceWriteProtected},
		{"PRP", func(c *nvme.Command) { c.FillRead(1, 0, 8); c.SetFlags(0) }, nvme.StatusInvalidField},
		{"opcode", func(c *nvme.Command) { c.FillFlush(1); c.SetOpcode(0x7A) }, nvme.StatusInvalidOpcode},
		{"2 MiB", func(c *nvme.Command) { c.FillRead(1, 0, 4096); c.SetSGL(keyed) }, nvme.StatusLBAOutOfRange},
	} {
		if _, err := q.try(tt.fill, nil); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

func TestIdentify(t *testing.T) {
	b := newBed(t, target.Config{QueueDepth: 64, InCapsule: 4096, MDTS: 5})
	s := b.subsystem(target.NamespaceConfig{Size: 1 << 20},
		target.NamespaceConfig{ID: 7, Size: 1 << 20, BlockSize: 4096, UUID: nvme.UUID{1}, NGUID: nvme.NGUID{2}, EUI64: nvme.EUI64{3}})
	h := connectHost(t, b.addr, subNQN, 0, 0, 0)
	cqe := h.admin.do(func(c *nvme.Command) { c.FillPropertyGet(nvme.PropertyCAP) })
	if nvme.Capabilities(cqe.Result64()).MaxEntries() != 64 {
		t.Errorf("CAP %#x", cqe.Result64())
	}
	p, err := h.admin.identify(nvme.CNSController, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := nvme.ParseIdentifyController(p)
	if err != nil || c.CNTLID != h.id || c.InCapsuleBytes() != 4096 || c.MaxTransfer(4096) != 128<<10 || !c.SupportsKeyedSGL() ||
		!c.SupportsSGL() || c.SubNQN != s.NQN() || c.MAXCMD != 64 || c.IORCSZ != 1 || c.ICDOFF != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	p, err = h.admin.identify(nvme.CNSActiveNamespaces, 1)
	if ids, _ := nvme.ParseNamespaceList(p, 1); err != nil || len(ids) != 1 || ids[0] != 7 {
		t.Errorf("namespaces %v, %v", ids, err)
	}
	p, err = h.admin.identify(nvme.CNSNamespace, 7)
	if n, _ := nvme.ParseIdentifyNamespace(p); err != nil || n.BlockSize() != 4096 || n.NSZE != 256 || n.NGUID != (nvme.NGUID{2}) {
		t.Errorf("%+v, %v", n, err)
	}
	p, err = h.admin.identify(nvme.CNSNamespaceDescriptors, 7)
	if d, _ := nvme.ParseNamespaceIDs(p); err != nil || d != (nvme.NamespaceIDs{EUI64: nvme.EUI64{3}, NGUID: nvme.NGUID{2}, UUID: nvme.UUID{1}, HasCSI: true}) {
		t.Errorf("%+v, %v", d, err)
	}
	p, err = h.admin.identify(nvme.CNSNamespaceDescriptors, 1)
	if d, _ := nvme.ParseNamespaceIDs(p); err != nil || d.UUID.IsZero() || d.NGUID.IsZero() {
		t.Errorf("derived identity: %+v, %v", d, err)
	}
	if _, err = h.admin.identify(nvme.CNSNamespaceDescriptors, 2); !errors.Is(err, nvme.StatusInvalidNamespace) {
		t.Error(err)
	}
	for _, cns := range []nvme.CNS{nvme.CNSCommandSetController, nvme.CNSCommandSetNamespace, nvme.CNSIndependentNamespace, nvme.CNSCommandSets} {
		if _, err := h.admin.identify(cns, 1); err != nil {
			t.Errorf("CNS %#x: %v", cns, err)
		}
	}
	for id, size := range map[nvme.LogID]int{
		nvme.LogSupported: 1024, nvme.LogError: 4096, nvme.LogSMART: 512, nvme.LogFirmware: 512,
		nvme.LogChangedNamespaces: 4096, nvme.LogEffects: 4096, nvme.LogANA: 1024,
	} {
		if _, err := h.admin.log(id, 0, size); err != nil {
			t.Errorf("log %#x: %v", id, err)
		}
	}
	p, err = h.admin.log(nvme.LogError, 0, 64)
	if e := nvme.ParseErrorLog(p); err != nil || len(e) != 1 || e[0].Status().Code() != nvme.StatusInvalidNamespace || e[0].NSID != 2 {
		t.Errorf("error log %+v, %v", e, err)
	}
}

func TestCaseH18NothingPastLogEnd(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem()
	h := connectHost(t, b.addr, subNQN, 0, 0, 0)
	if _, err := h.admin.log(nvme.LogSMART, 1<<40, 512); !errors.Is(err, nvme.StatusInvalidField) {
		t.Error(err)
	}
}

func TestConnectRefusals(t *testing.T) {
	b := newBed(t, target.Config{QueueDepth: 64, IOQueues: 2})
	s := b.subsystem()
	s.AllowHosts(hostNQN)
	for _, tt := range []struct {
		qid   uint16
		depth int
		want  nvme.RejectReason
	}{{0, 33, nvme.RejectSQSize}, {1, 65, nvme.RejectSQSize}, {3, 32, nvme.RejectQueueID}} {
		_, err := dial(t, b.addr, tt.qid, tt.depth)
		var rej *verbs.RejectError
		if !errors.As(err, &rej) {
			t.Errorf("queue %d, %d deep: %v", tt.qid, tt.depth, err)
			continue
		}
		if r, ok := nvme.ParseRejectReason(rej.PrivateData); !ok || r != tt.want {
			t.Errorf("queue %d, %d deep: %v, want %v", tt.qid, tt.depth, r, tt.want)
		}
	}
	h := connectHost(t, b.addr, subNQN, 1, 32, 0)
	for _, tt := range []struct {
		qid       uint16
		sub, host string
		cntlid    uint16
		want      nvme.StatusCode
	}{
		{0, "nqn.2024-01.org.example:other", hostNQN, 0xFFFF, nvme.StatusConnectInvalidParameters},
		{0, subNQN, "nqn.2024-01.org.example:stranger", 0xFFFF, nvme.StatusConnectInvalidHost},
		{0, subNQN, "", 0xFFFF, nvme.StatusConnectInvalidParameters},
		{0, subNQN, hostNQN, 5, nvme.StatusConnectInvalidParameters},
		{2, subNQN, hostNQN, h.id + 1, nvme.StatusConnectInvalidParameters},
		{1, subNQN, hostNQN, h.id, nvme.StatusSequenceError},
		{2, subNQN, hostNQN, h.id, nvme.StatusConnectInvalidParameters}, // one queue was granted
	} {
		c, err := dial(t, b.addr, tt.qid, 32)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.connect(tt.sub, tt.host, tt.cntlid, 0)
		var se *nvme.StatusError
		if !errors.As(err, &se) || se.Status.Code() != tt.want || !se.Status.DNR() {
			t.Errorf("%+v: %v", tt, err)
		}
		if _, err := c.try(func(c *nvme.Command) { c.FillKeepAlive() }, nil); !errors.Is(err, nvme.StatusSequenceError) {
			t.Errorf("command on a queue without Connect: %v", err)
		}
		c.close()
	}
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !ok(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %s", limit, what)
		}
	}
}

func TestDiscovery(t *testing.T) {
	b := newBed(t, target.Config{})
	second := b.listen()
	b.subsystem()
	hidden, err := b.target.AddSubsystem(target.SubsystemConfig{NQN: "nqn.2024-01.org.example:hidden", Hosts: []string{"nqn.x"}})
	if err != nil {
		t.Fatal(err)
	}
	h := connectHost(t, second, nvme.DiscoveryNQN, 0, 0, 30*time.Second)
	names := func() (nvme.DiscoveryHeader, []string) {
		p, err := h.admin.log(nvme.LogDiscovery, 0, 8192)
		if err != nil {
			t.Fatal(err)
		}
		head, err := nvme.ParseDiscoveryHeader(p)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for i := range int(head.Records) {
			e, _ := nvme.ParseDiscoveryEntry(p[1024*(i+1):])
			out = append(out, fmt.Sprintf("%d %s:%s %s %s %s", e.PortID, e.Address, e.ServiceID, e.TransportType, e.SubType, e.SubNQN))
		}
		return head, out
	}
	head, got := names()
	want := []string{
		fmt.Sprintf("1 127.0.0.1:%d rdma nvme subsystem %s", b.addr.Port, subNQN),
		fmt.Sprintf("2 127.0.0.1:%d rdma current discovery subsystem %s", second.Port, nvme.DiscoveryNQN),
		fmt.Sprintf("2 127.0.0.1:%d rdma nvme subsystem %s", second.Port, subNQN),
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	h.admin.do(func(c *nvme.Command) { c.FillSetFeatures(nvme.FeatureAsyncEvents, 0, nvme.EventsDiscovery) })
	aer := h.aer()
	hidden.AllowHosts()
	cqe, err := h.admin.await(aer)
	if err != nil || nvme.AsyncEvent(cqe.Result()) != nvme.EventDiscoveryChanged {
		t.Fatalf("%v, %v", nvme.AsyncEvent(cqe.Result()), err)
	}
	if again, got := names(); again.Generation == head.Generation || len(got) != 5 {
		t.Errorf("%+v %q", again, got)
	}
}

func (h *host) aer() uint16 {
	var c nvme.Command
	c.FillAsyncEventRequest()
	return h.admin.send(c, nil)
}

func TestFlowControlOff(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem(target.NamespaceConfig{Size: 1 << 20})
	h := connectHost(t, b.addr, subNQN, 0, 0, 0)
	cqe := h.admin.do(func(c *nvme.Command) { c.FillPropertyGet(nvme.PropertyCSTS) })
	if cqe.SQHD() == 0 {
		t.Error("the head stands still with flow control on")
	}
	q, err := dial(t, b.addr, 1, 32)
	if err != nil {
		t.Fatal(err)
	}
	id, _ := nvme.HostIDOf(hostNQN)
	p, sgl := q.data(0, nvme.ConnectDataSize)
	copy(p, nvme.ConnectData{HostID: id, CNTLID: h.id, SubNQN: subNQN, HostNQN: hostNQN}.Append(nil))
	cqe = q.do(func(c *nvme.Command) {
		c.FillConnect(1, 32, nvme.ConnectNoFlowControl, 0)
		c.SetSGL(sgl)
	})
	if cqe.SQHD() != 0xFFFF {
		t.Errorf("flow control was not switched off: head %#x", cqe.SQHD())
	}
}

// TestErrorsSayItOnce: what a user did wrong is named once, and the package leaves its own name to the command.
func TestErrorsSayItOnce(t *testing.T) {
	s := newBed(t, target.Config{}).subsystem()
	empty := filepath.Join(t.TempDir(), "disk")
	for _, c := range []target.NamespaceConfig{
		{File: filepath.Join(empty, "missing")}, // a folder that is not there
		{File: empty},                           // nothing in it, and no size
		{File: "/proc/version", ReadOnly: true}, // it cannot be sought in
	} {
		_, err := s.AddNamespace(c)
		if err == nil || strings.HasPrefix(err.Error(), "target:") || strings.Count(err.Error(), c.File) != 1 {
			t.Errorf("%s: %v", c.File, err)
		}
	}
}
