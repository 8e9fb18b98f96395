package misbehave

import (
	"slices"
	"sync"

	"farblk/host/nvme"
)

// Script is a set of rules with their counts. It can serve several listeners.
type Script struct {
	mu    sync.Mutex
	rules []*rule
}

// Parse reads a script. Errors are a *[ParseError].
func Parse(text string) (*Script, error) {
	rules, err := parse(text)
	if err != nil {
		return nil, err
	}
	return &Script{rules: rules}, nil
}

// Set replaces the rules; all counts begin anew. What old rules have begun, such
// as a delay, still ends.
func (s *Script) Set(text string) error {
	rules, err := parse(text)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = rules
	return nil
}

// Fired returns how often the rule on a line (from 1) has applied.
func (s *Script) Fired(line int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.rules {
		if r.line == line {
			return int(r.fired)
		}
	}
	return 0
}

// request returns what to do about a connection request.
func (s *Script) request(qid uint16) []action {
	return s.match(func(r *rule) bool { return r.event == "cm" && r.passes("qid", uint64(qid)) })
}

// command returns what to do about a command on queue qid.
func (s *Script) command(qid uint16, c *nvme.Command) []action {
	return s.match(func(r *rule) bool { return r.event != "cm" && r.matches(qid, c) })
}

func (s *Script) match(ok func(*rule) bool) (all []action) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.rules {
		if ok(r) && r.counts() {
			all = append(all, r.actions...)
		}
	}
	return all
}

// counts takes note of an event that passed the filters and says whether the
// rule applies to it.
func (r *rule) counts() bool {
	r.seen++
	switch {
	case r.nth != span{} && !r.nth.holds(r.seen),
		r.every != 0 && r.seen%r.every != 0,
		r.times != 0 && r.fired >= r.times:
		return false
	}
	r.fired++
	return true
}

// passes applies the filter of that name, if the rule has it.
func (r *rule) passes(name string, v uint64) bool {
	s, ok := r.ranges[name]
	return !ok || s.holds(v)
}

func (r *rule) matches(qid uint16, c *nvme.Command) bool {
	op := c.Opcode()
	fabrics := op == nvme.OpcodeFabrics
	switch want, ok := events[r.event]; {
	case r.event == "any":
	case r.event == "admin":
		if qid != 0 || fabrics {
			return false
		}
	case r.event == "io":
		if qid == 0 || fabrics {
			return false
		}
	case !ok || op != want.opcode:
		return false
	case fabrics:
		if c.FabricsType() != want.fabrics {
			return false
		}
	case want.admin != (qid == 0):
		return false
	}
	if !r.passes("qid", uint64(qid)) {
		return false
	}
	// A filter on a field holds only for commands that have it.
	for name := range r.ranges {
		var has bool
		var v uint64
		switch name {
		case "qid":
			continue
		case "nsid":
			has, v = !fabrics, uint64(c.NSID())
		case "lba":
			has = qid != 0 && slices.Contains([]nvme.Opcode{nvme.IORead, nvme.IOWrite, nvme.IOWriteZeroes}, op)
			v = c.SLBA()
		case "cns":
			has, v = qid == 0 && op == nvme.AdminIdentify, uint64(c.CNS())
		case "log":
			has, v = qid == 0 && op == nvme.AdminGetLogPage, uint64(c.LogID())
		case "feature":
			has = qid == 0 && (op == nvme.AdminSetFeatures || op == nvme.AdminGetFeatures)
			v = uint64(c.FeatureID())
		}
		if !has || !r.passes(name, v) {
			return false
		}
	}
	return true
}
