package iwarp_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"farblk/transport/verbs/iwarp/internal/ddp"
	"farblk/transport/verbs/iwarp/internal/mpa"
	"farblk/transport/verbs/iwarp/internal/rdmap"
)

// TestCaptures takes whole connections with Linux apart, both directions, and makes the same bytes of the parts.
func TestCaptures(t *testing.T) {
	files, err := filepath.Glob("../../../testdata/iwarp/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	for _, name := range files {
		t.Run(filepath.Base(name), func(t *testing.T) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			var active, passive []byte
			for line := range strings.Lines(string(text)) {
				b, err := hex.DecodeString(strings.TrimSpace(line[2:]))
				if err != nil {
					t.Fatal(err)
				}
				if line[0] == '>' {
					active = append(active, b...)
				} else {
					passive = append(passive, b...)
				}
			}
			request, active := captured(t, active, mpa.Request)
			reply, passive := captured(t, passive, mpa.Reply)
			o, err := mpa.Conclude(request, reply, mpa.Local{IRD: request.Enhanced.IRD, ORD: request.Enhanced.ORD, MaxIRD: maxReads})
			if err != nil {
				t.Fatal(err)
			}
			seen := map[rdmap.Opcode]int{}
			capturedFPDUs(t, active, o.CRC, seen)
			capturedFPDUs(t, passive, o.CRC, seen)
			if !strings.Contains(name, "mpa1") && (seen[rdmap.Send] == 0 || seen[rdmap.ReadRequest] != 1 || seen[rdmap.ReadResponse] != 1 || seen[rdmap.Write] == 0) {
				t.Errorf("messages seen: %v", seen)
			}
		})
	}
}

const maxReads = 128

func captured(t *testing.T, b []byte, k mpa.Kind) (mpa.Frame, []byte) {
	t.Helper()
	n, err := mpa.Length(b, k)
	if err != nil {
		t.Fatal(err)
	}
	f, err := mpa.Parse(b[:n], k)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := f.Append(nil); err != nil || !bytes.Equal(again, b[:n]) {
		t.Errorf("%x became %x, %v", b[:n], again, err)
	}
	return f, b[n:]
}

func capturedFPDUs(t *testing.T, b []byte, crc bool, seen map[rdmap.Opcode]int) {
	t.Helper()
	for len(b) > 0 {
		ulpdu := int(binary.BigEndian.Uint16(b))
		f := b[:mpa.Size(ulpdu)]
		b = b[len(f):]
		h, ok := ddp.Parse(f[mpa.LengthSize:])
		if !ok {
			t.Fatalf("%x: no DDP header", f)
		}
		payload := f[mpa.LengthSize+h.Size() : mpa.LengthSize+ulpdu]
		version, op := rdmap.ParseControl(h.ULP)
		if h.Version != ddp.Version || version != rdmap.Version {
			t.Errorf("versions %d and %d", h.Version, version)
		}
		seen[op]++
		again := h.Append(binary.BigEndian.AppendUint16(nil, uint16(ulpdu)))
		if op == rdmap.ReadRequest {
			r, ok := rdmap.ParseRead(payload)
			if !ok {
				t.Fatalf("%x: no Read Request", payload)
			}
			again = r.Append(again)
		} else {
			again = append(again, payload...)
		}
		again = mpa.AppendTrailer(again, ulpdu, mpa.Sum(0, again), crc)
		if !bytes.Equal(again, f) {
			t.Errorf("%x became %x", f, again)
		}
	}
}
