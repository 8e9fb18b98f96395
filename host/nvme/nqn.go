package nvme

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxNQN is the longest NQN in bytes (Base 4.5).
const MaxNQN = 223

// DiscoveryNQN is the well known name of every discovery service.
const DiscoveryNQN = "nqn.2014-08.org.nvmexpress.discovery"

const uuidNQNPrefix = "nqn.2014-08.org.nvmexpress:uuid:"

var datedNQN = regexp.MustCompile(`^nqn\.[0-9]{4}-([0-9]{2})\.[^.:]+(\.[^.:]+)*(:.+)?$`)

// ValidateNQN checks a name (Base 4.5): at most 223 bytes of UTF-8, in the form
//
//	nqn.yyyy-mm.reverse.domain:anything
//	nqn.2014-08.org.nvmexpress:uuid:UUID
//
// A name that begins with "nqn." but not with a date is let through, because
// Linux targets accept and people use such names.
func ValidateNQN(nqn string) error {
	bad := func(format string, a ...any) error {
		show := nqn
		if len(show) > 80 {
			show = show[:80] + "..."
		}
		return fmt.Errorf("NQN %q: %s", show, fmt.Sprintf(format, a...))
	}
	switch {
	case nqn == "":
		return errors.New("the NQN is empty")
	case len(nqn) > MaxNQN:
		return bad("it is %d bytes long, at most %d are allowed", len(nqn), MaxNQN)
	case !utf8.ValidString(nqn):
		return bad("it is not UTF-8 text")
	case strings.ContainsFunc(nqn, func(r rune) bool { return r <= ' ' || r == 0x7F }):
		return bad("it contains a space or a control character")
	case !strings.HasPrefix(nqn, "nqn."):
		return bad(`it must begin with "nqn."`)
	}
	rest := nqn[len("nqn."):]
	if rest == "" {
		return bad(`nothing follows "nqn."`)
	}
	if uuid, ok := strings.CutPrefix(nqn, uuidNQNPrefix); ok {
		if _, err := ParseUUID(uuid); err != nil {
			return bad("%v", err)
		}
		return nil
	}
	if rest[0] < '0' || rest[0] > '9' {
		return nil
	}
	m := datedNQN.FindStringSubmatch(nqn)
	if m == nil {
		return bad("it must have the form nqn.yyyy-mm.reverse.domain:name")
	}
	if month, _ := strconv.Atoi(m[1]); month < 1 || month > 12 {
		return bad("%s is not a month", m[1])
	}
	return nil
}

// HostNQN returns the host NQN that belongs to a host ID.
func HostNQN(id UUID) string { return uuidNQNPrefix + id.String() }

// HostIDOf returns the host ID that a host NQN of the UUID form implies; ok is
// false for other forms.
func HostIDOf(hostNQN string) (id UUID, ok bool) {
	s, found := strings.CutPrefix(hostNQN, uuidNQNPrefix)
	if !found {
		return id, false
	}
	id, err := ParseUUID(s)
	return id, err == nil
}

// ParseHostID parses a host ID, a UUID that is not all zeros.
func ParseHostID(s string) (UUID, error) {
	id, err := ParseUUID(strings.TrimSpace(s))
	if err != nil {
		return id, fmt.Errorf("host ID: %w", err)
	}
	if id.IsZero() {
		return id, errors.New("host ID: all zeros identifies no host")
	}
	return id, nil
}
