package host

import (
	"cmp"
	"context"
	"time"

	"farblk/host/nvme"
)

// When a namespace, or the controller, does not answer as it should to a look at the namespaces, it is looked at again
// after a pause that doubles each time, up to a limit, until all is well or the association ends.
const (
	firstLookPause = 100 * time.Millisecond
	lastLookPause  = time.Minute
	// maxLookPatience is how long a scan waits in all for namespaces that are in use and may be well in a moment: as
	// long, I/O to the others waits too.
	maxLookPatience = time.Second
)

// lookPatiently is look, but gives a namespace that is in use, or may be soon, some time to get ready, which it takes
// from patience.
func (c *Controller) lookPatiently(ctx context.Context, a *association, nsid uint32, patience *time.Duration) (*found, error) {
	c.mu.Lock()
	n := c.spaces[nsid]
	c.mu.Unlock()
	patient := c.State() == StateConnecting || n != nil && n.attached() && n.Err() == nil
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
		if pause = min(2*pause, lastLookPause); len(a.unwell) == 0 {
			pause = firstLookPause
		}
	}
}
