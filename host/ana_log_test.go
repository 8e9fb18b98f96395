package host

import (
	"encoding/binary"
	"errors"
	"testing"

	"farblk/host/nvme"
)

// anaLogOf has groups of so many namespaces each.
func anaLogOf(groups, namespaces int) nvme.ANALog {
	log := nvme.ANALog{ChangeCount: 7}
	for i := range groups {
		g := nvme.ANAGroup{ID: uint32(i + 1), ChangeCount: uint64(i), State: nvme.ANAOptimized}
		for j := range namespaces {
			g.NSIDs = append(g.NSIDs, uint32(i*namespaces+j+1))
		}
		log.Groups = append(log.Groups, g)
	}
	return log
}

func TestReadANALog(t *testing.T) {
	lost := errors.New("lost")
	// What a target makes of the offset of a further piece.
	heeded := func(page []byte, off uint64, buf []byte) error {
		for i := range buf {
			buf[i] = 0xEE // after the end there can be anything
		}
		copy(buf, page[min(off, uint64(len(page))):])
		return nil
	}
	ignored := func(page []byte, _ uint64, buf []byte) error { return heeded(page, 0, buf) }
	refused := func(page []byte, off uint64, buf []byte) error {
		if off > 0 {
			return &nvme.StatusError{Status: nvme.StatusInvalidField.WithDNR()}
		}
		return heeded(page, 0, buf)
	}
	breaks := func(page []byte, off uint64, buf []byte) error {
		if off > 0 || len(buf) > 4096 {
			return lost
		}
		return heeded(page, 0, buf)
	}
	// A page with a count that is not true.
	groups := func(n uint16) []byte {
		b := anaLogOf(2, 1).Append(nil)
		binary.LittleEndian.PutUint16(b[8:], n)
		return b
	}
	namespaces := anaLogOf(2, 1).Append(nil)
	binary.LittleEndian.PutUint32(namespaces[16+4:], 1<<32-1)

	for name, x := range map[string]struct {
		page  []byte
		most  int
		get   func(page []byte, off uint64, buf []byte) error
		reads int
		want  nvme.ANALog
		miss  int
		fails bool
		err   error
	}{
		"none":                    {page: anaLogOf(0, 0).Append(nil), get: ignored, reads: 1, want: anaLogOf(0, 0)},
		"one":                     {page: anaLogOf(1, 3).Append(nil), get: ignored, reads: 1, want: anaLogOf(1, 3)},
		"as many as fit":          {page: anaLogOf(127, 0).Append(nil), most: 4096, get: refused, reads: 1, want: anaLogOf(127, 0)},
		"again, larger":           {page: anaLogOf(128, 8).Append(nil), get: ignored, reads: 2, want: anaLogOf(128, 8)},
		"again, twice":            {page: anaLogOf(20, 1000).Append(nil), get: refused, reads: 4, want: anaLogOf(20, 1000)},
		"pieces":                  {page: anaLogOf(9, 500).Append(nil), most: 4096, get: heeded, reads: 5, want: anaLogOf(9, 500)},
		"pieces, offset ignored":  {page: anaLogOf(128, 0).Append(nil), most: 4096, get: ignored, reads: 2, want: anaLogOf(127, 0), miss: 1},
		"pieces, offset refused":  {page: anaLogOf(500, 0).Append(nil), most: 8192, get: refused, reads: 3, want: anaLogOf(255, 0), miss: 245},
		"connection lost":         {page: anaLogOf(128, 8).Append(nil), get: breaks, reads: 2, err: lost, fails: true},
		"lost before a piece":     {page: anaLogOf(128, 8).Append(nil), most: 4096, get: breaks, reads: 2, err: lost, fails: true},
		"untrue groups":           {page: groups(65535), get: heeded, reads: 1, fails: true},
		"untrue groups, a little": {page: groups(200), most: 4096, get: refused, reads: 1, fails: true},
		"untrue namespaces":       {page: namespaces, get: heeded, reads: 1, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			if x.most == 0 {
				x.most = 1 << 30
			}
			reads := 0
			log, miss, err := ReadANALog(x.most, func(off uint64, buf []byte) error {
				if reads++; len(buf) > x.most || len(buf) > maxANALog || len(buf)%4 != 0 || off%4 != 0 {
					t.Fatal(off, len(buf))
				}
				return x.get(x.page, off, buf)
			})
			if reads != x.reads || (err != nil) != x.fails || x.err != nil && !errors.Is(err, x.err) {
				t.Fatal(reads, "reads:", err)
			}
			if err != nil {
				return
			}
			if miss != x.miss || string(log.Append(nil)) != string(x.want.Append(nil)) {
				t.Errorf("%d groups, %d missing: %+v", len(log.Groups), miss, log)
			}
		})
	}
}

// A log that says it is a little longer each time it is read ends, too.
func TestReadANALogThatGrows(t *testing.T) {
	for _, most := range []int{4096, maxANALog} {
		reads := 0
		_, _, err := ReadANALog(most, func(off uint64, buf []byte) error {
			reads++
			for i := range buf {
				buf[i] = 0xFF
			}
			if off == 0 {
				clear(buf[:48])
				buf[8] = 1
				binary.LittleEndian.PutUint32(buf[16+4:], uint32(len(buf)/4-11))
			}
			return nil
		})
		if reads > 300 || most == maxANALog && err == nil {
			t.Error(reads, "reads:", err)
		}
	}
}
