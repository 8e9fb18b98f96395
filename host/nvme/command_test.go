package nvme

import (
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

// TestCommandBytes checks constructors against entries written out by hand from
// the figures of the specification.
func TestCommandBytes(t *testing.T) {
	var c Command
	for _, tt := range []struct {
		name string
		fill func()
		want map[int]string // bytes that are not zero, by offset
	}{
		{
			"read", func() { c.FillRead(0x01020304, 0x1122334455667788, 8) },
			map[int]string{0: "0240", 4: "04030201", 39: "40", 40: "8877665544332211", 48: "07"},
		},
		{"read of 65536 blocks", func() { c.FillRead(1, 0, MaxBlocks) }, map[int]string{0: "0240", 4: "01", 39: "40", 48: "ffff"}},
		{"write fua", func() { c.FillWrite(1, 5, 1, true) }, map[int]string{0: "0140", 4: "01", 39: "40", 40: "05", 51: "40"}},
		{"write zeroes", func() { c.FillWriteZeroes(1, 5, 2, true, true) }, map[int]string{0: "0840", 4: "01", 39: "40", 40: "05", 48: "01", 51: "42"}},
		{"flush", func() { c.FillFlush(AllNamespaces) }, map[int]string{0: "0040", 4: "ffffffff", 39: "40"}},
		{"deallocate", func() { c.FillDatasetManagement(2, 256) }, map[int]string{0: "0940", 4: "02", 39: "40", 40: "ff", 44: "04"}},
		{"identify", func() { c.FillIdentify(CNSController, 0, 0x0102) }, map[int]string{0: "0640", 39: "40", 40: "01", 42: "0201"}},
		{
			"log", func() { c.FillGetLogPage(LogDiscovery, 0, 0x0102030405060708, 1<<20, true) },
			map[int]string{0: "0240", 39: "40", 40: "7080ffff", 44: "0300", 48: "0807060504030201"},
		},
		{
			"set queues", func() { c.FillSetFeatures(FeatureNumberOfQueues, 0, uint32(MakeQueueCount(4))) },
			map[int]string{0: "0940", 39: "40", 40: "07", 44: "03000300"},
		},
		{"get kato", func() { c.FillGetFeatures(FeatureKeepAlive, 0) }, map[int]string{0: "0a40", 39: "40", 40: "0f"}},
		{"aer", func() { c.FillAsyncEventRequest() }, map[int]string{0: "0c40", 39: "40"}},
		{"keep alive", func() { c.FillKeepAlive() }, map[int]string{0: "1840", 39: "40"}},
		{"abort", func() { c.FillAbort(3, 0x1234) }, map[int]string{0: "0840", 39: "40", 40: "03003412"}},
		{
			"connect", func() { c.FillConnect(2, 128, ConnectNoFlowControl, 5000) },
			map[int]string{0: "7f40", 4: "01", 39: "40", 42: "02007f0004", 48: "8813"},
		},
		{"get CAP", func() { c.FillPropertyGet(PropertyCAP) }, map[int]string{0: "7f40", 4: "04", 39: "40", 40: "01"}},
		{
			"set CC", func() { c.FillPropertySet(PropertyCC, uint64(EnableConfiguration)) },
			map[int]string{0: "7f40", 39: "40", 44: "14", 48: "010046"},
		},
		{"disconnect", func() { c.FillDisconnect() }, map[int]string{0: "7f40", 4: "08", 39: "40"}},
	} {
		for i := range c {
			c[i] = 0xAA // constructors must clear what was there
		}
		tt.fill()
		var want Command
		for off, s := range tt.want {
			b, err := hex.DecodeString(s)
			if err != nil {
				t.Fatal(err)
			}
			copy(want[off:], b)
		}
		if c != want {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, c, want)
		}
	}
}

func TestSGLBytes(t *testing.T) {
	for _, tt := range []struct {
		sgl  SGL
		want string
	}{
		{KeyedSGL(0x1122334455667788, 0x030201, 0xDDCCBBAA), "8877665544332211010203aabbccdd40"},
		{SGL{SGLKeyedInvalidate, 1, 2, 3}, "0100000000000000020000030000004f"},
		{InCapsuleSGL(0x01000000), "00000000000000000000000100000001"},
	} {
		if got := hex.EncodeToString(tt.sgl.Append(nil)); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.sgl, got, tt.want)
		}
	}
}

