package session

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"farblk/host/nvme"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func config() *Config {
	return &Config{
		Subsystem: "nqn.a", HostNQN: "nqn.h", HostID: nvme.UUID{1},
		Remote: netip.MustParseAddr("10.0.0.1"), Port: 4420,
	}
}

// stateDir counts the left-overs that it was asked to remove.
func stateDir(t *testing.T, busy map[string]bool) (*StateDir, map[string]int) {
	t.Helper()
	asked := map[string]int{}
	return &StateDir{Path: filepath.Join(t.TempDir(), "s"), RemoveLeftover: func(l Leftover, force bool) error {
		asked[l.Path]++
		if busy[l.Path] && !force {
			return &BusyError{Detail: l.Path + " is in use"}
		}
		return nil
	}}, asked
}

func create(t *testing.T, d *StateDir, c *Config, duplicate bool) *Folder {
	t.Helper()
	f, err := d.Create(c, duplicate)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// What makes two connections the same: subsystem, both ends' addresses, and the host's identity. Any other one to the
// same subsystem would give its namespaces second devices, and is refused for that reason, unless it is wanted.
func TestCaseH13SameConnection(t *testing.T) {
	d, _ := stateDir(t, nil)
	f := create(t, d, config(), false)
	defer f.Remove()
	var already *AlreadyConnectedError
	if _, err := d.Create(config(), false); !errors.As(err, &already) || already.Name != "farblk0" {
		t.Errorf("the same again: %v", err)
	}
	for name, change := range map[string]func(*Config){
		"host NQN":     func(c *Config) { c.HostNQN = "nqn.i" },
		"host ID":      func(c *Config) { c.HostID[0]++ },
		"address":      func(c *Config) { c.Remote = c.Remote.Next() },
		"port":         func(c *Config) { c.Port++ },
		"host address": func(c *Config) { c.Local = netip.MustParseAddr("10.0.0.2") },
	} {
		c := config()
		change(c)
		var second *SecondPathError
		if _, err := d.Create(c, false); !errors.As(err, &second) || errors.As(err, &already) || second.Name != "farblk0" || second.Crashed ||
			!strings.Contains(err.Error(), "farblk0") || !strings.Contains(err.Error(), "10.0.0.1:4420") || !strings.Contains(err.Error(), "-D") {
			t.Errorf("another %s: %v", name, err)
		}
		create(t, d, c, true).Remove()
	}
	c := config()
	c.Subsystem = "nqn.b"
	create(t, d, c, false).Remove()
}

// The same connection twice only where that was asked for.
func TestCaseH14Duplicate(t *testing.T) {
	d, _ := stateDir(t, nil)
	defer create(t, d, config(), false).Remove()
	c := config()
	defer create(t, d, c, true).Remove()
	if c.Name != "farblk1" {
		t.Errorf("named %s", c.Name)
	}
	if e, err := d.Scan(); err != nil || len(e) != 2 || !e[0].Alive || !e[1].Alive {
		t.Errorf("%+v, %v", e, err)
	}
}

// die lets go of the lock as a process that is killed does.
func die(t *testing.T, f *Folder, left ...Leftover) {
	t.Helper()
	if err := writeJSON(f.file("exports.json"), left); err != nil {
		t.Fatal(err)
	}
	f.lock.Close()
}

// What a dead session left is removed by whoever looks next, and its name is free.
func TestCaseE17Leftovers(t *testing.T) {
	d, asked := stateDir(t, nil)
	die(t, create(t, d, config(), false), Leftover{Kind: KindFUSE, Path: "/mnt"}, Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1})
	all, err := d.List()
	if err != nil || len(all) != 0 || asked["/mnt"] != 1 || asked["/dev/nbd0"] != 1 {
		t.Errorf("%+v, %v, asked for %v", all, err, asked)
	}
	c := config()
	f := create(t, d, c, false)
	defer f.Remove()
	if c.Name != "farblk0" || len(c.TakeOver) > 0 {
		t.Errorf("%+v", c)
	}
}

