package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const namePrefix = "farblk"

// lockLimit is for how long a command waits for another one that has the state directory locked.
const lockLimit = 4 * time.Second

// StateDir is the folder of all sessions' folders.
type StateDir struct {
	Path string
	// RemoveLeftover undoes one thing that an export of a dead session has left in the system. It must not fail
	// where there is nothing left, and must leave alone what belongs to somebody who lives. What is still in use,
	// and could be served again, it leaves alone and says so (*BusyError), but for force.
	RemoveLeftover func(l Leftover, force bool) error
	// Crashed, if not nil, is told of each session that is found dead, and where its log is kept from now on.
	Crashed func(name, log string)

	clearing sync.Mutex // several dead sessions at once: each waits lockLimit for others, but not for these
}

// DefaultPath is the state directory's: FARBLK_STATE_DIR, /run/farblk for root, else farblk in XDG_RUNTIME_DIR.
func DefaultPath() (string, error) {
	if d := os.Getenv("FARBLK_STATE_DIR"); d != "" {
		return filepath.Abs(d)
	}
	if os.Geteuid() == 0 {
		return "/run/farblk", nil
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "farblk"), nil
	}
	return "", errors.New("no state directory: run as root, or set XDG_RUNTIME_DIR or FARBLK_STATE_DIR to a folder of your own")
}

// Folder is a session's folder. Whoever has it open with its lock owns it.
type Folder struct {
	Path  string
	dir   *StateDir // nil in a process that did not create it
	lock  *os.File
	keep  bool   // it names something that this session, or a dead one, leaves in the system
	words string // the end of the log of a start that failed, for a message
}

// AlreadyConnectedError says that another session is the same connection.
type AlreadyConnectedError struct {
	Name   string
	Config Config
}

// Error says what to do.
func (e *AlreadyConnectedError) Error() string {
	return fmt.Sprintf("already connected to %s at %s as %s: use %s, disconnect it, or allow a second connection with -D",
		e.Config.Subsystem, e.Config.Address(), e.Name, e.Name)
}

// SecondPathError says that a session has the same subsystem in another way: at another address, or as another host.
// What it exports would get second devices.
type SecondPathError struct {
	Name    string
	Config  Config
	Crashed bool // the session died, and its devices are still in use
}

// Error says which session that is, and what to do.
func (e *SecondPathError) Error() string {
	const why = "nothing would join the two devices that each namespace then had (no multipath), and writing through both destroys data"
	if e.Crashed {
		return fmt.Sprintf("%s, at %s, died while it was connected to %s and its devices were in use: connect with %s to go on with them, "+
			"or give them up with 'farblk disconnect --force %s'; -D allows another connection, but %s",
			e.Name, e.Config.Address(), e.Config.Subsystem, e.Config.sameOptions(), e.Name, why)
	}
	return fmt.Sprintf("%s is connected to %s already, at %s as %s: use %s, or disconnect it first; -D allows another connection, but %s",
		e.Name, e.Config.Subsystem, e.Config.Address(), e.Config.HostNQN, e.Name, why)
}

