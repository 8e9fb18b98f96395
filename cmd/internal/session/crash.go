package session

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// crash notes that a session died, when nothing else of it is left: the controller may go on with what it had sent
// until Until, and a later write to the same place must not be overtaken by that (Config.HoldWrites).
type crash struct {
	Config Config    `json:"config"`
	Until  time.Time `json:"until"`
}

func (d *StateDir) crashFile() string { return filepath.Join(d.Path, "crashes.json") }

// crashes are the notes that still count.
func (d *StateDir) crashes(now time.Time) []crash {
	var all []crash
	b, err := os.ReadFile(d.crashFile())
	if err != nil || json.Unmarshal(b, &all) != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(c crash) bool { return !c.Until.After(now) })
}

// noteCrash writes down that the session of a folder died, before the folder goes. When that was is not known: it
// counts from now. The directory is locked.
func (d *StateDir) noteCrash(folder string) error {
	c, err := readConfig(folder)
	if err != nil {
		return nil // it had not begun to connect
	}
	now := time.Now()
	return writeJSON(d.crashFile(), append(d.crashes(now), crash{*c, now.Add(c.grace())}))
}

// forgetCrashes removes the notes when none counts any more. The directory is locked.
func (d *StateDir) forgetCrashes() {
	if len(d.crashes(time.Now())) == 0 {
		_ = os.Remove(d.crashFile())
	}
}
