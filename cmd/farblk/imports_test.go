package main_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "farblk"

// mayImport says for each folder which packages of this module its packages may import, besides each other.
// A package belongs to the longest folder here that holds it. ARCHITECTURE.md explains the layers.
var mayImport = map[string][]string{
	"cmd/farblk":             {"*"},
	"cmd/internal/session":   {"host", "host/nvme", "blockdev", "transport"}, // host's own interface is in terms of host/nvme
	"host":                   {"host/nvme", "transport", "blockdev"},
	"host/nvme":              {},
	"transport":              {},
	"transport/rdma":         {"transport", "transport/verbs"},
	"transport/verbs":        {},
	"transport/verbs/rdmacm": {"transport/verbs"},
	"transport/verbs/iwarp":  {"transport/verbs", "transport/verbs/iwarp/internal/mpa", "transport/verbs/iwarp/internal/ddp", "transport/verbs/iwarp/internal/rdmap"},

	"transport/verbs/iwarp/internal/mpa":   {},
	"transport/verbs/iwarp/internal/ddp":   {},
	"transport/verbs/iwarp/internal/rdmap": {},

	"transport/verbs/verbstest": {"transport/verbs"},

	"blockdev":              {},
	"blockdev/blockdevtest": {"blockdev"},
	"blockdev/nbd":          {"blockdev"},
	"blockdev/fuse":         {"blockdev"},
	"blockdev/ublk":         {"blockdev"},
	"target":                {"host/nvme", "transport/verbs"},
	"scripts":               {},
}

// standardOnly lists the folders whose packages import the standard library and nothing else: wire formats.
var standardOnly = []string{
	"host/nvme",
	"transport/verbs/iwarp/internal/mpa",
	"transport/verbs/iwarp/internal/ddp",
	"transport/verbs/iwarp/internal/rdmap",
}

// withCgo is the one folder that may use cgo.
const withCgo = "transport/verbs/rdmacm"

type listed struct {
	ImportPath, Name                   string
	Imports, TestImports, XTestImports []string
	CgoFiles                           []string
}

// TestImports holds the module's packages to the direction of imports that its layers promise.
func TestImports(t *testing.T) {
	for _, p := range listPackages(t) {
		folder, ok := inModule(p.ImportPath)
		if !ok {
			continue
		}
		rule := ruleOf(folder)
		if rule == "" {
			t.Errorf("%s: no rule says what it may import", folder)
			continue
		}
		for _, imported := range p.Imports {
			if fault := importFault(folder, rule, imported); fault != "" {
				t.Errorf("%s imports %s: %s", folder, imported, fault)
			}
		}
		for _, imported := range slices.Concat(p.TestImports, p.XTestImports) {
			if to, ok := inModule(imported); ok && isCommand(to) && !isCommand(folder) {
				t.Errorf("%s, in a test, imports %s: nothing imports a command", folder, to)
			}
		}
		if len(p.CgoFiles) > 0 && rule != withCgo {
			t.Errorf("%s uses cgo in %v: only %s may", folder, p.CgoFiles, withCgo)
		}
	}
}

// importFault says what is wrong with a package in folder, outside its tests, importing another; "" if nothing is.
func importFault(folder, rule, imported string) string {
	to, ok := inModule(imported)
	switch {
	case !ok && slices.Contains(standardOnly, rule) && strings.Contains(strings.Split(imported, "/")[0], "."):
		return "a wire format stands on the standard library alone"
	case !ok:
		return ""
	case isCommand(to) && !isCommand(folder):
		return "nothing imports a command"
	case mayImport[rule] != nil && slices.Contains(mayImport[rule], "*"):
		return ""
	case strings.HasSuffix(path.Base(to), "test"):
		return "what helps tests is for tests"
	case ruleOf(to) != rule && !slices.Contains(mayImport[rule], to):
		return "not one of " + strings.Join(mayImport[rule], ", ")
	}
	return ""
}

// TestImportRules shows that the rules themselves catch what they are there for.
func TestImportRules(t *testing.T) {
	for _, c := range []struct {
		from, to string
		allowed  bool
	}{
		{"host", "farblk/transport", true},
		{"host", "farblk/transport/verbs/iwarp", false},
		{"host/nvme", "farblk/host", false},
		{"host/nvme", "golang.org/x/sys/unix", false},
		{"host/nvme", "encoding/binary", true},
		{"transport/verbs/rdmacm", "farblk/transport/verbs/iwarp", false},
		{"transport/verbs/iwarp", "farblk/transport/verbs/iwarp/internal/mpa", true},
		{"transport/verbs/iwarp/internal/mpa", "farblk/transport/verbs/iwarp/internal/ddp", false},
		{"blockdev/nbd", "farblk/blockdev/fuse", false},
		{"target", "farblk/cmd/internal/session", false},
		{"target", "farblk/transport/verbs/verbstest", false},
		{"cmd/farblk", "farblk/cmd/internal/session", true},
		{"cmd/farblk", "farblk/blockdev/blockdevtest", true},
	} {
		if fault := importFault(c.from, ruleOf(c.from), c.to); (fault == "") != c.allowed {
			t.Errorf("%s imports %s: allowed %v, fault %q", c.from, c.to, c.allowed, fault)
		}
	}
}

func listPackages(t *testing.T) []listed {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Name,Imports,TestImports,XTestImports,CgoFiles", module+"/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1") // with cgo off its one user is not seen
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []listed
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		all = append(all, p)
	}
	if !slices.ContainsFunc(all, func(p listed) bool { return p.ImportPath == module+"/cmd/farblk" }) {
		t.Fatalf("go list: cmd/farblk is not among the %d packages", len(all))
	}
	return all
}

// ruleOf is the longest folder of mayImport that holds the folder, or "".
func ruleOf(folder string) string {
	for ; folder != "."; folder = path.Dir(folder) {
		if _, ok := mayImport[folder]; ok {
			return folder
		}
	}
	return ""
}

func inModule(importPath string) (folder string, ok bool) {
	return strings.CutPrefix(importPath, module+"/")
}

func isCommand(folder string) bool { return strings.HasPrefix(folder, "cmd/") }
