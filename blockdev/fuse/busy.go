package fuse

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Holder is somebody who uses a mount.
type Holder struct {
	Kind    string `json:"kind"` // "process", "loop" or "mount"
	PID     int    `json:"pid,omitempty"`
	Command string `json:"command,omitempty"`
	// Path is the file in use; the mount point for kind "mount".
	Path string `json:"path"`
	// Device is the loop device or the mounted source.
	Device string `json:"device,omitempty"`
}

// String is for people.
func (h Holder) String() string {
	switch h.Kind {
	case "process":
		return fmt.Sprintf("process %d (%s) has %s open", h.PID, h.Command, h.Path)
	case "loop":
		return fmt.Sprintf("%s is set up on %s", h.Device, h.Path)
	default:
		return fmt.Sprintf("%s is mounted on %s", h.Device, h.Path)
	}
}

// BusyError is a mount that is in use.
type BusyError struct {
	Path    string
	Holders []Holder
}

// Error says who uses it.
func (e *BusyError) Error() string {
	if len(e.Holders) == 0 {
		return e.Path + " is in use, by whom cannot be seen from here: try as root, or force it"
	}
	s := make([]string, 0, 5)
	for i, h := range e.Holders {
		if i == 4 {
			s = append(s, fmt.Sprintf("and %d more", len(e.Holders)-i))
			break
		}
		s = append(s, h.String())
	}
	return e.Path + " is in use: " + strings.Join(s, "; ")
}

// Unwrap is EBUSY.
func (e *BusyError) Unwrap() error { return unix.EBUSY }

// Holders are those who use the mount now.
func (m *Mounted) Holders() []Holder { return holders(m.path) }

// holders finds who uses the mount at root, by names in /proc and /sys alone: the mount itself is not touched.
func holders(root string) []Holder {
	inside := func(p string) bool { return p == root || strings.HasPrefix(p, root+"/") }
	table := mountTable()
	hs := processHolders(inside)
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range backing {
		p, err := os.ReadFile(b)
		name := strings.TrimSpace(string(p))
		if err != nil || !inside(name) {
			continue
		}
		dev := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(b)))
		hs = append(hs, Holder{Kind: "loop", Path: name, Device: dev})
		for _, e := range table {
			if e.source == dev {
				hs = append(hs, Holder{Kind: "mount", Path: e.point, Device: dev})
			}
		}
	}
	for _, e := range table {
		if e.point != root && inside(e.point) {
			hs = append(hs, Holder{Kind: "mount", Path: e.point, Device: e.source})
		}
	}
	return hs
}

func processHolders(inside func(string) bool) []Holder {
	var hs []Holder
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range procs {
		p := openIn(proc, inside)
		if p == "" {
			p = mappedIn(proc, inside)
		}
		if p == "" {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(proc))
		comm, _ := os.ReadFile(proc + "/comm")
		hs = append(hs, Holder{Kind: "process", PID: pid, Command: strings.TrimSpace(string(comm)), Path: p})
	}
	return hs
}

// openIn is a path inside that the process has open, works in or runs; "" for none.
func openIn(proc string, inside func(string) bool) string {
	fds, _ := filepath.Glob(proc + "/fd/*")
	for _, l := range append(fds, proc+"/cwd", proc+"/root", proc+"/exe") {
		if p, err := os.Readlink(l); err == nil && inside(p) {
			return p
		}
	}
	return ""
}

// mappedIn is a path inside that the process has mapped; "" for none.
func mappedIn(proc string, inside func(string) bool) string {
	f, err := os.Open(proc + "/maps")
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if i := strings.IndexByte(s.Text(), '/'); i >= 0 && inside(s.Text()[i:]) {
			return s.Text()[i:]
		}
	}
	return ""
}
