package nvme

import (
	"bytes"
	"errors"
	"reflect"
	"testing"
)

// codec is one variable or fixed structure with both directions, so that all of
// them meet the same tests.
type codec struct {
	name   string
	min    int // shortest input that parses
	parse  func([]byte) (any, error)
	encode func(any) []byte
}

type appender interface{ Append([]byte) []byte }

func of[T appender](name string, min int, parse func([]byte) (T, error)) codec {
	return codec{
		name, min,
		func(b []byte) (any, error) { return parse(b) },
		func(v any) []byte { return v.(T).Append(nil) },
	}
}

type nsList []uint32

func (l nsList) Append(b []byte) []byte { return AppendNamespaceList(b, l) }

type errorLog []ErrorLogEntry

func (l errorLog) Append(b []byte) []byte {
	for _, e := range l {
		b = e.Append(b)
	}
	return b
}

var codecs = []codec{
	of("ConnectData", ConnectDataSize, ParseConnectData),
	of("SGL", 16, ParseSGL),
	of("Range", RangeSize, ParseRange),
	of("IdentifyController", IdentifySize, ParseIdentifyController),
	of("IdentifyNamespace", IdentifySize, ParseIdentifyNamespace),
	of("IndependentNamespace", IdentifySize, ParseIndependentNamespace),
	of("NVMController", IdentifySize, ParseNVMController),
	of("NVMNamespace", IdentifySize, ParseNVMNamespace),
	of("NamespaceIDs", IdentifySize, ParseNamespaceIDs),
	of("NamespaceList", IdentifySize, func(b []byte) (nsList, error) {
		l, err := ParseNamespaceList(b, 0)
		return l, err
	}),
	of("ChangedNamespaces", IdentifySize, ParseChangedNamespaces),
	of("SMARTLog", LogSMARTSize, ParseSMARTLog),
	of("ErrorLog", 0, func(b []byte) (errorLog, error) { return ParseErrorLog(b), nil }),
	of("FirmwareLog", LogFirmwareSize, ParseFirmwareLog),
	of("ANALog", LogANAHeaderSize, ParseANALog),
	of("EffectsLog", LogEffectsSize, ParseEffectsLog),
	of("SupportedLogs", LogSupportedSize, ParseSupportedLogs),
	of("DiscoveryHeader", DiscoveryHeaderSize, ParseDiscoveryHeader),
	of("DiscoveryEntry", DiscoveryEntrySize, ParseDiscoveryEntry),
	of("CMRequest", 10, ParseCMRequest),
	of("CMAccept", 4, ParseCMAccept),
	of("CMReject", CMRejectSize, func(b []byte) (RejectReason, error) {
		r, ok := ParseRejectReason(b)
		if !ok {
			return 0, errors.New("no reason")
		}
		return r, nil
	}),
}

// pattern fills b with bytes that differ from their neighbours.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + 1)
	}
	return b
}

// roundTrip checks that what a decoder understood survives encoding.
func roundTrip(t *testing.T, c codec, b []byte) {
	t.Helper()
	v, err := c.parse(b)
	if err != nil {
		return
	}
	again, err := c.parse(c.encode(v))
	if err != nil {
		t.Fatalf("%s: parsing what it encoded: %v", c.name, err)
	}
	if !reflect.DeepEqual(v, again) {
		t.Fatalf("%s: %+v became %+v", c.name, v, again)
	}
}

func TestTruncatedPrefixes(t *testing.T) {
	for _, c := range codecs {
		full := make([]byte, max(c.min, 4096))
		if c.name == "CMReject" {
			full[2] = 1
		}
		for n := range c.min {
			if _, err := c.parse(full[:n:n]); err == nil {
				t.Errorf("%s: %d bytes of %d parse", c.name, n, c.min)
			}
		}
		if _, err := c.parse(full[:c.min:c.min]); err != nil {
			t.Errorf("%s: %d bytes: %v", c.name, c.min, err)
		}
	}
}

func TestRoundTripPattern(t *testing.T) {
	for _, c := range codecs {
		roundTrip(t, c, pattern(4096))
	}
	// The fixed structures with no reserved bytes come back as they were.
	for _, c := range codecs {
		switch c.name {
		case "SGL", "Range", "EffectsLog", "SupportedLogs":
			b := pattern(4096)
			b[15] = byte(SGLKeyed)
			v, err := c.parse(b)
			if err != nil {
				t.Fatal(c.name, err)
			}
			out := c.encode(v)
			n := len(out)
			if c.name == "EffectsLog" {
				n = 2048
			}
			if !bytes.Equal(out[:n], b[:n]) {
				t.Errorf("%s: bytes changed", c.name)
			}
		}
	}
}

func FuzzDecoders(f *testing.F) {
	for i := range codecs {
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), pattern(4096))
		f.Add(uint8(i), make([]byte, 4096))
	}
	f.Fuzz(func(t *testing.T, which uint8, b []byte) {
		c := codecs[int(which)%len(codecs)]
		roundTrip(t, c, b)
		// Fuzzers rarely grow an input to its full size: pad it as well.
		if len(b) < 4096 {
			roundTrip(t, c, append(b[:len(b):len(b)], make([]byte, 4096-len(b))...))
		}
	})
}

// FuzzCommand checks that setting every field to what was read changes nothing.
func FuzzCommand(f *testing.F) {
	f.Add(pattern(CommandSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < CommandSize {
			return
		}
		c := (*Command)(b)
		var d Command
		d.SetOpcode(c.Opcode())
		d.SetFlags(c.Flags())
		d.SetCID(c.CID())
		d.SetNSID(c.NSID())
		for i := 2; i < 6; i++ {
			d.SetDW(i, c.DW(i))
		}
		for i := 10; i < 16; i++ {
			d.SetDW(i, c.DW(i))
		}
		d.SetSGL(c.SGL())
		if !c.SGL().Type.keyed() {
			copy(d[36:39], c[36:39]) // reserved in an unkeyed descriptor
		}
		if d != *c {
			t.Fatalf("%x became %x", *c, d)
		}
	})
}

// FuzzCompletion does the same for completions, whose phase tag is not kept.
func FuzzCompletion(f *testing.F) {
	f.Add(pattern(CompletionSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < CompletionSize {
			return
		}
		c := (*Completion)(b)
		var d Completion
		d.Fill(c.Result64(), c.SQHD(), c.SQID(), c.CID(), c.Status())
		c[14] &^= 1
		if d != *c {
			t.Fatalf("%x became %x", *c, d)
		}
	})
}

func FuzzNQN(f *testing.F) {
	f.Add(DiscoveryNQN)
	f.Add("nqn.t")
	f.Add(HostNQN(UUID{1, 2, 3}))
	f.Fuzz(func(t *testing.T, s string) {
		if ValidateNQN(s) != nil {
			return
		}
		d, err := ParseConnectData(ConnectData{SubNQN: s}.Append(nil))
		if err != nil || d.SubNQN != s {
			t.Fatalf("%q became %q, %v", s, d.SubNQN, err)
		}
	})
}
