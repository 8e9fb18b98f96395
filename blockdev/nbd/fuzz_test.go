package nbd

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Each target asserts that what was parsed is what was sent: the same bytes come out when it is put together again.

func FuzzRequest(f *testing.F) {
	f.Add(appendRequest(nil, request{flags: cmdFlagFUA, command: cmdWrite, cookie: 1, offset: 1 << 40, length: 4096}))
	f.Add(make([]byte, requestSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < requestSize {
			return
		}
		r, ok := parseRequest(b)
		if again := appendRequest(nil, r); ok && !bytes.Equal(again, b[:requestSize]) {
			t.Errorf("% x became % x", b[:requestSize], again)
		}
	})
}

func FuzzInfoRequest(f *testing.F) {
	f.Add(appendInfoRequest(nil, infoRequest{"n1", []uint16{infoName, infoBlockSize}}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, ok := parseInfoRequest(b); ok && !bytes.Equal(appendInfoRequest(nil, r), b) {
			t.Errorf("% x was taken for %+v", b, r)
		}
	})
}

func FuzzMetaRequest(f *testing.F) {
	f.Add(appendMetaRequest(nil, metaRequest{"n1", []string{contextBase, ""}}))
	f.Add([]byte{0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, ok := parseMetaRequest(b); ok && !bytes.Equal(appendMetaRequest(nil, r), b) {
			t.Errorf("% x was taken for %+v", b, r)
		}
	})
}

func FuzzOptionHeader(f *testing.F) {
	f.Add(appendOption(nil, optGo, []byte("abc")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < optionHeaderSize {
			return
		}
		h, ok := parseOptionHeader(b)
		if ok && h.option == optGo && int(h.length) == len(b)-optionHeaderSize && !bytes.Equal(appendOption(nil, h.option, b[optionHeaderSize:]), b) {
			t.Errorf("% x", b)
		}
	})
}

// TestPrefixes gives the parsers every prefix of good data, none of which is good.
func TestPrefixes(t *testing.T) {
	info := infoRequest{"name", []uint16{1, 2, 3}}
	meta := metaRequest{"name", []string{"a:b", "c:"}}
	whole := appendInfoRequest(nil, info)
	if got, ok := parseInfoRequest(whole); !ok || cmp.Diff(info, got, cmp.AllowUnexported(infoRequest{})) != "" {
		t.Errorf("%+v", got)
	}
	for i := range whole {
		if r, ok := parseInfoRequest(whole[:i]); ok {
			t.Errorf("%d bytes gave %+v", i, r)
		}
	}
	whole = appendMetaRequest(nil, meta)
	if got, ok := parseMetaRequest(whole); !ok || cmp.Diff(meta, got, cmp.AllowUnexported(metaRequest{})) != "" {
		t.Errorf("%+v", got)
	}
	for i := range whole {
		if r, ok := parseMetaRequest(whole[:i]); ok {
			t.Errorf("%d bytes gave %+v", i, r)
		}
	}
	for _, b := range [][]byte{append(appendInfoRequest(nil, info), 0), appendInfoRequest(nil, infoRequest{name: string(make([]byte, maxNameLength+1))})} {
		if _, ok := parseInfoRequest(b); ok {
			t.Errorf("%d bytes were taken", len(b))
		}
	}
}
