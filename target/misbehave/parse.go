package misbehave

import (
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"farblk/host/nvme"
)

// rule is one line of a script.
type rule struct {
	line    int
	event   string
	ranges  map[string]span // filters on fields
	nth     span            // zero: no filter
	every   uint64
	times   uint64
	actions []action

	seen, fired uint64 // guarded by Script.mu
}

type span struct{ lo, hi uint64 }

func (s span) holds(v uint64) bool { return s.lo <= v && v <= s.hi }

// action is one thing to do, with what it needs of the argument.
type action struct {
	verb  string
	d     time.Duration
	n     uint64
	bytes []byte
}

// command says which commands an event is.
type command struct {
	admin   bool
	opcode  nvme.Opcode
	fabrics nvme.FabricsType
}

var events = map[string]command{
	"connect":      {opcode: nvme.OpcodeFabrics, fabrics: nvme.FabricsConnect},
	"disconnect":   {opcode: nvme.OpcodeFabrics, fabrics: nvme.FabricsDisconnect},
	"property-get": {opcode: nvme.OpcodeFabrics, fabrics: nvme.FabricsPropertyGet},
	"property-set": {opcode: nvme.OpcodeFabrics, fabrics: nvme.FabricsPropertySet},
	"identify":     {admin: true, opcode: nvme.AdminIdentify},
	"log":          {admin: true, opcode: nvme.AdminGetLogPage},
	"get-features": {admin: true, opcode: nvme.AdminGetFeatures},
	"set-features": {admin: true, opcode: nvme.AdminSetFeatures},
	"aer":          {admin: true, opcode: nvme.AdminAsyncEvent},
	"keepalive":    {admin: true, opcode: nvme.AdminKeepAlive},
	"abort":        {admin: true, opcode: nvme.AdminAbort},
	"read":         {opcode: nvme.IORead},
	"write":        {opcode: nvme.IOWrite},
	"flush":        {opcode: nvme.IOFlush},
	"dsm":          {opcode: nvme.IODatasetManagement},
	"write-zeroes": {opcode: nvme.IOWriteZeroes},
}

var groups = []string{"any", "admin", "io"}

// argument is what an action wants after its name.
type argument uint8

const (
	argNone argument = iota
	argDuration
	argNumber
	argOptional // a number, or the default
	argPatch
)

var arguments = map[string]argument{
	"reject": argNumber, "delay": argDuration, "ignore": argNone, "close": argNone,
	"hold": argDuration, "blackhole": argNone, "reorder": argOptional, "drop": argNone,
	"duplicate": argNone, "status": argNumber, "result": argNumber, "cid": argNumber,
	"unknown-cid": argNone, "stale-cid": argNone, "sqhd": argNumber, "invalidate": argNone,
	"corrupt": argNone, "short": argNone, "overrun": argOptional, "bad-key": argNone,
	"patch": argPatch, "swap-nguid": argNone, "records": argNumber,
}

var defaults = map[string]uint64{"reorder": 1, "overrun": 4096}

// cmVerbs are the actions on a connection request.
var cmVerbs = []string{"reject", "delay", "ignore", "close"}

var filters = []string{"qid", "nsid", "lba", "cns", "log", "feature"}

// ParseError says where a script is wrong.
type ParseError struct {
	Line int
	Word string
	Why  string
}

func (e *ParseError) Error() string {
	if e.Word == "" {
		return fmt.Sprintf("script line %d: %s", e.Line, e.Why)
	}
	return fmt.Sprintf("script line %d, at %q: %s", e.Line, e.Word, e.Why)
}

// parser reads the words of one line.
type parser struct {
	line  int
	words []string
}

func (p *parser) next() string {
	if len(p.words) == 0 {
		return ""
	}
	w := p.words[0]
	p.words = p.words[1:]
	return w
}

func (p *parser) bad(word, why string, a ...any) error {
	return &ParseError{p.line, word, fmt.Sprintf(why, a...)}
}

func parse(text string) ([]*rule, error) {
	var rules []*rule
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		p := &parser{i + 1, strings.Fields(line)}
		if len(p.words) == 0 {
			continue
		}
		r, err := p.rule()
		if err != nil {
			return nil, err
		}
		rules = append(rules, r)
	}
	return rules, nil
}

