package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"farblk/blockdev/nbd"
	"farblk/cmd/internal/session"
	"farblk/host"
)

// nbdKernel is a kernel block device /dev/nbdN for each namespace.
type nbdKernel struct {
	s    session.Surroundings
	want int // index for the first namespace; -1: any free one
	// takeOver are the devices of a session that died, by namespace: they are in use, and their requests wait.
	takeOver map[uint32]string

	mu       sync.Mutex
	attached map[uint32]*nbd.Attachment
}

func newNBDKernel(s session.Surroundings, where string) *nbdKernel {
	e := &nbdKernel{s: s, want: nbdIndex(where), takeOver: map[uint32]string{}, attached: map[uint32]*nbd.Attachment{}}
	for _, l := range s.TakeOver {
		if l.Kind == session.KindNBD {
			e.takeOver[l.NSID] = l.Path
		}
	}
	return e
}

// nbdIndex is N of /dev/nbdN, -1 of "".
func nbdIndex(path string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(path, "/dev/nbd"))
	if err != nil {
		return -1
	}
	return n
}

func (e *nbdKernel) Add(ctx context.Context, n *host.Namespace) (session.Export, error) {
	c := nbd.AttachConfig{Index: e.want, Device: n, RequestTimeout: requestTimeout(e.s.Config), Logger: e.s.Log}
	attach := nbd.Attach
	if path := e.takeOver[n.NSID()]; path != "" {
		c.Index, attach = nbdIndex(path), nbd.Reattach
		delete(e.takeOver, n.NSID())
	} else {
		e.want = -1
	}
	a, err := attach(ctx, c)
	var busy *nbd.BusyError
	if errors.As(err, &busy) {
		return session.Export{}, fmt.Errorf("export nbd: /dev/nbd%d is busy: %w", c.Index, busy)
	}
	if err != nil {
		return session.Export{}, fmt.Errorf("export nbd: %w", err)
	}
	e.mu.Lock()
	e.attached[n.NSID()] = a
	e.mu.Unlock()
	e.s.Record()
	return session.Export{Kind: session.KindNBD, Path: a.Path}, nil
}

// requestTimeout is how long a request can take before the host fails it, and more: the kernel must not give up
// first, because then it sends the request again.
func requestTimeout(c *session.Config) time.Duration {
	const year = 365 * 24 * time.Hour
	if c.CtrlLoss < 0 {
		return year
	}
	loss, io := c.CtrlLoss, c.IOTimeout
	if loss == 0 {
		loss = 10 * time.Minute
	}
	if io == 0 {
		io = 30 * time.Second
	}
	return min(2*(loss+io)+time.Hour, year)
}

func (e *nbdKernel) Remove(ctx context.Context, nsid uint32) {
	e.mu.Lock()
	a := e.attached[nsid]
	e.mu.Unlock()
	if a == nil {
		return
	}
	if err := a.Detach(ctx, true); err != nil {
		e.s.Log.Warn("a removed namespace's device is not gone", "device", a.Path, "error", err)
	}
	e.mu.Lock()
	delete(e.attached, nsid)
	e.mu.Unlock()
}

func (e *nbdKernel) all() []*nbd.Attachment {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []*nbd.Attachment
	for _, a := range e.attached {
		all = append(all, a)
	}
	return all
}

// inUse is patient with short visitors such as udev's probes.
func (e *nbdKernel) InUse() error {
	for _, a := range e.all() {
		holders := a.Holders()
		for end := time.Now().Add(time.Second); len(holders) > 0 && time.Now().Before(end); holders = a.Holders() {
			time.Sleep(50 * time.Millisecond)
		}
		if len(holders) > 0 {
			return &session.BusyError{Detail: (&nbd.BusyError{Index: a.Index, Holders: holders}).Error()}
		}
	}
	return nil
}

func (e *nbdKernel) Leftovers() []session.Leftover {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []session.Leftover
	for id, a := range e.attached {
		all = append(all, session.Leftover{Kind: session.KindNBD, Path: a.Path, NSID: id})
	}
	slices.SortFunc(all, func(a, b session.Leftover) int { return int(a.NSID) - int(b.NSID) })
	return all
}

func (e *nbdKernel) Close(ctx context.Context, force bool) error {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for _, a := range e.all() {
		wg.Go(func() {
			err := closeOrForce(ctx, force, a.Detach)
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// detachStale takes a dead session's device from the kernel, if it is still there and farblk's. One that is in use
// stays, unless forced: its requests wait for a session that takes it over.
func detachStale(path string, force bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), exportCloseLimit)
	defer cancel()
	stale, err := nbd.Stale("")
	if err != nil {
		return err
	}
	for _, d := range stale {
		if d.Path != path {
			continue
		}
		err := nbd.DetachIndex(ctx, d.Index, force)
		var busy *nbd.BusyError
		if errors.As(err, &busy) {
			return &session.BusyError{Detail: busy.Error()}
		}
		return err
	}
	return nil
}
