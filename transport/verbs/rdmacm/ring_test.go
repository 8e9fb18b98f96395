package rdmacm

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"farblk/transport/verbs"
)

// fillRing posts work requests with the IDs from first; "s" in the pattern is a signaled one, "u" is not.
func fillRing(r *ring, first uint64, pattern string) uint64 {
	base := r.posted.Load()
	for i, p := range pattern {
		seq := base + uint64(i)
		*r.at(seq) = slot{result: verbs.Completion{ID: first + uint64(i)}, signaled: p == 's'}
		r.posted.Store(seq + 1)
		if p == 's' {
			r.owed.Store(seq + 1)
		}
	}
	return base
}

func drainRing(r *ring, flush bool) (ids []uint64, flushed int) {
	var c verbs.Completion
	for r.next(&c, flush) {
		ids = append(ids, c.ID)
		if c.Status == verbs.StatusFlushed {
			flushed++
		}
	}
	return ids, flushed
}

func TestRingCountsRoom(t *testing.T) {
	r := newRing(5)
	for lap := range 10 {
		if r.room() != 5 {
			t.Fatalf("lap %d: room for %d", lap, r.room())
		}
		base := fillRing(r, 100, "susus")
		if r.room() != 0 || r.drained() {
			t.Fatalf("lap %d: room for %d, drained %v", lap, r.room(), r.drained())
		}
		for _, i := range []uint64{0, 2, 4} {
			if r.outstanding(base+i) == nil {
				t.Fatalf("lap %d: %d is not outstanding", lap, i)
			}
			r.finish(base + i)
			if r.outstanding(base+i) != nil || r.outstanding(base+5) != nil || r.outstanding(base-1) != nil {
				t.Fatalf("lap %d: finished twice, or before it was posted", lap)
			}
		}
		if ids, _ := drainRing(r, false); !cmp.Equal(ids, []uint64{100, 102, 104}) || !r.drained() {
			t.Fatalf("lap %d: %v", lap, ids)
		}
	}
}

func TestRingRestoresOrder(t *testing.T) {
	r := newRing(8)
	base := fillRing(r, 0, "ssus")
	for _, step := range []struct {
		finish uint64
		want   []uint64
	}{{1, nil}, {3, nil}, {0, []uint64{0, 1, 3}}} {
		r.finish(base + step.finish)
		if ids, _ := drainRing(r, false); !cmp.Equal(ids, step.want) {
			t.Errorf("after %d: %v, want %v", step.finish, ids, step.want)
		}
	}
}

func TestRingFlushes(t *testing.T) {
	r := newRing(8)
	base := fillRing(r, 0, "ususu")
	r.finish(base + 3)
	// 0 and 2 came before a completion; 1 is lost, 4 never completed.
	if ids, flushed := drainRing(r, true); !cmp.Equal(ids, []uint64{1, 3, 4}) || flushed != 2 || r.room() != 8 {
		t.Errorf("%v, %d flushed, room for %d", ids, flushed, r.room())
	}
}