// Why a session died can still be read when nothing else is left of it: of the last few. An orderly end leaves nothing.
func TestCrashLogsAreKept(t *testing.T) {
	d, _ := stateDir(t, nil)
	told := map[string]string{}
	d.Crashed = func(name, log string) { told[name] = log }
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i := range keptLogs + 2 {
		f := create(t, d, config(), false)
		if err := os.WriteFile(f.file("log"), []byte{byte(i)}, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(f.file("log"), begin, begin.Add(time.Duration(i)*time.Minute)); err != nil {
			t.Fatal(err)
		}
		die(t, f)
		if err := d.Disconnect(t.Context(), "farblk0", false); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(told["farblk0"]); err != nil || len(b) != 1 || b[0] != byte(i) {
			t.Errorf("crash %d: told of %s: %v, %v", i, told, b, err)
		}
	}
	kept, err := filepath.Glob(d.folder("crash-*"))
	if err != nil || len(kept) != keptLogs || filepath.Base(kept[0]) != "crash-20260102T030605Z-farblk0.log" || kept[keptLogs-1] != told["farblk0"] {
		t.Error(kept, err)
	}
	clear(told)
	create(t, d, config(), false).Remove()
	if err := d.Disconnect(t.Context(), "farblk0", false); err != nil || len(told) > 0 {
		t.Error(told, err)
	}
}

// What a dead session had sent may be executed after its last trace was swept away: its connection's next writes wait
// all the same, as long as the dead one's keep-alive demands, and nobody else's do.
func TestCaseH25CrashRemembered(t *testing.T) {
	d, _ := stateDir(t, nil)
	dead := config()
	dead.KeepAlive = time.Minute
	die(t, create(t, d, dead, false))
	if all, err := d.List(); err != nil || len(all) != 0 {
		t.Fatalf("%+v, %v", all, err)
	}
	other := config()
	other.Subsystem = "nqn.b"
	create(t, d, other, false).Remove()
	c := config()
	create(t, d, c, false).Remove()
	if other.HoldWrites != 0 || c.HoldWrites <= time.Minute || c.Host(nil, nil).HoldWrites != c.HoldWrites {
		t.Errorf("writes are held for %v, another connection's for %v", c.HoldWrites, other.HoldWrites)
	}

	if err := writeJSON(d.crashFile(), []crash{newCrash(dead, 0)}); err != nil {
		t.Fatal(err)
	}
	c = config()
	create(t, d, c, false).Remove()
	if _, err := os.Stat(d.crashFile()); c.HoldWrites != 0 || err == nil {
		t.Errorf("later writes are held for %v, the note's file: %v", c.HoldWrites, err)
	}
}

// How long writes are held does not follow a clock that is set, and not far after another boot.
func TestCrashTimeAndTheClock(t *testing.T) {
	for boot, shift := range map[string]time.Duration{"": time.Hour, "back": -time.Hour, "another": time.Hour} {
		d, _ := stateDir(t, nil)
		if err := os.MkdirAll(d.Path, 0o700); err != nil {
			t.Fatal(err)
		}
		note := newCrash(config(), time.Minute)
		note.Until = note.Until.Add(shift)
		if boot == "another" {
			note.Boot = boot
		}
		c := config()
		err := writeJSON(d.crashFile(), []crash{note})
		create(t, d, c, false).Remove()
		if err != nil || c.HoldWrites <= 0 || c.HoldWrites > time.Minute {
			t.Errorf("%q: held for %v, %v", boot, c.HoldWrites, err)
		}
	}
}

// A dead session's device that is in use stays for the next session of the same connection, which holds back its
// writes for a while; others leave it alone.
func TestCaseE08TakeOver(t *testing.T) {
	d, _ := stateDir(t, map[string]bool{"/dev/nbd0": true})
	left := Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1}
	die(t, create(t, d, config(), false), left)
	all, err := d.List()
	if err != nil || len(all) != 1 || all[0].State != Crashed || all[0].Namespaces[0].Exports[0].Path != "/dev/nbd0" {
		t.Fatalf("%+v, %v", all, err)
	}
	other := config()
	other.Subsystem = "nqn.b"
	g := create(t, d, other, false)
	defer g.Remove()
	if other.Name != "farblk1" || other.HoldWrites != 0 {
		t.Errorf("another connection: %+v", other)
	}

	c := config()
	f := create(t, d, c, false)
	if c.Name != "farblk0" || len(c.TakeOver) != 1 || c.TakeOver[0] != left {
		t.Errorf("the same connection: %+v", c)
	}
	if h := c.Host(nil, nil); h.HoldWrites < h.KeepAlive+1 {
		t.Errorf("writes are held for %v", h.HoldWrites)
	}
	f.Remove()
	if _, err := os.Stat(f.Path); err != nil {
		t.Error("the folder went although its device is in use:", err)
	}
	if err := d.Disconnect(t.Context(), "farblk0", false); err == nil {
		t.Error("disconnected although in use")
	}
	if err := d.Disconnect(t.Context(), "farblk0", true); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(f.Path); err == nil {
		t.Error("disconnect --force left the folder")
	}
}

