package target

import "farblk/transport/verbs"

// Pages of a queue's bounce memory. It must hold at least one transfer of the
// largest size.
const (
	bouncePages      = 2048 // 8 MiB
	adminBouncePages = 512
)

// bounce is a queue's registered memory for data that does not move straight
// between a host and a namespace: files, and the data of other commands. It is
// mapped at its first use, and handed out in runs of pages, the lowest first so
// that what is in use stays in the processor's cache.
type bounce struct {
	dom    *domain
	region region
	taken  []bool // by page
}

// run is a run of pages; the zero value is none.
type run struct{ first, pages int32 }

func (b *bounce) init(d *domain, pages int) {
	b.dom = d
	b.taken = make([]bool, pages)
}

// take returns room for n bytes. ok is false if there is none now; err is that
// of mapping the memory at first.
func (b *bounce) take(n int) (r run, ok bool, err error) {
	if b.region.mem == nil {
		if b.region, err = b.dom.allocate(len(b.taken)*pageSize, verbs.LocalWrite|verbs.ReadSink); err != nil {
			return run{}, false, err
		}
	}
	want := max((n+pageSize-1)/pageSize, 1)
	first := b.find(want)
	if first < 0 {
		return run{}, false, nil
	}
	for i := first; i < first+want; i++ {
		b.taken[i] = true
	}
	return run{int32(first), int32(want)}, true, nil
}

// find returns the first page of want free ones in a row, or -1.
func (b *bounce) find(want int) int {
	free := 0
	for i, taken := range b.taken {
		if taken {
			free = 0
		} else if free++; free == want {
			return i + 1 - want
		}
	}
	return -1
}

// bytes returns the first n bytes of r.
func (b *bounce) bytes(r run, n int) []byte {
	at := int(r.first) * pageSize
	return b.region.mem[at : at+n : at+n]
}

// give takes r back.
func (b *bounce) give(r run) {
	for i := r.first; i < r.first+r.pages; i++ {
		b.taken[i] = false
	}
}

func (b *bounce) free() { b.region.free() }