func TestCaseH28InCapsuleOffset(t *testing.T) {
	for _, tt := range []struct {
		sgl SGL
		ok  bool
	}{
		{InCapsuleSGL(4096), true},
		{InCapsuleSGL(4097), false},
		{SGL{Type: SGLOffset, Address: 1, Length: 1}, false},
		{SGL{Type: SGLOffset, Address: 1 << 63, Length: 0xFFFFFFFF}, false},
	} {
		if err := tt.sgl.CheckInCapsule(4096); (err == nil) != tt.ok {
			t.Errorf("%v: %v", tt.sgl, err)
		}
	}
}

func TestLogLength(t *testing.T) {
	var c Command
	for _, n := range []uint32{4, 4096, 1 << 18, 1<<18 + 4, 1 << 30} {
		c.FillGetLogPage(LogANA, 0, 0, n, false)
		if got := c.LogLength(); got != uint64(n) {
			t.Errorf("length %d became %d", n, got)
		}
	}
}

func TestCaseH05ZeroBasedQueueSize(t *testing.T) {
	var c Command
	c.FillConnect(0, 32, 0, 0)
	if got := c.ConnectSQSize(); got != 31 {
		t.Errorf("depth 32 is SQSIZE %d, want 31", got)
	}
	if got := Capabilities(31).MaxEntries(); got != 32 {
		t.Errorf("MQES 31 is %d entries, want 32", got)
	}
}

func TestCaseH38MQESIsZeroBased(t *testing.T) {
	if got := Capabilities(127).MaxEntries(); got != 128 {
		t.Errorf("MQES 127 is %d entries, want 128", got)
	}
	if got := MakeCapabilities(128, 15*time.Second); got.MaxEntries() != 128 || got.Timeout() != 15*time.Second || got.MinPageSize() != 4096 {
		t.Errorf("CAP %#x", uint64(got))
	}
}

func TestCaseH09QueuesGranted(t *testing.T) {
	if got := QueueCount(62 | 31<<16).Queues(); got != 32 {
		t.Errorf("granted %d queues, want 32", got)
	}
}

