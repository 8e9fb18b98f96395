package target

import (
	"bytes"
	"errors"
	"testing"

	"farblk/transport/verbs"
)

var errNoMR = errors.New("no memory can be registered")

// registering is a domain that registers nothing; the function runs meanwhile.
type registering func()

func (registering) NewWindow() (verbs.Window, error) { return nil, verbs.ErrUnsupported }
func (registering) Close() error                     { return nil }

func (f registering) Register([]byte, verbs.Access) (verbs.MR, error) {
	f()
	return nil, errNoMR
}

// TestPinnedBeforeRegistered: pages that a device is about to take are not given back any more, nor after an error, since
// another device may hold them.
func TestPinnedBeforeRegistered(t *testing.T) {
	m, err := newMemory(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	e := m.extents()[0]
	pd := registering(func() {
		if e.give(e.mem) {
			t.Error("pages were given back while a device took them")
		}
	})
	d := &domain{pd: pd, hardware: true, regions: make(map[*extent]verbs.MR)}
	if _, err := d.region(e); !errors.Is(err, errNoMR) {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{1}, len(e.mem))
	copy(e.mem, want)
	if e.give(e.mem) || !bytes.Equal(e.mem, want) {
		t.Error("pages were given back that another device may hold")
	}
	if e.zero(e.mem); !bytes.Equal(e.mem, make([]byte, len(want))) {
		t.Error("not all was cleared")
	}
}
