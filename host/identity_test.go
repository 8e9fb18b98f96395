package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"farblk/host/nvme"
)

func TestLoadIdentity(t *testing.T) {
	const (
		a, b   = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"
		prefix = "nqn.2014-08.org.nvmexpress:uuid:"
		plain  = "nqn.2024-01.org.example:host"
	)
	for name, x := range map[string]struct {
		nqn, id      string // flags
		files        map[string]string
		dmi          string
		wantNQN      string // or empty for an error with
		wantID, want string
	}{
		"flags":                      {nqn: prefix + a, id: a, wantNQN: prefix + a, wantID: a},
		"nqn derives id":             {nqn: prefix + a, wantNQN: prefix + a, wantID: a},
		"nqn over another host's id": {nqn: prefix + a, files: map[string]string{"hostid": b}, wantNQN: prefix + a, wantID: a},
		"plain nqn takes id":         {nqn: plain, files: map[string]string{"hostid": b + "\n"}, wantNQN: plain, wantID: b},
		"id makes nqn":               {id: a, wantNQN: prefix + a, wantID: a},
		"files":                      {files: map[string]string{"hostnqn": prefix + a + "\n", "hostid": a + "\n"}, wantNQN: prefix + a, wantID: a},
		"config.json first": {
			files:   map[string]string{"config.json": `[{"hostnqn":"` + plain + `","hostid":"` + b + `","subsystems":[]},{}]`, "hostnqn": prefix + a},
			wantNQN: plain, wantID: b,
		},
		"empty config.json": {files: map[string]string{"config.json": `[]`, "hostnqn": prefix + a}, wantNQN: prefix + a, wantID: a},
		"machine":           {dmi: strings.ToUpper(b), wantNQN: prefix + b, wantID: b},
		"firmware of ones":  {dmi: "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", want: "random"},
		"random":            {want: "random"},

		"mismatch":           {nqn: prefix + a, id: b, want: "do not belong together"},
		"mismatch in files":  {files: map[string]string{"hostnqn": prefix + a, "hostid": b}, want: "use host ID " + a},
		"mismatch with flag": {id: b, files: map[string]string{"hostnqn": prefix + a}, want: "do not belong together"},
		"plain nqn alone":    {nqn: plain, want: "host ID must be given"},
		"bad nqn":            {nqn: "me", want: `must begin with "nqn."`},
		"bad id":             {nqn: plain, id: "1234", want: "is not a UUID"},
		"zero id":            {nqn: plain, id: "00000000-0000-0000-0000-000000000000", want: "identifies no host"},
		"bad config.json":    {files: map[string]string{"config.json": "{"}, want: "config.json"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for f, content := range x.files {
				if err := os.WriteFile(filepath.Join(dir, f), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			dmi := filepath.Join(dir, "dmi")
			if err := os.WriteFile(dmi, []byte(x.dmi), 0o600); err != nil {
				t.Fatal(err)
			}
			i, err := loadIdentity(x.nqn, x.id, dir, dmi)
			switch {
			case x.want == "random":
				if err != nil || !strings.HasPrefix(i.Source, "random") || CheckIdentity(i.HostNQN, i.HostID) != nil {
					t.Error(i, err)
				}
			case x.want != "":
				if err == nil || !strings.Contains(err.Error(), x.want) {
					t.Error(i, err)
				}
			default:
				if err != nil || i.HostNQN != x.wantNQN || nvme.UUID(i.HostID).String() != x.wantID {
					t.Error(i, err)
				}
			}
		})
	}
}

func TestCaseH12MismatchedIdentity(t *testing.T) {
	other := testHostID
	other[0]++
	err := CheckIdentity(testNQN, other)
	if err == nil || !strings.Contains(err.Error(), nvme.UUID(testHostID).String()) {
		t.Error(err)
	}
}
