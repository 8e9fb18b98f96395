package host

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"farblk/host/nvme"
)

// Identity is who this host is to every target.
type Identity struct {
	HostNQN string   `json:"hostnqn"`
	HostID  [16]byte `json:"-"`
	// Source says where it comes from, in words.
	Source string `json:"source"`
	// Random says that it was just made up and is kept nowhere: the next LoadIdentity gives another one.
	Random bool `json:"-"`
}

// dmiUUID is where Linux shows the machine's UUID; only root may read it.
const dmiUUID = "/sys/class/dmi/id/product_uuid"

// LoadIdentity finds out who this host is. For the NQN and the ID alike the first of these counts: the flag,
// if not empty; the first host in dir/config.json; dir/hostnqn and dir/hostid. A missing ID is derived from an
// NQN that contains one, and a missing NQN is made from the ID. If there is neither, the machine's DMI UUID is
// used, and without that a random one. dir is usually /etc/nvme. Errors: malformed values and files, and
// pairs that do not belong together.
func LoadIdentity(nqnFlag, idFlag, dir string) (Identity, error) {
	return loadIdentity(nqnFlag, idFlag, dir, dmiUUID)
}

func loadIdentity(nqnFlag, idFlag, dir, dmi string) (Identity, error) {
	type source struct{ nqn, id, name string }
	sources := []source{{strings.TrimSpace(nqnFlag), strings.TrimSpace(idFlag), "command line"}}
	file := filepath.Join(dir, "config.json")
	nqn, id, err := configHost(file)
	if err != nil {
		return Identity{}, err
	}
	sources = append(sources, source{nqn, id, file})
	if nqn, err = firstLine(filepath.Join(dir, "hostnqn")); err != nil {
		return Identity{}, err
	}
	if id, err = firstLine(filepath.Join(dir, "hostid")); err != nil {
		return Identity{}, err
	}
	sources = append(sources, source{nqn, id, dir})

	for i, s := range sources {
		if s.nqn == "" && s.id == "" {
			continue
		}
		// What is given here decides; what is not may come from further down, but only if it fits.
		out := Identity{HostNQN: s.nqn, Source: s.name}
		if s.nqn == "" {
			for _, t := range sources[i+1:] {
				if t.nqn != "" {
					out.HostNQN, out.Source = t.nqn, s.name+" and "+t.name
					break
				}
			}
		}
		if out.HostNQN != "" {
			if err := nvme.ValidateNQN(out.HostNQN); err != nil {
				return Identity{}, fmt.Errorf("host NQN from %s: %w", out.Source, err)
			}
		}
		given := s.id
		derived, ok := nvme.HostIDOf(out.HostNQN)
		if given == "" && !ok {
			for _, t := range sources[i+1:] {
				if t.id != "" {
					given, out.Source = t.id, s.name+" and "+t.name
					break
				}
			}
		}
		switch {
		case given != "":
			u, err := nvme.ParseHostID(given)
			if err != nil {
				return Identity{}, fmt.Errorf("%w (from %s)", err, out.Source)
			}
			out.HostID = u
		case ok:
			out.HostID = derived
		default:
			return Identity{}, fmt.Errorf("host NQN %s (from %s) contains no UUID, so a host ID must be given with it", out.HostNQN, out.Source)
		}
		if out.HostNQN == "" {
			out.HostNQN = nvme.HostNQN(out.HostID)
		}
		if err := CheckIdentity(out.HostNQN, out.HostID); err != nil {
			return Identity{}, fmt.Errorf("%w (from %s)", err, out.Source)
		}
		return out, nil
	}
	if line, err := firstLine(dmi); err == nil {
		// Some firmware has no UUID and shows zeros or ones.
		if u, err := nvme.ParseUUID(strings.ToLower(line)); err == nil && !u.IsZero() && strings.Trim(line, "fF-") != "" {
			return Identity{HostNQN: nvme.HostNQN(u), HostID: u, Source: "the machine's UUID (" + dmi + ")"}, nil
		}
	}
	u := RandomUUID()
	return Identity{
		HostNQN: nvme.HostNQN(u), HostID: u, Random: true,
		Source: "random: give one, or write it to " + filepath.Join(dir, "hostnqn") + ", to keep it",
	}, nil
}

// RandomUUID makes a version 4 UUID (RFC 9562 section 5.4).
func RandomUUID() (u nvme.UUID) {
	_, _ = rand.Read(u[:]) // never fails
	u[6] = u[6]&0x0F | 0x40
	u[8] = u[8]&0x3F | 0x80
	return u
}

// CheckIdentity refuses a host NQN and ID that a target would refuse, or that do not belong together: targets
// tell hosts apart by either one, and mix up those whose pairs overlap. Errors: *ConfigError.
func CheckIdentity(nqn string, id [16]byte) error {
	if err := nvme.ValidateNQN(nqn); err != nil {
		return &ConfigError{"host NQN", err.Error()}
	}
	if nvme.UUID(id).IsZero() {
		return &ConfigError{"host ID", "all zeros identifies no host"}
	}
	if inNQN, ok := nvme.HostIDOf(nqn); ok && inNQN != nvme.UUID(id) {
		return &ConfigError{"host identity", fmt.Sprintf(
			"host NQN %s and host ID %v do not belong together: leave the host ID out, or use host ID %v", nqn, nvme.UUID(id), inNQN)}
	}
	return nil
}

// configHost reads the first host of an nvme-cli config.json: an array of hosts. A missing file is empty.
func configHost(file string) (nqn, id string, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return "", "", err
	}
	var hosts []struct {
		HostNQN string `json:"hostnqn"`
		HostID  string `json:"hostid"`
	}
	if err := json.Unmarshal(b, &hosts); err != nil {
		return "", "", fmt.Errorf("%s: %w", file, err)
	}
	if len(hosts) == 0 {
		return "", "", nil
	}
	return hosts[0].HostNQN, hosts[0].HostID, nil
}

// firstLine is a file's first line without the space around it; empty if there is no such file.
func firstLine(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return "", err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line), nil
}