// Create makes the folder for a new session and gives c its name. Unless duplicate, it refuses a connection that exists
// already (*AlreadyConnectedError), and any other one to a subsystem that a session has (*SecondPathError). It removes
// what dead sessions have left. Where a dead session of the same connection has left devices in use, its folder is
// taken over, so that they are served again (Config.TakeOver): then no device is new, and duplicate does not matter.
//
// The first refusal goes by what Linux calls the same connection, the host NQN included. The second one is for the
// data, and goes by the subsystem alone: its namespaces are the same disks on every path and for every host.
func (d *StateDir) Create(c *Config, duplicate bool) (*Folder, error) {
	if err := os.MkdirAll(d.Path, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w: FARBLK_STATE_DIR can name a folder of your own", err)
	}
	unlock, err := lockDir(d.Path, lockLimit)
	if err != nil {
		return nil, err
	}
	defer unlock()
	d.sweep()
	entries, err := d.Scan()
	if err == nil && awaitDying(entries, c.Subsystem) {
		d.sweep()
		entries, err = d.Scan()
	}
	if err != nil {
		return nil, err
	}
	f := &Folder{dir: d}
	used := map[string]bool{}
	for _, e := range entries {
		used[e.Name] = true
		if !e.Alive && f.Path == "" && e.Config.sameConnection(c) {
			c.Name, f.Path = e.Name, e.Path
		}
	}
	if f.Path == "" && !duplicate {
		if err := refusal(entries, c); err != nil {
			return nil, err
		}
	}
	c.HoldWrites = d.oldWrites(entries, c.Subsystem)
	if f.Path != "" {
		// The folder is this session's now, which may not get as far as to say what is left of the time.
		if err := d.noteWrites(c, c.HoldWrites); err != nil {
			return nil, fmt.Errorf("state directory: %w", err)
		}
		c.TakeOver = readLeftovers(f.Path)
		f.keep = len(c.TakeOver) > 0
		d.tellCrash(f.Path)
	} else {
		for n := 0; c.Name == "" || used[c.Name]; n++ {
			c.Name = namePrefix + strconv.Itoa(n)
		}
		f.Path = d.folder(c.Name)
		if err := os.Mkdir(f.Path, 0o700); err != nil {
			return nil, fmt.Errorf("state folder: %w", err)
		}
	}
	// Emptied before it is locked: the number of a dead owner may be another process's by now.
	f.lock, err = os.OpenFile(f.file("lock"), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err == nil {
		err = unix.Flock(int(f.lock.Fd()), unix.LOCK_EX) // waits for those who look whether it is free
	}
	if err == nil {
		err = writeJSON(f.file("config.json"), c)
	}
	if err != nil {
		f.Remove()
		return nil, fmt.Errorf("state folder: %w", err)
	}
	return f, nil
}

// awaitDying waits for the end of sessions of the subsystem that were killed and are still giving back their memory, so
// that whoever starts one anew at once is not told that it is connected. It tells whether one has ended.
func awaitDying(entries []Entry, subsystem string) (ended bool) {
	for _, e := range entries {
		if e.Alive && e.Config.Subsystem == subsystem && dying(e.Path) && ends(e.Path, 2*time.Second) {
			ended = true
		}
	}
	return ended
}

// dying tells whether the process that Own has named is past its end: field 3 of /proc/PID/stat is the state, field 9
// are the flags, of which 4 is PF_EXITING.
func dying(path string) bool {
	pid, err := owner(path)
	if err != nil {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])) // from field 3 on
	if len(fields) < 7 {
		return false
	}
	flags, _ := strconv.ParseUint(fields[6], 10, 64)
	return fields[0] == "Z" || fields[0] == "X" || flags&4 != 0
}

// refusal is why there may be no further session for c's subsystem, if there is a reason.
func refusal(entries []Entry, c *Config) error {
	var second error
	for _, e := range entries {
		switch {
		case e.Config.Subsystem != c.Subsystem:
		case e.Config.sameConnection(c):
			return &AlreadyConnectedError{e.Name, e.Config}
		case second == nil:
			second = &SecondPathError{Name: e.Name, Config: e.Config, Crashed: !e.Alive}
		}
	}
	return second
}

func (d *StateDir) folder(name string) string { return filepath.Join(d.Path, name) }

// Own writes this process's number into the lock, for those who have to kill it.
func (f *Folder) Own() error {
	return os.WriteFile(f.file("lock"), []byte(strconv.Itoa(os.Getpid())), 0o600)
}

// owner is the process that Own has named.
func owner(path string) (pid int, err error) {
	b, err := os.ReadFile(filepath.Join(path, "lock"))
	if err != nil {
		return 0, err
	}
	pid, err = strconv.Atoi(string(b))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("%s names no process", filepath.Join(path, "lock"))
	}
	return pid, nil
}

