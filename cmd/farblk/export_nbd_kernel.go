package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
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
	attached map[*host.Namespace]*nbd.Attachment
}

func newNBDKernel(s session.Surroundings, where string) *nbdKernel {
	e := &nbdKernel{s: s, want: nbdIndex(where), takeOver: map[uint32]string{}, attached: map[*host.Namespace]*nbd.Attachment{}}
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
	c := nbd.AttachConfig{Index: e.want, Device: n, DeadTimeout: e.s.Config.DeadTimeout(), Logger: e.s.Log}
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
	e.attached[n] = a
	e.mu.Unlock()
	e.s.Record()
	return session.Export{Kind: session.KindNBD, Path: a.Path}, nil
}

func (e *nbdKernel) Has(n *host.Namespace) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.attached[n] != nil
}

func (e *nbdKernel) Remove(ctx context.Context, n *host.Namespace) error {
	return e.detach(ctx, n, true)
}

// detach takes a namespace's device from the kernel. What is still there after an error stays in attached.
func (e *nbdKernel) detach(ctx context.Context, n *host.Namespace, force bool) error {
	e.mu.Lock()
	a := e.attached[n]
	e.mu.Unlock()
	if a == nil {
		return nil
	}
	err := a.Detach(ctx, force)
	var busy *nbd.BusyError
	if errors.As(err, &busy) {
		return &session.BusyError{Detail: busy.Error()}
	}
	if errors.Is(err, context.DeadlineExceeded) && !force {
		return fmt.Errorf("%s has not made durable yet what was written to it: %w", a.Path, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", a.Path, err)
	}
	e.mu.Lock()
	delete(e.attached, n)
	e.mu.Unlock()
	return nil
}

func (e *nbdKernel) all() map[*host.Namespace]*nbd.Attachment {
	e.mu.Lock()
	defer e.mu.Unlock()
	return maps.Clone(e.attached)
}

// InUse is patient with short visitors such as udev's probes.
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
	for n, a := range e.attached {
		all = append(all, session.Leftover{Kind: session.KindNBD, Path: a.Path, NSID: n.NSID()})
	}
	slices.SortFunc(all, func(a, b session.Leftover) int { return strings.Compare(a.Path, b.Path) })
	return all
}

func (e *nbdKernel) Close(ctx context.Context, force bool) error {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for n := range e.all() {
		wg.Go(func() {
			err := e.detach(ctx, n, force)
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

// orphanedDevices are the kernel devices of dead sessions that no session's folder tells of.
func orphanedDevices(entries []session.Entry) (paths []string) {
	if os.Geteuid() != 0 { // nobody else can attach or detach one
		return nil
	}
	stale, _ := nbd.Stale("")
	for _, d := range stale {
		known := func(e session.Entry) bool {
			return slices.ContainsFunc(e.Leftovers(), func(l session.Leftover) bool { return l.Path == d.Path })
		}
		if !slices.ContainsFunc(entries, known) {
			paths = append(paths, d.Path)
		}
	}
	return paths
}
