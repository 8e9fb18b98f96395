package rdmacm

import (
	"testing"

	"farblk/transport/verbs"
)

// TestLeastAccess: only what RDMA READs fill is open to the peer's writes, and only over iWARP.
func TestLeastAccess(t *testing.T) {
	const sink = verbs.LocalWrite | verbs.ReadSink
	for _, c := range []struct {
		access verbs.Access
		link   verbs.Link
		more   verbs.Access
	}{
		{0, verbs.LinkIWARP, 0},
		{verbs.LocalWrite | verbs.RemoteRead, verbs.LinkIWARP, 0},
		{sink, verbs.LinkIWARP, verbs.RemoteWrite},
		{sink, verbs.LinkRoCE, 0},
		{sink, verbs.LinkInfiniBand, 0},
		{sink, verbs.LinkUnknown, 0},
	} {
		if got := granted(c.access, c.link); got != c.access|c.more {
			t.Errorf("access %04b over %v: %04b", c.access, c.link, got)
		}
	}
}
