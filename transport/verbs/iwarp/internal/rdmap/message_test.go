package rdmap

import (
	"bytes"
	"encoding/hex"
	"testing"
)

func FuzzRead(f *testing.F) {
	linux, _ := hex.DecodeString("e086d701ff356e16ef7d600000000400ead62f5c3c0fdfd6891fa000")
	f.Add(linux)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := ParseRead(b)
		if ok != (len(b) == ReadSize) {
			t.Fatalf("%d bytes: %v", len(b), ok)
		}
		if ok && !bytes.Equal(r.Append(nil), b) {
			t.Fatalf("%x became %x", b, r.Append(nil))
		}
	})
}

func FuzzTerminate(f *testing.F) {
	read := make([]byte, ReadSize)
	untagged := append([]byte{0x41, 0x41}, make([]byte, 16)...)
	tagged := append([]byte{0xc1, 0x40}, make([]byte, 12)...)
	for _, t := range []Term{
		{Layer: LayerLLP, Code: 2},
		{Layer: LayerDDP, Type: 1, Code: 1, Length: 1038, Header: tagged},
		{Layer: LayerRDMA, Type: TypeProtection, Code: ProtectionBounds, Length: 46, Header: untagged, Read: read},
	} {
		f.Add(t.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, ok := ParseTerm(b)
		if ok != (len(b) >= terminateSize) {
			t.Fatalf("%d bytes: %v", len(b), ok)
		}
		if !ok {
			return
		}
		_ = m.String()
		again := m.Append(nil)
		if len(again) > MaxTerminate {
			t.Fatalf("%d bytes", len(again))
		}
		got, ok := ParseTerm(again)
		if !ok || got.Layer != m.Layer || got.Type != m.Type || got.Code != m.Code ||
			!bytes.Equal(got.Header, m.Header) || m.Header != nil && (got.Length != m.Length || !bytes.Equal(got.Read, m.Read)) {
			t.Fatalf("%+v became %+v", m, got)
		}
	})
}

// TestTerminatePrefixes cuts a full Terminate at every byte: the error is known from the fourth on, and no header is
// taken from bytes that are not there.
func TestTerminatePrefixes(t *testing.T) {
	m := Term{
		Layer: LayerRDMA, Type: TypeProtection, Code: ProtectionAccess, Length: 46,
		Header: append([]byte{0x41, 0x41}, make([]byte, 16)...), Read: make([]byte, ReadSize),
	}
	b := m.Append(nil)
	if len(b) != MaxTerminate {
		t.Fatalf("%d bytes, want %d", len(b), MaxTerminate)
	}
	for n := range b {
		got, ok := ParseTerm(b[:n])
		if ok != (n >= 4) || got.Read != nil || (got.Header != nil) != (n >= 24) {
			t.Errorf("%d bytes: %+v, %v", n, got, ok)
		}
	}
	if s := m.String(); s != "RDMAP: access rights violation" {
		t.Error(s)
	}
}

func TestControl(t *testing.T) {
	for op := Write; op <= Terminate; op++ {
		if v, got := ParseControl(Control(op)); v != Version || got != op {
			t.Errorf("opcode %d: version %d, opcode %d", op, v, got)
		}
	}
	if Control(Send) != 0x43 { // as Linux sends it
		t.Errorf("%#x", Control(Send))
	}
}
