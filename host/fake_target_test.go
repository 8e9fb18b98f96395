package host

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"farblk/host/nvme"
	"farblk/transport"
)

const (
	testNQN   = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
	subsysNQN = "nqn.2024-01.org.example:disk"
)

var testHostID, _ = nvme.HostIDOf(testNQN)

// fakeTarget is an NVMe subsystem in memory, and what tests make it do.
type fakeTarget struct {
	mu     sync.Mutex
	dials  int
	opened []transport.QueueParams
	log    []string // every command but keep-alives: "admin Identify", "io1 Write 8+8"
	spaces map[uint32]*fakeNamespace
	cntlid uint16
	ctrls  []*fakeController
	// identify and caps may be changed before a connect.
	id     nvme.IdentifyController
	nvm    nvme.NVMController
	caps   nvme.Capabilities
	ios    int // I/O queues granted
	ana    nvme.ANALog
	logs   map[nvme.LogID][]byte
	kato   time.Duration // rounded up to this, if not 0
	onDial func(ctx context.Context) error
	onOpen func(ctx context.Context, p transport.QueueParams) error
	// intercept may answer a command itself (true), or never. It runs without t.mu.
	intercept func(q *fakeQueue, r *transport.Request) bool
	expired   int  // keep-alive timers
	silent    bool // ends without telling
}

type fakeNamespace struct {
	id   nvme.IdentifyNamespace
	ids  nvme.NamespaceIDs
	data []byte
}

// fakeController is one association's controller.
type fakeController struct {
	t    *fakeTarget
	addr transport.Address

	mu     sync.Mutex
	queues []*fakeQueue
	cntlid uint16
	cc     nvme.Configuration
	kato   time.Duration
	timer  *time.Timer
	aer    *transport.Request
	aerQ   *fakeQueue
	events []nvme.AsyncEvent
	ended  bool
}

func newFakeTarget(sizes ...int) *fakeTarget {
	t := &fakeTarget{
		spaces: make(map[uint32]*fakeNamespace),
		caps:   nvme.MakeCapabilities(128, time.Second),
		ios:    64,
		logs:   make(map[nvme.LogID][]byte),
		id: nvme.IdentifyController{
			SN: "S1", MN: "Fake", FR: "1", MDTS: 5, VER: nvme.MakeVersion(2, 0, 0), CNTRLTYPE: nvme.ControllerIO,
			OAES: nvme.EventsNamespace | nvme.EventsANA, KAS: 10, SQES: 0x66, CQES: 0x44, NN: 64, VWC: nvme.VWCPresent,
			ONCS: nvme.ONCSDatasetManagement | nvme.ONCSWriteZeroes, SGLS: nvme.SGLSSupported | nvme.SGLSKeyed | nvme.SGLSInCapsule,
			SubNQN: subsysNQN, IOCCSZ: 4 + 256, IORCSZ: 1,
		},
	}
	for i, s := range sizes {
		t.add(uint32(i+1), s, 9)
	}
	return t
}

func (t *fakeTarget) add(nsid uint32, size int, lbads uint8) *fakeNamespace {
	n := &fakeNamespace{data: make([]byte, size)}
	n.id.NSZE = uint64(size) >> lbads
	n.id.NCAP, n.id.NUSE = n.id.NSZE, n.id.NSZE
	n.id.LBAF[0].LBADS = lbads
	n.id.ANAGRPID = 1
	n.ids.NGUID = nvme.NGUID{1, 15: byte(nsid)}
	n.ids.UUID = nvme.UUID{2, 15: byte(nsid)}
	t.mu.Lock()
	t.spaces[nsid] = n
	t.mu.Unlock()
	return n
}

// change runs f with the target's state locked.
func (t *fakeTarget) change(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
}

// live returns the newest controller.
func (t *fakeTarget) live() *fakeController {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ctrls[len(t.ctrls)-1]
}

// takeLog returns the commands since the last call.
func (t *fakeTarget) takeLog() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.log
	t.log = nil
	return l
}

// cut ends the newest association as a broken network does.
func (t *fakeTarget) cut() {
	for _, q := range t.live().allQueues() {
		q.Fail(errCut)
	}
}

func (c *fakeController) allQueues() []*fakeQueue {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.queues)
}

// end is the end of the controller.
func (c *fakeController) end(expired bool) {
	c.mu.Lock()
	was := c.ended
	c.ended = true
	if c.timer != nil {
		c.timer.Stop()
	}
	c.mu.Unlock()
	silent := false
	c.t.change(func() { silent = c.t.silent })
	if expired && !was && !silent {
		c.t.change(func() { c.t.expired++ })
		for _, q := range c.allQueues() {
			q.Fail(fmt.Errorf("keep-alive timer expired"))
		}
	}
}

