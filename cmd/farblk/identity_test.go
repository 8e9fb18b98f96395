package main

import (
	"os"
	"path/filepath"
	"testing"

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