func (p *parser) rule() (*rule, error) {
	r := &rule{line: p.line, ranges: make(map[string]span)}
	switch w := p.next(); w {
	case "on":
		r.event = p.next()
		if _, ok := events[r.event]; !ok && r.event != "cm" && !slices.Contains(groups, r.event) {
			return nil, p.bad(r.event, "no such event")
		}
	case "after":
		w = p.next()
		n, err := strconv.ParseUint(w, 0, 64)
		if err != nil || n == 0 {
			return nil, p.bad(w, `"after" needs a number of commands`)
		}
		r.event, r.nth = "any", span{n, n}
	default:
		return nil, p.bad(w, `a rule begins with "on" or "after"`)
	}
	for len(p.words) > 0 && strings.Contains(p.words[0], "=") {
		if err := p.filter(r); err != nil {
			return nil, err
		}
	}
	for {
		a, err := p.action(r)
		if err != nil {
			return nil, err
		}
		r.actions = append(r.actions, a)
		switch w := p.next(); w {
		case "":
			return r, p.check(r)
		case "and":
		default:
			return nil, p.bad(w, `"and" or the end of the line should be here`)
		}
	}
}

// check refuses actions that the event does not have.
func (p *parser) check(r *rule) error {
	for _, a := range r.actions {
		if a.verb == "reject" && r.event == "connect" {
			r.event = "cm"
		}
	}
	for _, a := range r.actions {
		if r.event == "cm" && !slices.Contains(cmVerbs, a.verb) || r.event != "cm" && a.verb == "reject" {
			return p.bad(a.verb, "is no action on %q", r.event)
		}
	}
	if r.event == "cm" {
		for f := range r.ranges {
			if f != "qid" {
				return p.bad(f, "is no filter of a connection request")
			}
		}
	}
	return nil
}

func (p *parser) filter(r *rule) error {
	w := p.next()
	name, value, _ := strings.Cut(w, "=")
	switch {
	case name == "nth" && strings.HasSuffix(value, ".."):
		n, err := strconv.ParseUint(strings.TrimSuffix(value, ".."), 0, 64)
		if err != nil || n == 0 {
			return p.bad(w, "should be nth=N..")
		}
		r.nth = span{n, math.MaxUint64}
		return nil
	case name == "nth" || name == "every" || name == "times":
		n, err := strconv.ParseUint(value, 0, 64)
		if err != nil || n == 0 {
			return p.bad(w, "%q needs a number from 1 on", name)
		}
		switch name {
		case "nth":
			r.nth = span{n, n}
		case "every":
			r.every = n
		case "times":
			r.times = n
		}
		return nil
	case !slices.Contains(filters, name):
		return p.bad(w, "no such filter")
	}
	lo, hi, isRange := strings.Cut(value, "-")
	if !isRange {
		hi = lo
	}
	var s span
	var err1, err2 error
	s.lo, err1 = strconv.ParseUint(lo, 0, 64)
	s.hi, err2 = strconv.ParseUint(hi, 0, 64)
	if err1 != nil || err2 != nil || s.lo > s.hi {
		return p.bad(w, "should be %s=N or %s=A-B", name, name)
	}
	r.ranges[name] = s
	return nil
}

func (p *parser) action(r *rule) (a action, err error) {
	a.verb = p.next()
	kind, ok := arguments[a.verb]
	if !ok {
		if a.verb == "" {
			return a, p.bad("", "an action is missing")
		}
		return a, p.bad(a.verb, "no such action")
	}
	switch kind {
	case argNone:
	case argDuration:
		w := p.next()
		if a.d, err = time.ParseDuration(w); err != nil || a.d < 0 {
			return a, p.bad(w, "%q needs a duration, such as 300ms", a.verb)
		}
	case argOptional:
		a.n = defaults[a.verb]
		if len(p.words) == 0 || p.words[0] == "and" {
			break
		}
		fallthrough
	case argNumber:
		w := p.next()
		if a.n, err = strconv.ParseUint(w, 0, 64); err != nil {
			return a, p.bad(w, "%q needs a number", a.verb)
		}
		if a.verb == "status" && len(p.words) > 0 && p.words[0] == "dnr" {
			p.next()
			a.n |= uint64(nvme.StatusDNR)
		}
	case argPatch:
		w := p.next()
		off, value, _ := strings.Cut(w, "=")
		a.n, err = strconv.ParseUint(off, 0, 32)
		if err == nil {
			a.bytes, err = hex.DecodeString(value)
		}
		if err != nil || len(a.bytes) == 0 {
			return a, p.bad(w, `"patch" needs OFFSET=HEX, such as 104=00ff`)
		}
	}
	return a, nil
}