// event sends an asynchronous event.
func (c *fakeController) event(e nvme.AsyncEvent) {
	c.mu.Lock()
	c.events = append(c.events, e)
	c.mu.Unlock()
	c.sendEvents()
}

func (c *fakeController) sendEvents() {
	c.mu.Lock()
	r, q := c.aer, c.aerQ
	if r == nil || len(c.events) == 0 {
		c.mu.Unlock()
		return
	}
	e := c.events[0]
	c.events, c.aer = c.events[1:], nil
	c.mu.Unlock()
	answer(q, r, uint64(e), 0)
}

func answer(q *fakeQueue, r *transport.Request, result uint64, s nvme.StatusCode) {
	(*nvme.Completion)(&r.Completion).Fill(result, 0, 0, 0, s)
	q.complete(r)
}

func describe(q *fakeQueue, cmd *nvme.Command) string {
	if q.params.ID == 0 {
		s := commandName(cmd)
		switch {
		case cmd.Opcode() == nvme.AdminIdentify:
			s += fmt.Sprintf(" %d/%d", cmd.CNS(), cmd.NSID())
		case cmd.Opcode() == nvme.AdminGetLogPage:
			s += fmt.Sprintf(" %#x", uint8(cmd.LogID()))
		case cmd.Opcode() == nvme.OpcodeFabrics && cmd.FabricsType() != nvme.FabricsConnect:
			s += " " + cmd.PropertyOffset().String()
		}
		return "admin " + s
	}
	s := fmt.Sprintf("io%d %s", q.params.ID, cmd.Opcode().Name(false))
	switch cmd.Opcode() {
	case nvme.IORead, nvme.IOWrite, nvme.IOWriteZeroes:
		s += fmt.Sprintf(" %d+%d", cmd.SLBA(), cmd.Blocks())
		if cmd.FUA() {
			s += " FUA"
		}
	case nvme.IODatasetManagement:
		s += fmt.Sprintf(" %d ranges", cmd.Ranges())
	case nvme.OpcodeFabrics:
		s = fmt.Sprintf("io%d %s", q.params.ID, cmd.FabricsType())
	}
	return s
}

func (c *fakeController) execute(q *fakeQueue, r *transport.Request) {
	cmd := (*nvme.Command)(&r.Command)
	t := c.t
	t.mu.Lock()
	f := t.intercept
	if q.params.ID != 0 || cmd.Opcode() != nvme.AdminKeepAlive {
		t.log = append(t.log, describe(q, cmd))
	}
	t.mu.Unlock()
	if f != nil && f(q, r) {
		return
	}
	c.perform(q, r)
}

// perform does what an ordinary target does.
func (c *fakeController) perform(q *fakeQueue, r *transport.Request) {
	cmd := (*nvme.Command)(&r.Command)
	c.t.mu.Lock()
	var result uint64
	var s nvme.StatusCode
	if q.params.ID == 0 || cmd.Opcode() == nvme.OpcodeFabrics {
		if cmd.Opcode() == nvme.AdminAsyncEvent {
			c.t.mu.Unlock()
			c.mu.Lock()
			c.aer, c.aerQ = r, q
			c.mu.Unlock()
			c.sendEvents()
			return
		}
		result, s = c.adminCommand(cmd, r.Data)
	} else {
		s = c.t.ioCommand(cmd, r.Data)
	}
	c.t.mu.Unlock()
	answer(q, r, result, s)
}

func (c *fakeController) adminCommand(cmd *nvme.Command, data []byte) (uint64, nvme.StatusCode) {
	t := c.t
	switch cmd.Opcode() {
	case nvme.OpcodeFabrics:
		return c.fabrics(cmd, data)
	case nvme.AdminKeepAlive:
		c.mu.Lock()
		if c.timer != nil {
			c.timer.Reset(c.kato)
		}
		c.mu.Unlock()
	case nvme.AdminIdentify:
		return 0, t.identify(c, cmd, data)
	case nvme.AdminSetFeatures:
		if cmd.FeatureID() == nvme.FeatureNumberOfQueues {
			n := min(t.ios, nvme.QueueCount(cmd.DW(11)).Queues())
			return uint64(nvme.MakeQueueCount(n)), 0
		}
	case nvme.AdminGetFeatures:
		if cmd.FeatureID() == nvme.FeatureKeepAlive {
			return uint64(c.kato.Milliseconds()), 0
		}
	case nvme.AdminGetLogPage:
		page := t.logs[cmd.LogID()]
		if cmd.LogID() == nvme.LogANA {
			page = t.ana.Append(nil)
		}
		if off := cmd.LogOffset(); off < uint64(len(page)) {
			copy(data, page[off:])
		}
	default:
		return 0, nvme.StatusInvalidOpcode.WithDNR()
	}
	return 0, 0
}

