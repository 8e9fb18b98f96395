package mpa

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Frames as Linux's siw sent them; see testdata/iwarp. The first is the host's, the second an answer to an offer of
// peer-to-peer mode.
const (
	linuxRequest = "4d504120494420526571204672616d6510020024008000000000000020001f00000000000000000000000000000000000000000000000000"
	linuxReply   = "4d504120494420526570204672616d6550020024800080100000200000000000000000000000000000000000000000000000000000000000"
)

func TestParseLinux(t *testing.T) {
	for _, c := range []struct {
		wire string
		want Frame
	}{
		{linuxRequest, Frame{
			Kind: Request, Revision: 2, IsEnhanced: true,
			Enhanced: Enhanced{IRD: 128},
		}},
		{linuxReply, Frame{
			Kind: Reply, Revision: 2, CRC: true, IsEnhanced: true,
			Enhanced: Enhanced{PeerToPeer: true, RTR: RTRWrite, ORD: 16},
		}},
	} {
		b, err := hex.DecodeString(c.wire)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse(b, c.want.Kind)
		if err != nil {
			t.Fatal(err)
		}
		c.want.Private = b[24:]
		if d := cmp.Diff(c.want, got); d != "" {
			t.Error(d)
		}
		for n := range b {
			if _, err := Parse(b[:n], c.want.Kind); !errors.Is(err, ErrShort) {
				t.Errorf("%d bytes of the frame: %v", n, err)
			}
		}
		if _, err := Parse(append(b, 0), c.want.Kind); err == nil {
			t.Error("a byte too many is accepted")
		}
		if _, err := Parse(b, 1-c.want.Kind); !errors.Is(err, ErrKey) {
			t.Error("the other key is accepted")
		}
	}
}

func TestPrivateDataLimit(t *testing.T) {
	f := Frame{Kind: Request, Revision: 2, IsEnhanced: true, Private: make([]byte, MaxPrivate-EnhancedSize)}
	b, err := f.Append(nil)
	if err != nil || len(b) != HeaderSize+MaxPrivate {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	f.Private = make([]byte, MaxPrivate-EnhancedSize+1)
	if _, err := f.Append(nil); err == nil {
		t.Error("too long private data is accepted")
	}
	b[18], b[19] = 2, 1 // 513
	if _, err := Length(b, Request); err == nil || errors.Is(err, ErrShort) {
		t.Errorf("a length of 513: %v", err)
	}
}

func FuzzFrame(f *testing.F) {
	for _, s := range []string{linuxRequest, linuxReply} {
		b, _ := hex.DecodeString(s)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, k := range []Kind{Request, Reply} {
			m, err := Parse(b, k)
			if err != nil {
				continue
			}
			again, err := m.Append(nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := Parse(again, k)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(m, got); d != "" {
				t.Fatal(d)
			}
			// Only reserved bits may get lost.
			b[16] &= flagMarkers | flagCRC | flagReject | flagEnhanced
			if m.Revision < Revision2 {
				b[16] &^= flagEnhanced
			}
			if !bytes.Equal(b, again) {
				t.Fatalf("%x became %x", b, again)
			}
		}
	})
}

func TestFPDUSizes(t *testing.T) {
	for ulpdu := range 70 {
		if n := Size(ulpdu); n%4 != 0 || n < ulpdu+6 || n > ulpdu+9 {
			t.Errorf("ULPDU of %d bytes: FPDU of %d", ulpdu, n)
		}
	}
	for mss := 200; mss < 70_000; mss += 97 {
		n := MaxULPDUFor(mss)
		if n > MaxULPDU || Size(n) > mss || n < MaxULPDU && Size(n+1) <= mss {
			t.Errorf("segment of %d bytes: ULPDU of %d", mss, n)
		}
	}
}

// TestLinuxCRC is an RDMA Write of length 0 and its CRC, which Linux took.
func TestLinuxCRC(t *testing.T) {
	b, _ := hex.DecodeString("000ec140000000000000000000000000a30572ab")
	got := AppendTrailer(append([]byte(nil), b[:16]...), 14, Sum(0, b[:16]), true)
	if !bytes.Equal(got, b) {
		t.Errorf("%x, want %x", got, b)
	}
	if !CheckTrailer(b[16:], Sum(0, b[:16])) {
		t.Error("not accepted")
	}
	for i := range 160 {
		b[i/8] ^= 1 << (i % 8)
		if CheckTrailer(b[16:], Sum(0, b[:16])) {
			t.Errorf("flipped bit %d is accepted", i)
		}
		b[i/8] ^= 1 << (i % 8)
	}
}
