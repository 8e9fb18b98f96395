package host

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var rewrite = flag.Bool("rewrite", false, "write what the machine does into the transcripts")

var machineEvents = map[string]eventKind{
	"start": evStart, "connected": evConnected, "failed": evAttemptFailed, "lost": evLost,
	"quiesced": evQuiesced, "timer": evTimer, "delete": evDelete,
}

var timerNames = [numTimers]string{"reconnect", "ctrl-loss", "fast-fail", "grace"}

func (a action) String() string {
	names := [...]string{"attempt", "cancel-attempt", "quiesce", "shutdown", "resume", "release-writes", "fail", "arm", "disarm", "free"}
	s := names[a.kind]
	switch a.kind {
	case doResume:
		s += fmt.Sprintf(" writes=%v", a.writes)
	case doFail:
		s += fmt.Sprintf(": %v", a.err)
	case doArm:
		s += fmt.Sprintf(" %s %v", timerNames[a.timer], a.after)
	case doDisarm:
		s += " " + timerNames[a.timer]
	}
	return s
}

// TestMachineTranscripts replays testdata/*.machine: a line "> event" is what happens, what follows is what
// the machine then is and wants done.
func TestMachineTranscripts(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.machine")
	if len(files) == 0 {
		t.Fatal("no transcripts")
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := replay(t, string(b))
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if d := cmp.Diff(string(b), got); d != "" {
				t.Error(d)
			}
		})
	}
}

func replay(t *testing.T, script string) string {
	m := &machine{reconnectDelay: 10 * time.Second, ctrlLoss: time.Minute}
	var out strings.Builder
	for line := range strings.Lines(script) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "#"), line == "":
			fmt.Fprintln(&out, line)
		case strings.HasPrefix(line, "fast-fail "):
			d, err := time.ParseDuration(line[len("fast-fail "):])
			if err != nil {
				t.Fatal(err)
			}
			m.fastFail = d
			fmt.Fprintln(&out, line)
		case strings.HasPrefix(line, "> "):
			e := parseEvent(t, strings.Fields(line[2:]))
			acts := m.step(e)
			fmt.Fprintf(&out, "%s\n%s\n", line, m.state)
			for _, a := range acts {
				if a.kind != doDisarm || len(acts) < 5 { // all of them: not worth reading
					fmt.Fprintln(&out, "  "+a.String())
				}
			}
		}
	}
	return out.String()
}

func parseEvent(t *testing.T, words []string) machineEvent {
	kind, ok := machineEvents[words[0]]
	if !ok {
		t.Fatal("unknown event", words)
	}
	e := machineEvent{kind: kind, grace: 6 * time.Second}
	for _, w := range words[1:] {
		switch w {
		case "stale":
			e.verdict = stale
		case "hopeless":
			e.verdict = hopeless
		case "writes":
			e.writes = true
		default:
			for i, n := range timerNames {
				if n == w {
					e.timer = timerID(i)
				}
			}
		}
	}
	if kind == evLost || kind == evAttemptFailed {
		e.err = errors.New(strings.Join(words, " "))
	}
	return e
}