func (c *fakeController) fabrics(cmd *nvme.Command, data []byte) (uint64, nvme.StatusCode) {
	t := c.t
	switch cmd.FabricsType() {
	case nvme.FabricsConnect:
		d, err := nvme.ParseConnectData(data)
		if err != nil || d.SubNQN != t.id.SubNQN && d.SubNQN != nvme.DiscoveryNQN {
			return 256 | 1<<16, nvme.StatusConnectInvalidParameters.WithDNR()
		}
		if cmd.ConnectQueue() == 0 {
			t.cntlid++
			t.ctrls = append(t.ctrls, c)
			c.cntlid = t.cntlid
			c.kato = time.Duration(cmd.ConnectKATO()) * time.Millisecond
			if c.kato > 0 {
				c.kato = max(c.kato, t.kato)
				c.timer = time.AfterFunc(c.kato, func() { c.end(true) })
			}
		} else if d.CNTLID != c.cntlid {
			return 16 | 1<<16, nvme.StatusConnectInvalidParameters.WithDNR()
		}
		return uint64(c.cntlid), 0
	case nvme.FabricsPropertyGet:
		switch cmd.PropertyOffset() {
		case nvme.PropertyCAP:
			return uint64(t.caps), 0
		case nvme.PropertyVS:
			return uint64(t.id.VER), 0
		case nvme.PropertyCSTS:
			var s nvme.ControllerStatus
			if c.cc.Enabled() {
				s |= nvme.StatusReady
			}
			if c.cc.ShutdownRequested() {
				s |= nvme.StatusShutdownComplete
			}
			return uint64(s), 0
		}
	case nvme.FabricsPropertySet:
		c.cc = nvme.Configuration(cmd.PropertyValue())
		return 0, 0
	}
	return 0, nvme.StatusInvalidField.WithDNR()
}

func (t *fakeTarget) identify(c *fakeController, cmd *nvme.Command, data []byte) nvme.StatusCode {
	n := t.spaces[cmd.NSID()]
	switch cmd.CNS() {
	case nvme.CNSController:
		id := t.id
		id.CNTLID = c.cntlid
		copy(data, id.Append(nil))
	case nvme.CNSCommandSetController:
		copy(data, t.nvm.Append(nil))
	case nvme.CNSActiveNamespaces:
		var ids []uint32
		for id := range t.spaces {
			if id > cmd.NSID() {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
		copy(data, nvme.AppendNamespaceList(nil, ids))
	case nvme.CNSNamespace:
		if n == nil {
			return nvme.StatusInvalidNamespace.WithDNR()
		}
		copy(data, n.id.Append(nil))
	case nvme.CNSNamespaceDescriptors:
		if n == nil {
			return nvme.StatusInvalidNamespace.WithDNR()
		}
		copy(data, n.ids.Append(nil))
	default:
		return nvme.StatusInvalidField.WithDNR()
	}
	return 0
}

func (t *fakeTarget) ioCommand(cmd *nvme.Command, data []byte) nvme.StatusCode {
	n := t.spaces[cmd.NSID()]
	if n == nil {
		return nvme.StatusInvalidNamespace.WithDNR()
	}
	shift := n.id.LBAF[0].LBADS
	part := func(lba uint64, blocks uint64) []byte {
		if lba+blocks > n.id.NSZE {
			return nil
		}
		return n.data[lba<<shift : (lba+blocks)<<shift]
	}
	switch cmd.Opcode() {
	case nvme.IOFlush:
		return 0
	case nvme.IODatasetManagement:
		for i := range cmd.Ranges() {
			r, err := nvme.ParseRange(data[i*nvme.RangeSize:])
			if err != nil {
				return nvme.StatusInvalidField.WithDNR()
			}
			p := part(r.SLBA, uint64(r.Blocks))
			if p == nil {
				return nvme.StatusLBAOutOfRange.WithDNR()
			}
			clear(p)
		}
		return 0
	}
	p := part(cmd.SLBA(), uint64(cmd.Blocks()))
	if p == nil {
		return nvme.StatusLBAOutOfRange.WithDNR()
	}
	switch cmd.Opcode() {
	case nvme.IORead:
		if len(data) != len(p) {
			return nvme.StatusSGLInvalidLength.WithDNR()
		}
		copy(data, p)
	case nvme.IOWrite:
		if len(data) != len(p) {
			return nvme.StatusSGLInvalidLength.WithDNR()
		}
		copy(p, data)
	case nvme.IOWriteZeroes:
		clear(p)
	default:
		return nvme.StatusInvalidOpcode.WithDNR()
	}
	return 0
}

// discoveryLog builds log page 70h.
func discoveryLog(generation uint64, records uint64, entries ...nvme.DiscoveryEntry) []byte {
	b := nvme.DiscoveryHeader{Generation: generation, Records: records}.Append(nil)
	for _, e := range entries {
		b = e.Append(b)
	}
	return b
}
