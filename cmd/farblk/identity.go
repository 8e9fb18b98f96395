package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"farblk/host"
)

// etcNVMe is where nvme-cli keeps this host's identity.
const etcNVMe = "/etc/nvme"

// hostIdentity is who this host is, by the command line (-q, -I) and the files in dir.
//
// Debian's nvme-cli writes two unrelated UUIDs into dir when it is installed. A pair that does not belong together
// is refused where somebody has chosen it, on the command line or in config.json; but for this one the NQN counts,
// which is what targets' lists of hosts know, and the ID is derived from it.
func hostIdentity(nqn, id, dir string) (host.Identity, error) {
	who, err := host.LoadIdentity(nqn, id, dir)
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
