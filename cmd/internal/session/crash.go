package session

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// keptLogs is how many logs of sessions that died are kept, and crashLog what their names begin with.
const (
	keptLogs = 4
	crashLog = "crash-"
)

// crash notes that a session is gone, its folder too, while the controller may go on with what it had sent for Left from
// then on: it died, or its connection was lost before it ended. A later write to the same place must not be overtaken by
// that, on whatever path it goes (Config.HoldWrites).
//
// Whatever somebody sets the clock to, the time is as long as it was, by the clock of the boot in which it began. Only
// after another boot does the one on the wall count, as far as it makes sense.
type crash struct {
	Config    Config        `json:"config"`
	Left      time.Duration `json:"left"`
	Until     time.Time     `json:"until"`
	Boot      string        `json:"boot,omitempty"`       // the kernel's name of the boot
	UntilBoot time.Duration `json:"until_boot,omitempty"` // since that
}

// newCrash begins a crash's time.
func newCrash(c *Config, left time.Duration) crash {
	boot, since := bootTime()
	return crash{Config: *c, Left: left, Until: time.Now().Add(left), Boot: boot, UntilBoot: since + left}
}

// left is what there is left of the time; not above 0: nothing.
func (c crash) left() time.Duration {
	if boot, since := bootTime(); boot != "" && boot == c.Boot {
		return c.UntilBoot - since
	}
	return min(time.Until(c.Until), c.Left)
}

// bootTime is the time since this boot, suspended or not, and what names it; "" if that cannot be had.
func bootTime() (boot string, since time.Duration) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var t unix.Timespec
	if err != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return "", 0
	}
	return strings.TrimSpace(string(b)), time.Duration(t.Nano())
}

func (d *StateDir) crashFile() string { return filepath.Join(d.Path, "crashes.json") }

// crashes are the notes that still count.
func (d *StateDir) crashes() []crash {
	var all []crash
	b, err := os.ReadFile(d.crashFile())
	if err != nil || json.Unmarshal(b, &all) != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(c crash) bool { return c.left() <= 0 })
}

// oldWrites is for how long sessions that are gone, or whose devices are still in use, may still write to a subsystem.
func (d *StateDir) oldWrites(entries []Entry, subsystem string) (hold time.Duration) {
	for _, e := range entries {
		if !e.Alive && e.Config.Subsystem == subsystem {
			hold = max(hold, e.Config.grace())
		}
	}
	for _, crash := range d.crashes() {
		if crash.Config.Subsystem == subsystem {
			hold = max(hold, crash.left())
		}
	}
	return hold
}

// noteWrites writes down that what was sent on c's connection may still be executed for some time. The directory is
// locked.
func (d *StateDir) noteWrites(c *Config, left time.Duration) error {
	return writeJSON(d.crashFile(), append(d.crashes(), newCrash(c, left)))
}

// noteCrash writes down that the session of a folder died, before the folder goes. When that was is not known: it
// counts from now. The directory is locked.
func (d *StateDir) noteCrash(folder string) error {
	c, err := readConfig(folder)
	if err != nil {
		return nil // it had not begun to connect
	}
	return d.noteWrites(c, c.grace())
}

// noteFailedStart is noteCrash for a session that did not get to be ready: it may have been connected. The directory is
// locked.
func (d *StateDir) noteFailedStart(folder string) error {
	if c, err := readConfig(folder); err != nil || c.Grace == 0 {
		return nil
	}
	return d.noteCrash(folder)
}

// forgetCrashes removes the notes when none counts any more. The directory is locked.
func (d *StateDir) forgetCrashes() {
	if len(d.crashes()) == 0 {
		_ = os.Remove(d.crashFile())
	}
}

// bury removes the folder of a session that died and left nothing else, when the crash is noted and the log in a safe
// place. The directory is locked.
func (d *StateDir) bury(folder string, force bool) error {
	if err := d.noteCrash(folder); err != nil && !force {
		return err
	}
	d.tellCrash(folder)
	removeFolder(folder)
	return nil
}

// tellCrash puts the log of a session that died in a safe place and says where that is.
func (d *StateDir) tellCrash(folder string) {
	if log := d.keepLog(folder); log != "" && d.Crashed != nil {
		d.Crashed(filepath.Base(folder), log)
	}
}

// keepLog moves the log of a session that died from its folder to the state directory, removes the oldest of those that
// are kept there, and returns its new path: "" if there is none. It is named after the last time it was written to.
func (d *StateDir) keepLog(folder string) string {
	st, err := os.Stat(filepath.Join(folder, "log"))
	if err != nil || st.Size() == 0 {
		return ""
	}
	path := filepath.Join(d.Path, crashLog+st.ModTime().UTC().Format("20060102T150405Z")+"-"+filepath.Base(folder)+".log")
	if os.Rename(filepath.Join(folder, "log"), path) != nil {
		return ""
	}
	all, _ := os.ReadDir(d.Path)
	all = slices.DeleteFunc(all, func(e os.DirEntry) bool { return !strings.HasPrefix(e.Name(), crashLog) })
	for i := range len(all) - keptLogs {
		_ = os.Remove(filepath.Join(d.Path, all[i].Name()))
	}
	return path
}
