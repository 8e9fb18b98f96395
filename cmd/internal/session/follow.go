package session

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"farblk/host"
)

// shown is one export of one namespace.
type shown struct {
	way    Exporter
	export Export
}

// follow makes the exports those of the namespaces that there are now. A namespace that cannot be exported is an
// error, but does not keep the others from it. Another namespace under the same number is another one. What ctx has kept
// from being exported is tried again.
func (s *session) follow(ctx context.Context) error {
	var errs []error
	again := map[*host.Namespace]bool{}
	present := s.ctrl.Namespaces()
	for n, list := range s.known() { // first, because names and numbers may be needed again
		if slices.Contains(present, n) {
			continue
		}
		var left []shown // tried again at the next change
		for _, e := range list {
			if err := e.way.Remove(ctx, n); err != nil {
				errs = append(errs, fmt.Errorf("namespace %d, which is gone: %w", n.NSID(), err))
				left = append(left, e)
			}
		}
		s.mu.Lock()
		if len(left) > 0 {
			s.exports[n] = left
		} else {
			delete(s.exports, n)
		}
		s.mu.Unlock()
	}
	for _, n := range present {
		s.mu.Lock()
		list, known := s.exports[n]
		s.mu.Unlock()
		if known && !s.cut[n] {
			continue
		}
		if err := n.Err(); err != nil {
			if known {
				again[n] = true
			}
			errs = append(errs, fmt.Errorf("namespace %d cannot be used: %w", n.NSID(), err))
			continue
		}
		list = slices.Clone(list)
		cut := false
		for _, w := range s.ways {
			if slices.ContainsFunc(list, func(e shown) bool { return e.way == w }) {
				continue
			}
			e, err := w.Add(ctx, n)
			if err != nil {
				cut = cut || ctx.Err() != nil
				errs = append(errs, fmt.Errorf("namespace %d: %w", n.NSID(), err))
				continue
			}
			list = append(list, shown{w, e})
		}
		if cut {
			again[n] = true
		}
		s.mu.Lock()
		s.exports[n] = list
		s.mu.Unlock()
	}
	s.cut = again
	s.record()
	return errors.Join(errs...)
}

// known are the namespaces that were looked at, and their exports: those that are gone among them.
func (s *session) known() map[*host.Namespace][]shown {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.exports)
}

// leftovers are what would stay in the system if this process died now.
func (s *session) leftovers() (all []Leftover) {
	for _, w := range s.ways {
		all = append(all, w.Leftovers()...)
	}
	return all
}

// record writes down what is to be undone if this process dies.
func (s *session) record() {
	all := s.leftovers()
	if s.folder.keep { // not served again yet
		for _, l := range s.config.TakeOver {
			if !slices.Contains(all, l) {
				all = append(all, l)
			}
		}
	}
	if slices.Equal(all, s.recorded) {
		return
	}
	if err := writeJSON(s.folder.file("exports.json"), all); err != nil {
		s.log.Warn("cannot note the exports", "error", err)
		return
	}
	s.recorded = all
}