// A dead session's device in use, and its subsystem by another path: that would be a second device, and if it is wanted,
// its writes wait for the dead session's.
func TestCaseH25OtherPath(t *testing.T) {
	d, _ := stateDir(t, map[string]bool{"/dev/nbd0": true})
	die(t, create(t, d, config(), false), Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1})
	c := config()
	c.Remote = c.Remote.Next()
	var second *SecondPathError
	if _, err := d.Create(c, false); !errors.As(err, &second) || !second.Crashed {
		t.Error(err)
	}
	const how = "-a 10.0.0.1 -s 4420 -w 10.0.0.9 -q nqn.h -I 01000000-0000-0000-0000-000000000000"
	from := second.Config
	from.Local = netip.MustParseAddr("10.0.0.9")
	if err := (&SecondPathError{Name: "farblk0", Config: from, Crashed: true}); !strings.Contains(err.Error(), how) {
		t.Error(err)
	}
	create(t, d, c, true).Remove()
	if c.HoldWrites < 5*time.Second || len(c.TakeOver) > 0 {
		t.Errorf("held for %v, takes over %v", c.HoldWrites, c.TakeOver)
	}
	other := config()
	other.Subsystem = "nqn.b"
	create(t, d, other, false).Remove()
	if other.HoldWrites > 0 {
		t.Errorf("another subsystem's writes are held for %v", other.HoldWrites)
	}
}

// A session that was to take devices over fails before it runs: they can still be taken over.
func TestTakeOverOutlivesAFailedStart(t *testing.T) {
	d, _ := stateDir(t, map[string]bool{"/dev/nbd0": true})
	left := Leftover{Kind: KindNBD, Path: "/dev/nbd0", NSID: 1}
	die(t, create(t, d, config(), false), left)
	for range 2 {
		c := config()
		f := create(t, d, c, false)
		if c.Name != "farblk0" || len(c.TakeOver) != 1 || c.TakeOver[0] != left || c.HoldWrites < 5*time.Second {
			t.Fatalf("%+v", c)
		}
		if err := os.Mkdir(f.file("log"), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Start(t.Context(), "unused"); err == nil {
			t.Fatal("started")
		}
		if err := os.Remove(f.file("log")); err != nil {
			t.Fatal(err)
		}
	}
}

// A session that fails to start leaves a note only if it had got as far as to be connected.
func TestFailedStartIsNoted(t *testing.T) {
	for grace, want := range map[time.Duration]bool{0: false, time.Minute: true} {
		d, _ := stateDir(t, nil)
		f := create(t, d, config(), false)
		c := config()
		c.Grace = grace
		if err := errors.Join(writeJSON(f.file("config.json"), c), d.noteFailedStart(f.Path)); err != nil {
			t.Error(err)
		}
		f.Remove()
		next := config()
		create(t, d, next, false).Remove()
		if (next.HoldWrites > 0) != want {
			t.Errorf("granted %v: writes are held for %v", grace, next.HoldWrites)
		}
	}
}

// How long a request waits for the next session, when one has died.
func TestDeadTimeout(t *testing.T) {
	for loss, want := range map[time.Duration]time.Duration{
		0: 10 * time.Minute, -time.Second: 14 * 24 * time.Hour, 1: time.Second, time.Minute: time.Minute, 365 * 24 * time.Hour: 14 * 24 * time.Hour,
	} {
		c := config()
		c.CtrlLoss = loss
		if got := c.DeadTimeout(); got != want {
			t.Errorf("controller loss %v: %v, want %v", loss, got, want)
		}
	}
}

func TestParseExport(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range map[string]ExportSpec{
		"nbd":                     {Kind: KindNBD},
		"nbd=/dev/nbd12":          {KindNBD, "/dev/nbd12"},
		"nbd-unix":                {Kind: KindNBDUnix},
		"nbd-unix=a/b":            {KindNBDUnix, here + "/a/b"},
		"nbd-tcp=127.0.0.1:10809": {KindNBDTCP, "127.0.0.1:10809"},
		"nbd-tcp=[::1]:0":         {KindNBDTCP, "[::1]:0"},
		"nbd-tcp=:10809":          {KindNBDTCP, ":10809"},
		"fuse=/x=y":               {KindFUSE, "/x=y"},
		"none":                    {Kind: KindNone},
	} {
		if got, err := ParseExport(s); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", s, got, err, want)
		}
	}
	for _, s := range []string{
		"", "nbd=", "nbd=0", "nbd=/dev/nbd", "nbd=/dev/nbd01", "nbd=/dev/nbd-1", "nbd=/dev/nbd0p1", "nbd-tcp=host:1", "nbd-tcp=1",
		"none=x", "ublk", "floppy=/x", "nbd-unix=/" + string(make([]byte, 200)),
	} {
		if got, err := ParseExport(s); err == nil {
			t.Errorf("%q: %+v", s, got)
		}
	}
}
