package misbehave

import (
	"errors"
	"strings"
	"testing"

	"farblk/host/nvme"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ script, want string }{
		{"on raed drop", `script line 1, at "raed": no such event`},
		{"\n# fine\non read nth=0 drop", `script line 3, at "nth=0": "nth" needs a number from 1 on`},
		{"on read", "script line 1: an action is missing"},
		{"on read explode", `script line 1, at "explode": no such action`},
		{"on read delay", `script line 1: "delay" needs a duration, such as 300ms`},
		{"on read delay 5", `script line 1, at "5": "delay" needs a duration`},
		{"on read status bad", `script line 1, at "bad": "status" needs a number`},
		{"on read drop drop", `script line 1, at "drop": "and" or the end`},
		{"on read drop and", "script line 1: an action is missing"},
		{"on read reject 6", `script line 1, at "reject": is no action on "read"`},
		{"on cm corrupt", `script line 1, at "corrupt": is no action on "cm"`},
		{"on cm nsid=1 reject 6", `script line 1, at "nsid": is no filter of a connection request`},
		{"on read qid=5-2 drop", `should be qid=N or qid=A-B`},
		{"on read colour=2 drop", `no such filter`},
		{"on identify patch 5", `"patch" needs OFFSET=HEX`},
		{"after close", `"after" needs a number`},
		{"when read drop", `a rule begins with "on" or "after"`},
	} {
		_, err := Parse(tt.script)
		var pe *ParseError
		if !errors.As(err, &pe) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.script, err, tt.want)
		}
	}
}

// applied runs commands past a script and returns, for each, the verbs that apply.
func applied(s *Script, qid uint16, cmds ...func(*nvme.Command)) string {
	var out []string
	for _, fill := range cmds {
		var c nvme.Command
		fill(&c)
		var verbs []string
		for _, a := range s.command(qid, &c) {
			verbs = append(verbs, a.verb)
		}
		out = append(out, strings.Join(verbs, "+"))
	}
	return strings.Join(out, ",")
}

func TestMatching(t *testing.T) {
	read := func(lba uint64) func(*nvme.Command) { return func(c *nvme.Command) { c.FillRead(1, lba, 1) } }
	write := func(c *nvme.Command) { c.FillWrite(2, 0, 1, false) }
	ka := func(c *nvme.Command) { c.FillKeepAlive() }
	connect := func(c *nvme.Command) { c.FillConnect(1, 32, 0, 0) }
	for _, tt := range []struct {
		script string
		qid    uint16
		cmds   []func(*nvme.Command)
		want   string
	}{
		{"on read nth=2 drop", 1, []func(*nvme.Command){read(0), write, read(0), read(0)}, ",,drop,"},
		{"on read nth=2.. times=2 drop", 1, []func(*nvme.Command){read(0), read(0), read(0), read(0)}, ",drop,drop,"},
		{"on any every=2 drop", 1, []func(*nvme.Command){read(0), write, read(0), write}, ",drop,,drop"},
		{"on read lba=10-20 drop\non io nsid=2 corrupt and delay 1s", 1, []func(*nvme.Command){read(9), read(15), write}, ",drop,corrupt+delay"},
		{"on read drop\non any duplicate", 1, []func(*nvme.Command){read(0), connect}, "drop+duplicate,duplicate"},
		{"on io drop", 1, []func(*nvme.Command){read(0), connect}, "drop,"},
		{"on admin drop", 0, []func(*nvme.Command){ka, connect}, "drop,"},
		{"on keepalive qid=1 drop", 0, []func(*nvme.Command){ka}, ""},
		{"on keepalive drop", 1, []func(*nvme.Command){ka}, ""},
		{"on any log=0x70 drop", 0, []func(*nvme.Command){ka, func(c *nvme.Command) { c.FillGetLogPage(nvme.LogDiscovery, 0, 0, 4, false) }}, ",drop"},
		{"after 3 close", 1, []func(*nvme.Command){read(0), read(0), read(0), read(0)}, ",,close,"},
		{"on connect qid=2 reject 6", 1, []func(*nvme.Command){connect}, ""},
	} {
		s, err := Parse(tt.script)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := applied(s, tt.qid, tt.cmds...); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.script, got, tt.want)
		}
	}
	s, _ := Parse("on connect qid=2 reject 6")
	if a := s.request(1); a != nil {
		t.Errorf("queue 1: %v", a)
	}
	if a := s.request(2); len(a) != 1 || a[0].n != 6 || s.Fired(1) != 1 {
		t.Errorf("queue 2: %v, fired %d", a, s.Fired(1))
	}
}

func FuzzParse(f *testing.F) {
	f.Add("on connect qid=2 reject 6\non read nth=3 delay 2s and corrupt\nafter 10 close")
	f.Add("on identify patch 104=00ff")
	f.Add("on read status 0x281 dnr")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		var pe *ParseError
		if err != nil && !errors.As(err, &pe) {
			t.Fatalf("%v is no ParseError", err)
		}
		if err == nil {
			s.request(1)
			applied(s, 1, func(c *nvme.Command) { c.FillRead(1, 0, 1) })
		}
	})
}