func (f *Folder) file(name string) string { return filepath.Join(f.Path, name) }

// Remove deletes the folder and frees the lock. Mounts inside it must be gone: it does not cross into them. Devices
// that were to be taken over and are not served yet keep it.
func (f *Folder) Remove() {
	if !f.keep {
		removeFolder(f.Path)
	}
	if f.lock != nil {
		f.lock.Close()
	}
}

// removeFolder deletes what farblk puts into a folder, and nothing that a mount shows in it.
func removeFolder(path string) {
	for _, name := range []string{
		"config.json", "config.json.new", "exports.json", "exports.json.new", "log", "log.old", SocketName, FilesName, "socket", "lock",
	} {
		_ = os.Remove(filepath.Join(path, name)) // a mount point is busy and stays
	}
	_ = os.Remove(path)
}

// Entry is a session's folder as found.
type Entry struct {
	Name, Path string
	Config     Config
	Alive      bool // its process lives
}

// Leftovers are what the session has put into the system.
func (e Entry) Leftovers() []Leftover { return readLeftovers(e.Path) }

// Scan lists the folders of sessions, by number. It waits for nobody.
func (d *StateDir) Scan() ([]Entry, error) {
	names, err := os.ReadDir(d.Path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, fmt.Errorf("state directory: %w", err)
	}
	var entries []Entry
	for _, n := range names {
		if _, ok := number(n.Name()); !ok {
			continue
		}
		e := Entry{Name: n.Name(), Path: d.folder(n.Name())}
		e.Alive = alive(e.Path)
		if c, err := readConfig(e.Path); err == nil {
			e.Config = *c
		}
		e.Config.Name = e.Name
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		x, _ := number(a.Name)
		y, _ := number(b.Name)
		return x - y
	})
	return entries, nil
}

func number(name string) (int, bool) {
	s, ok := strings.CutPrefix(name, namePrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && strconv.Itoa(n) == s
}

// alive tells whether a process holds the folder's lock.
func alive(path string) bool {
	l, err := os.Open(filepath.Join(path, "lock"))
	if err != nil {
		return false
	}
	defer l.Close()
	// A shared lock, so that two who look do not take each other for the owner.
	return errors.Is(unix.Flock(int(l.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// Sweep removes the folders of sessions that died, with the mounts and devices that they left and nobody uses, but for
// the last few logs. It gives up at once when another process is at it.
func (d *StateDir) Sweep() {
	unlock, err := lockDir(d.Path, 0)
	if err != nil {
		return
	}
	defer unlock()
	d.sweep()
}

// sweep is Sweep with the directory locked.
func (d *StateDir) sweep() {
	entries, _ := d.Scan()
	for _, e := range entries {
		if !e.Alive && d.removeLeftovers(e.Path, false) == nil {
			_ = d.bury(e.Path, false) // else the next one tries
		}
	}
	d.forgetCrashes()
}

// lockDir locks the state directory against other creators and sweepers.
func lockDir(dir string, wait time.Duration) (unlock func(), err error) {
	l, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	for deadline := time.Now().Add(wait); ; time.Sleep(5 * time.Millisecond) {
		err = unix.Flock(int(l.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { l.Close() }, nil
		}
		switch {
		case !errors.Is(err, unix.EWOULDBLOCK):
			l.Close()
			return nil, fmt.Errorf("state directory %s: %w", dir, os.NewSyscallError("flock", err))
		case time.Now().After(deadline):
			l.Close()
			return nil, fmt.Errorf("state directory %s: locked by another farblk for too long: try again", dir)
		}
	}
}

func readConfig(path string) (*Config, error) {
	b, err := os.ReadFile(filepath.Join(path, "config.json"))
	if err != nil {
		return nil, err
	}
	c := new(Config)
	return c, json.Unmarshal(b, c)
}

// writeJSON replaces a file as a whole.
func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
