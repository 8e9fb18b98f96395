package host

import (
	"cmp"
	"context"
	"slices"
	"time"

	"farblk/host/nvme"
)

// When a namespace, or the controller, does not answer as it should to a look at the namespaces, it is looked at again
// after a pause that doubles each time, up to a limit, until all is well or the association ends.
const (
	firstLookPause = 100 * time.Millisecond
	lastLookPause  = time.Minute
	lastPausedLook = 5 * time.Second // the limit while I/O waits for it
	// maxLookPatience is how long Connect waits in all for namespaces that may be well in a moment.
	maxLookPatience = time.Second
)

// lookPatiently is look, but at the first connect it gives a namespace some time to get ready, which it takes from
// patience. Later one that is known is paused, see takeSick, and keeps nobody else waiting.
func (c *Controller) lookPatiently(ctx context.Context, a *association, nsid uint32, patience *time.Duration) (*found, error) {
	patient := c.State() == StateConnecting
	for pause := firstLookPause; ; pause *= 2 {
		f, err := a.look(ctx, nsid)
		if err != nil || f == nil || f.err == nil || !patient || *patience < pause {
			return f, err
		}
		if s := statusOf(f.err); s == 0 || s.DNR() {
			return f, nil
		}
		*patience -= pause
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// lookAgain has the namespaces looked at again, later.
func (a *association) lookAgain() {
	select {
	case a.unwell <- struct{}{}:
	default:
	}
}

// rescan looks at all namespaces, and again later if that fails. It looks at all, whatever the log of changed ones says:
// that may have overflowed, and what it names may have changed again. But only reading it arms the event again.
func (c *Controller) rescan(ctx context.Context, a *association) (err error) {
	if a.id.OAES&nvme.EventsNamespace != 0 {
		err = a.readLog(ctx, nvme.LogChangedNamespaces, nvme.AllNamespaces, 0, make([]byte, nvme.IdentifySize), false)
	}
	c.scanning.Lock()
	defer c.scanning.Unlock()
	if err = cmp.Or(err, c.scan(ctx, a)); err != nil {
		a.lookAgain()
	}
	return err
}

// rescans does what lookAgain asks for, as long as the association lives.
func (c *Controller) rescans(a *association) {
	for pause := firstLookPause; ; {
		select {
		case <-a.unwell:
		case <-a.stop:
			return
		}
		select {
		case <-time.After(pause):
		case <-a.stop:
			return
		}
		_ = c.rescan(a.ctx, a) // then it asks again
		limit := lastLookPause
		if slices.ContainsFunc(c.Namespaces(), func(n *Namespace) bool { return n.geometry.Load().paused != nil }) {
			limit = lastPausedLook
		}
		if pause = min(2*pause, limit); len(a.unwell) == 0 {
			pause = firstLookPause
		}
	}
}
