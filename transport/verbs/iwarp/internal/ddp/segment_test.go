package ddp

import (
	"bytes"
	"encoding/hex"
	"testing"
)

func TestParse(t *testing.T) {
	for wire, want := range map[string]Header{
		// As Linux sent them: the last segment of an RDMA Write, and an RDMA Read Request.
		"c140ead62f5c3c0fdfd6891fa000":         {Tagged: true, Last: true, Version: 1, ULP: 0x40, STag: 0xead62f5c, TO: 0x3c0fdfd6891fa000},
		"414100000000000000010000000100000000": {Last: true, Version: 1, ULP: 0x41, QN: 1, MSN: 1},
		"024301020304000000020000000500000006": {Version: 2, ULP: 0x43, STag: 0x01020304, QN: 2, MSN: 5, MO: 6},
	} {
		b, err := hex.DecodeString(wire)
		if err != nil {
			t.Fatal(err)
		}
		got, ok := Parse(b)
		if !ok || got != want {
			t.Errorf("%s: %+v, want %+v", wire, got, want)
		}
		for n := range b {
			if _, ok := Parse(b[:n]); ok {
				t.Errorf("%d bytes of %s are accepted", n, wire)
			}
		}
	}
}

func FuzzHeader(f *testing.F) {
	f.Add([]byte{0xc1, 0x40, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12})
	f.Add(make([]byte, UntaggedSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, ok := Parse(b)
		if !ok {
			return
		}
		got := h.Append(nil)
		want := append([]byte(nil), b[:h.Size()]...)
		want[0] &= flagTagged | flagLast | maskVersion
		if !bytes.Equal(got, want) {
			t.Fatalf("%x became %x", want, got)
		}
	})
}

// TestQueue follows RFC 5041 section 5.4: messages and segments in order, or the code that section 7 asks for.
func TestQueue(t *testing.T) {
	var q Queue
	step := func(msn, mo uint32, n int, last bool, want uint8) {
		t.Helper()
		h := Header{MSN: msn, MO: mo}
		code, ok := q.Check(&h)
		if ok != (want == 0) || code != want {
			t.Fatalf("message %d, offset %d: code %d", msn, mo, code)
		}
		if ok {
			q.Placed(n, last)
		}
	}
	step(0, 0, 0, true, UntaggedMSN)
	step(2, 0, 0, true, UntaggedMSN)
	step(1, 1, 0, true, UntaggedMO)
	step(1, 0, 100, false, 0)
	step(1, 0, 100, false, UntaggedMO)
	step(1, 101, 1, false, UntaggedMO)
	step(2, 0, 1, true, UntaggedMSN)
	step(1, 100, 50, true, 0)
	step(1, 150, 1, true, UntaggedMSN)
	step(2, 0, 0, true, 0)
	q = Queue{done: ^uint32(0)} // numbers wrap (section 5.3)
	step(0, 0, 0, true, 0)
	step(1, 0, 0, true, 0)
}
