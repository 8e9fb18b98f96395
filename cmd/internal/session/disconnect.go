package session

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"farblk/host"
)

// The parts of a disconnect, each bounded; together they stay below the five seconds that a user waits at most, and a
// process that was told to end has.
const (
	inUseLimit      = time.Second // an exporter's patience with short visitors
	exportLimit     = 2 * time.Second
	beforeForce     = 700 * time.Millisecond // for those who cannot refuse
	forceLimit      = 2500 * time.Millisecond
	shutdownLimit   = 1500 * time.Millisecond
	disconnectLimit = inUseLimit + exportLimit + shutdownLimit
)

// ask is somebody's wish to disconnect.
type ask struct {
	force bool
	reply chan<- error
}

// askDisconnect is called by the control socket: it waits until everything is undone, or is refused.
func (s *session) askDisconnect(ctx context.Context, force bool) error {
	select {
	case <-s.started:
	default:
		s.cancelStart()
	}
	reply := make(chan error, 1)
	select {
	case s.asks <- ask{force, reply}:
	case <-s.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-reply:
		return err
	case <-s.ended:
		return nil
	}
}

// disconnect undoes what start did. Without force it ends nothing that is in use or has not done what was asked of it:
// then it returns why, and what there still is goes on. With force the error is what stays behind.
//
// Exports go first, so that their last writes reach the target, which without force are waited for also while it is
// away: it may come back. With force, and when it has been given up for lost, the controller goes first, so that nobody
// waits for it.
func (s *session) disconnect(force bool) error {
	if !force {
		if err := s.inUse(); err != nil {
			return err
		}
	}
	s.log.Info("disconnecting", "force", force)
	state := s.ctrl.State()
	first := state == host.StateDead || force && state != host.StateLive
	if first {
		s.shutdown()
	}
	limit := exportLimit
	if force {
		limit = forceLimit
	}
	err := s.close(limit, force)
	var busy *BusyError
	if err != nil && !force && !errors.As(err, &busy) {
		switch state {
		case host.StateLive:
		case host.StateDead:
			s.log.Warn("what was not written to the target is lost with it", "error", err)
			force = true
			err = s.close(forceLimit, force)
		default:
			return &UnfinishedError{Detail: fmt.Sprintf("the target is away (%v): what waits for it goes on waiting; --force gives that up (%v)", state, err)}
		}
	}
	if err != nil && !force {
		return err
	}
	if !first {
		s.shutdown()
	}
	return err
}

// end undoes what start did, whatever of it there is: at first in an orderly way, then by force.
func (s *session) end() {
	live := s.ctrl != nil && s.ctrl.State() == host.StateLive
	if !live {
		s.shutdown()
	}
	if err := s.close(beforeForce, false); err != nil {
		s.log.Warn("ending all the same: exports are taken away from their users, and what is not written yet is lost", "reason", err)
		if err := s.close(forceLimit, true); err != nil {
			s.log.Error("an export could not be removed", "error", err)
		}
	}
	if live {
		s.shutdown()
	}
}

// inUse tells which exports are in use, and by whom.
func (s *session) inUse() error {
	for _, w := range s.ways {
		if err := w.InUse(); err != nil {
			return err
		}
	}
	return nil
}

// close ends the exports. Those that cannot be ended in time stay.
func (s *session) close(in time.Duration, force bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), in)
	defer cancel()
	errs := make([]error, len(s.ways))
	var wg sync.WaitGroup
	for i, w := range s.ways {
		wg.Go(func() { errs[i] = w.Close(ctx, force) })
	}
	wg.Wait()
	s.mu.Lock()
	var left []Exporter
	for i, w := range s.ways {
		if errs[i] != nil {
			left = append(left, w)
		}
	}
	s.ways = left
	for n, list := range s.exports {
		s.exports[n] = slices.DeleteFunc(list, func(e shown) bool { return !slices.Contains(left, e.way) || !e.way.Has(n) })
	}
	s.mu.Unlock()
	s.record()
	err := errors.Join(errs...)
	var busy *BusyError
	switch {
	case err == nil || force || errors.As(err, &busy):
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return &UnfinishedError{Detail: fmt.Sprintf("%v: it goes on, so try again later, or give up what is not written yet with --force", err)}
	}
	return &UnfinishedError{Detail: fmt.Sprintf("%v: --force disconnects all the same", err)}
}

func (s *session) shutdown() {
	if s.ctrl == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), shutdownLimit)
	defer cancel()
	if err := s.ctrl.Shutdown(ctx); err != nil {
		s.log.Warn("the controller was not shut down in an orderly way", "error", err)
	}
}

// leave removes the folder, once nothing is left for others to do but what is written down elsewhere.
func (s *session) leave() {
	if len(s.leftovers()) > 0 {
		s.record()
		s.folder.keep = true
	}
	if s.ctrl != nil && !s.folder.keep { // else the folder tells it
		if left := s.ctrl.WritesMayLive(); left > 0 {
			s.log.Warn("the target may still carry out writes: later ones to the same subsystem wait for that", "left", left)
			if err := s.noteWrites(left); err != nil {
				s.log.Error("cannot note that the target may still carry out writes: the folder stays instead", "error", err)
				s.folder.keep = true
			}
		}
	}
	s.folder.Remove()
}

func (s *session) noteWrites(left time.Duration) error {
	d := &StateDir{Path: filepath.Dir(s.folder.Path)}
	unlock, err := lockDir(d.Path, time.Second)
	if err != nil {
		return err
	}
	defer unlock()
	return d.noteWrites(s.config, left)
}