func TestStatus(t *testing.T) {
	var c Command
	var cqe Completion
	c.FillConnect(0, 32, 0, 0)
	cqe.Fill(0x10100, 1, 0, 2, StatusConnectInvalidParameters.WithDNR())
	err := CommandError(&c, true, &cqe)
	if !errors.Is(err, StatusConnectInvalidParameters) || errors.Is(err, StatusInvalidField) {
		t.Errorf("errors.Is: %v", err)
	}
	var se *StatusError
	if !errors.As(err, &se) || !se.Status.DNR() || se.Status.Code() != 0x182 || cqe[14] != 0x04 || cqe[15] != 0x83 {
		t.Errorf("status %+v, field %x", se, cqe[14:])
	}
	for _, want := range []string{"Connect", "invalid parameters: subsystem NQN", "do not retry", "0x182"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
	c.FillRead(1, 0, 1)
	cqe.SetStatus(StatusUnrecoveredRead)
	if got := CommandError(&c, false, &cqe).Error(); got != "NVMe Read failed: unrecovered read error (status 0x281)" {
		t.Error(got)
	}
	cqe.SetStatus(0)
	if CommandError(&c, false, &cqe) != nil {
		t.Error("success is an error")
	}
	for s := range StatusCode(0x800) {
		if s.String() == "" {
			t.Errorf("no words for %#x", uint16(s))
		}
	}
}

func TestAsyncEvent(t *testing.T) {
	for _, tt := range []struct {
		raw  uint32
		want AsyncEvent
	}{{0x040002, EventNamespaceChanged}, {0x0C0302, EventANAChanged}, {0x70F002, EventDiscoveryChanged}} {
		if AsyncEvent(tt.raw) != tt.want || tt.want.Type() != EventNotice || tt.want.LogID() != LogID(tt.raw>>16) {
			t.Errorf("%#x: %v", tt.raw, tt.want)
		}
	}
}

func TestNQN(t *testing.T) {
	long := "nqn.2014-08.com.example:" + strings.Repeat("x", MaxNQN)
	for _, tt := range []struct{ nqn, complaint string }{
		{DiscoveryNQN, ""},
		{"nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef", ""},
		{"nqn.2016-06.io.spdk:cnode1", ""},
		{"nqn.2016-06.io.spdk", ""},
		{"nqn.t", ""},
		{long[:MaxNQN], ""},
		{long[:MaxNQN+1], "224 bytes long"},
		{"", "empty"},
		{"iqn.2016-06.io.spdk:x", `begin with "nqn."`},
		{"nqn.", "nothing follows"},
		{"nqn.2016-13.io.spdk:x", "not a month"},
		{"nqn.2016-6.io.spdk:x", "must have the form"},
		{"nqn.2016-06.io spdk:x", "space"},
		{"nqn.2016-06.io.spdk:", "must have the form"},
		{"nqn.2014-08.org.nvmexpress:uuid:0123", "not a UUID"},
		{"nqn.x\xff", "UTF-8"},
	} {
		err := ValidateNQN(tt.nqn)
		if tt.complaint == "" && err != nil || tt.complaint != "" && (err == nil || !strings.Contains(err.Error(), tt.complaint)) {
			t.Errorf("%q: %v, want %q", tt.nqn, err, tt.complaint)
		}
	}
}

func TestCaseH12HostIdentity(t *testing.T) {
	id, err := ParseHostID("01234567-89AB-cdef-0123-456789abcdef\n")
	if err != nil {
		t.Fatal(err)
	}
	if got, ok := HostIDOf(HostNQN(id)); !ok || got != id {
		t.Errorf("%v, %v", got, ok)
	}
	if _, ok := HostIDOf("nqn.2016-06.io.spdk:host"); ok {
		t.Error("a host ID from a name that has none")
	}
	for _, s := range []string{"", "0123", "00000000-0000-0000-0000-000000000000", "01234567-89ab-cdef-0123-456789abcdeg"} {
		if _, err := ParseHostID(s); err == nil {
			t.Errorf("host ID %q accepted", s)
		}
	}
}

func TestCaseH18HugeDiscoveryLog(t *testing.T) {
	b := DiscoveryHeader{Records: 1 << 40}.Append(nil)
	if _, err := ParseDiscoveryHeader(b); err == nil || !strings.Contains(err.Error(), "1099511627776 records") {
		t.Error(err)
	}
}

func TestANALogClaims(t *testing.T) {
	log := ANALog{Groups: []ANAGroup{{ID: 1, State: ANAOptimized, NSIDs: []uint32{1, 2}}}}
	b := log.Append(nil)
	for n := range b {
		if _, err := ParseANALog(b[:n:n]); err == nil {
			t.Errorf("%d of %d bytes parse", n, len(b))
		}
	}
	b[16+4], b[16+7] = 0xFF, 0xFF
	if _, err := ParseANALog(b); err == nil {
		t.Error("a group with 2^32 namespaces parses")
	}
}

func TestNamespaceListMustRise(t *testing.T) {
	if _, err := ParseNamespaceList(AppendNamespaceList(nil, []uint32{1, 2, 2}), 0); err == nil {
		t.Error("repeated ID accepted")
	}
	if _, err := ParseNamespaceList(AppendNamespaceList(nil, []uint32{3}), 3); err == nil {
		t.Error("a list that does not move on accepted")
	}
}

func TestNamespaceSize(t *testing.T) {
	n := IdentifyNamespace{NSZE: 20 << 30, LBAF: [64]LBAFormat{{LBADS: 9}, {LBADS: 12}}, NLBAF: 1}
	if b, ok := n.Bytes(); !ok || b != 10<<40 {
		t.Errorf("%d, %v", b, ok)
	}
	n.FLBAS = 1
	if n.BlockSize() != 4096 {
		t.Error(n.BlockSize())
	}
	n.NSZE = 1 << 60
	if _, ok := n.Bytes(); ok {
		t.Error("a size past 63 bits accepted")
	}
	n.FLBAS = 2 // a format that is not there
	if n.BlockSize() != 0 {
		t.Error("unusable format has a block size")
	}
}

func TestTerminalSafety(t *testing.T) {
	c, err := ParseIdentifyController((&IdentifyController{MN: "disk\x1b[2J\xff\x07"}).Append(nil))
	if err != nil || c.MN != "disk?[2J??" {
		t.Errorf("%q, %v", c.MN, err)
	}
}

func BenchmarkFillRead(b *testing.B) {
	var c Command
	b.ReportAllocs()
	for i := range b.N {
		c.FillRead(1, uint64(i), 8)
		c.SetCID(uint16(i))
		c.SetSGL(KeyedSGL(uint64(i), 4096, 7))
	}
}

func TestNoAllocations(t *testing.T) {
	var c Command
	var cqe Completion
	buf := make([]byte, RangeSize)
	if n := testing.AllocsPerRun(100, func() {
		c.FillWrite(1, 2, 3, true)
		c.SetSGL(InCapsuleSGL(512))
		_ = c.SGL()
		cqe.Fill(0, 1, 2, 3, 0)
		Range{SLBA: 1}.Put(buf)
		_ = CommandError(&c, false, &cqe)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
