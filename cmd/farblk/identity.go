package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"farblk/cmd/internal/session"
	"farblk/host"
	"farblk/host/nvme"
)

// etcNVMe is where nvme-cli keeps this host's identity.
const etcNVMe = "/etc/nvme"

// hostIdentity is who this host is, by the command line (-q, -I) and the files in dir.
//
// A machine that has neither, nor a UUID that this user may read, gets an identity that is kept for the user.
//
// Debian's nvme-cli writes two unrelated UUIDs into dir when it is installed. A pair that does not belong together
// is refused where somebody has chosen it, on the command line or in config.json; but for this one the NQN counts,
// which is what targets' lists of hosts know, and the ID is derived from it.
func hostIdentity(nqn, id, dir string) (host.Identity, error) {
	who, err := host.LoadIdentity(nqn, id, dir)
	if err == nil && who.Random {
		return keptIdentity(who, identityFolders(os.Geteuid())), nil
	}
	var mismatch *host.ConfigError
	if nqn != "" || id != "" || !errors.As(err, &mismatch) {
		return who, err
	}
	if _, e := os.Stat(filepath.Join(dir, "config.json")); e == nil {
		return who, err
	}
	file := filepath.Join(dir, "hostnqn")
	b, e := os.ReadFile(file)
	if e != nil {
		return who, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	derived, e := host.LoadIdentity(strings.TrimSpace(line), "", dir)
	if e != nil {
		return who, err
	}
	derived.Source = file + " (" + filepath.Join(dir, "hostid") + " does not belong to it and is not used)"
	return derived, nil
}

// rootsIdentity is where root's identity is kept.
const rootsIdentity = "/var/lib/farblk"

// identityFolders are where a user's own identity is kept: the first one that can be written to. Root's is not in a home,
// which may be that of the user who has become root.
func identityFolders(euid int) (dirs []string) {
	if euid == 0 {
		if os.Getenv("FARBLK_STATE_DIR") == "" {
			dirs = append(dirs, rootsIdentity)
		}
	} else if d := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		dirs = append(dirs, filepath.Join(d, "farblk"))
	} else if home, err := os.UserHomeDir(); err == nil && filepath.IsAbs(home) {
		dirs = append(dirs, filepath.Join(home, ".local", "state", "farblk"))
	}
	if d, err := session.DefaultPath(); err == nil {
		dirs = append(dirs, d)
	}
	return dirs
}

// othersFolder tells whether a folder is there and belongs to somebody else.
func othersFolder(path string) bool {
	st, err := os.Stat(path)
	if err != nil {
		return false
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(owner.Uid) != os.Geteuid()
}

// keptIdentity is the identity that one of the user's own folders has in its file hostnqn; where none has, fresh is put into the
// first that takes it. Where none does, fresh it is, for this once.
func keptIdentity(fresh host.Identity, dirs []string) host.Identity {
	read := func(file string) (who host.Identity, ok bool) {
		b, err := os.ReadFile(file)
		if err != nil {
			return who, false
		}
		line, _, _ := strings.Cut(string(b), "\n")
		id, ok := nvme.HostIDOf(strings.TrimSpace(line))
		return host.Identity{HostNQN: nvme.HostNQN(id), HostID: id, Source: file}, ok
	}
	dirs = slices.DeleteFunc(slices.Clone(dirs), othersFolder)
	for _, d := range dirs {
		if who, ok := read(filepath.Join(d, "hostnqn")); ok {
			return who
		}
	}
	for _, d := range dirs {
		file := filepath.Join(d, "hostnqn")
		if writeOnce(file, fresh.HostNQN+"\n") != nil {
			continue
		}
		if who, ok := read(file); ok { // perhaps another process was faster
			return who
		}
	}
	return fresh
}

// writeOnce makes a file, unless it is there: never half of one.
func writeOnce(file, text string) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(file), "new-hostnqn-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Link(f.Name(), file); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}
