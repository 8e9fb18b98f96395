package main

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"farblk/host"
	"farblk/host/nvme"
)

// What nvme-cli's installation leaves in /etc/nvme is used, a pair that somebody has chosen is checked.
func TestCaseH12IdentityFiles(t *testing.T) {
	const a, b = "11111111-2222-3333-4444-555555555555", "22222222-2222-3333-4444-555555555555"
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	nqn := "nqn.2014-08.org.nvmexpress:uuid:" + a
	write("hostnqn", nqn)
	write("hostid", b)
	who, err := hostIdentity("", "", dir)
	if err != nil || who.HostNQN != nqn || nvme.UUID(who.HostID).String() != a {
		t.Errorf("unrelated files: %+v, %v", who, err)
	}
	if who, err := hostIdentity(nqn, b, dir); err == nil {
		t.Errorf("unrelated options: %+v", who)
	}
	if who, err := hostIdentity("", b, dir); err == nil {
		t.Errorf("an ID that does not belong to the NQN in the file: %+v", who)
	}
	write("config.json", `[{"hostnqn":"`+nqn+`","hostid":"`+b+`"}]`)
	if who, err := hostIdentity("", "", dir); err == nil {
		t.Errorf("unrelated pair in config.json: %+v", who)
	}
}

// An identity that was made up is kept, in the first folder that takes it, and is the same for every command.
func TestKeptIdentity(t *testing.T) {
	fresh := func() host.Identity {
		id := host.RandomUUID()
		return host.Identity{HostNQN: nvme.HostNQN(id), HostID: id, Source: "random", Random: true}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "file") // where there can be no folder
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dirs := []string{filepath.Join(file, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")}
	got := make([]host.Identity, 8)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() { got[i] = keptIdentity(fresh(), dirs) })
	}
	wg.Wait()
	for _, who := range got {
		if who != got[0] || who.Random || who.Source != filepath.Join(dir, "b", "hostnqn") {
			t.Errorf("%+v and %+v", who, got[0])
		}
	}
	if who := keptIdentity(fresh(), dirs[1:]); who != got[0] {
		t.Errorf("later: %+v", who)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*", "new-*")); err != nil || len(left) > 0 {
		t.Error(left, err)
	}
	if os.Geteuid() == 0 { // who alone can write to another's folder
		if err := os.Chown(dirs[1], 12345, 12345); err != nil {
			t.Fatal(err)
		}
		if who := keptIdentity(fresh(), dirs); who == got[0] || who.Source != filepath.Join(dir, "c", "hostnqn") {
			t.Errorf("another user's: %+v", who)
		}
	}
	once := fresh()
	if who := keptIdentity(once, dirs[:1]); who != once {
		t.Errorf("nowhere to keep it: %+v", who)
	}
}

// Where a user's identity is kept.
func TestIdentityFolders(t *testing.T) {
	t.Setenv("FARBLK_STATE_DIR", "/state")
	t.Setenv("HOME", "/home/u")
	for xdg, want := range map[string]string{"": "/home/u/.local/state/farblk", "relative": "/home/u/.local/state/farblk", "/x": "/x/farblk"} {
		t.Setenv("XDG_STATE_HOME", xdg)
		if got := identityFolders(0); !slices.Equal(got, []string{"/state"}) {
			t.Errorf("XDG_STATE_HOME=%s, root: %q", xdg, got)
		}
		if got := identityFolders(1000); !slices.Equal(got, []string{want, "/state"}) {
			t.Errorf("XDG_STATE_HOME=%s: %q", xdg, got)
		}
	}
	t.Setenv("FARBLK_STATE_DIR", "")
	if got := identityFolders(0); got[0] != rootsIdentity {
		t.Errorf("root: %q", got)
	}
}
