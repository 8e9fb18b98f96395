package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
)

// What makes no sense is answered with one line that says so and where to find help, exit status 1, and nothing done.
func TestUsage(t *testing.T) {
	t.Setenv("FARBLK_STATE_DIR", t.TempDir()+"/s")
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	const host = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
	for _, c := range []struct{ args, want string }{
		{"conect", `^farblk: unknown command "conect": try 'farblk --help'$`},
		{"connect -a 127.0.0.1", `farblk connect: no subsystem given \(-n\): try 'farblk connect --help'`},
		{"connect -n nqn.a", `no address given \(-a\)`},
		{"connect -a 127.0.0.1 -n nqn.a --no-such-option", `unknown option --no-such-option`},
		{"connect -a 127.0.0.1 -n nqn.a -x", `unknown option -x`},
		{"connect -a 127.0.0.1 -n", `option -n needs a value`},
		{"connect -a 127.0.0.1 -n nqn.a leftover", `unexpected argument "leftover"`},
		{"list --output-format", `option --output-format needs a value`},
		{"list -o xml", `--output-format "xml": text or json`},
		{"connect -a 127.0.0.1 -n not-an-nqn", `NQN "not-an-nqn": it must begin with "nqn."`},
		{"connect -a 127.0.0.1 -n nqn.a -q nonsense", `nonsense`},
		{"connect -a 127.0.0.1 -n nqn.a -I nonsense", `host ID`},
		{"connect -a 127.0.0.1 -n nqn.a -q NQN -I 22222222-2222-3333-4444-555555555555", `do not belong together`},
		{"connect -a 1.2.3.4.5 -n nqn.a -q NQN", `address "1.2.3.4.5" is neither an IP address nor a host name`},
		{"connect -a 10.0.0.1:4420 -n nqn.a -q NQN", `give the port with -s 4420`},
		{"connect -a 0.0.0.0 -n nqn.a -q NQN", `names no machine`},
		{"connect -a 224.0.0.1 -n nqn.a -q NQN", `multicast`},
		{"connect -a fe80::1 -n nqn.a -q NQN", `fe80::1 is link-local: say on which link`},
		{"connect -a fe80::1%no-such-link -n nqn.a -q NQN", `no network interface "no-such-link"`},
		{"connect -a no-such-host.invalid -n nqn.a -q NQN", `cannot resolve "no-such-host.invalid"`},
		{"connect -a 127.0.0.1 -w ::1 -n nqn.a -q NQN", `not of one kind`},
		{"connect -a 127.0.0.1 -f no-such-device -n nqn.a -q NQN", `no RDMA device or network interface "no-such-device"`},
		{"connect -a 127.0.0.1 --adrfam ib -n nqn.a -q NQN", `not an InfiniBand GID`},
		{"connect -a 127.0.0.1 -s 70000 -n nqn.a -q NQN", `port "70000" is not a number from 1 to 65535`},
		{"connect -a 127.0.0.1 -n nqn.a -i 0", `nr-io-queues "0"`},
		{"connect -a 127.0.0.1 -n nqn.a -Q5", `queue-size "5" is not a number from 16 to 1024`},
		{"connect -a 127.0.0.1 -n nqn.a -k x", `keep-alive-tmo "x" is not a number of seconds from 0 to 4294967.295, nor such a time`},
		{"connect -a 127.0.0.1 -n nqn.a --io-timeout -3", `io-timeout "-3" is not a number of seconds from 0.001 to 86400`},
		{"connect -a 127.0.0.1 -n nqn.a --io-timeout 4000000000", `io-timeout "4000000000" is not a number of seconds from 0.001 to 86400`},
		{"connect -a 127.0.0.1 -n nqn.a --io-timeout 9999999h", `io-timeout "9999999h" is not .* from 0.001 to 86400`},
		{"connect -a 127.0.0.1 -n nqn.a -l 1e999", `ctrl-loss-tmo "1e999" is not a number of seconds from -1 to 31536000`},
		{"connect -a 127.0.0.1 -n nqn.a -F -2", `fast_io_fail_tmo "-2" is not a number of seconds from -1 to 31536000`},
		{"connect -a 127.0.0.1 -n nqn.a -k 4294968", `keep-alive-tmo "4294968" is not`},
		{"connect -a 127.0.0.1 -n nqn.a --pool-size 12Q", `pool-size "12Q" is not a size from 4 MiB to 1 TiB`},
		{"connect -a 127.0.0.1 -n nqn.a --pool-size 4000000000G", `pool-size "4000000000G" is not a size from 4 MiB to 1 TiB`},
		{"connect -a 127.0.0.1 -n nqn.a --tos 256", `tos "256"`},
		{"connect -a 127.0.0.1 -n nqn.a --provider magic", `--provider "magic": auto, verbs or iwarp`},
		{"connect -a 127.0.0.1 -n nqn.a -t tcp", `transport "tcp" is not supported: only rdma is`},
		{"connect -a 127.0.0.1 -n nqn.a -S DHHC-1:00:x:", `authentication .* is not supported`},
		{"connect -a 127.0.0.1 -n nqn.a --export floppy", `unknown export "floppy"`},
		{"connect -a 127.0.0.1 -n nqn.a --export nbd=/dev/sda", `"/dev/sda" is not a device /dev/nbdN`},
		{"connect -a 127.0.0.1 -n nqn.a --export nbd-tcp", `say where to listen`},
		{"connect -a 127.0.0.1 -n nqn.a --export nbd-tcp=127.0.0.1:x", `"x" is not a port`},
		{"connect -a 127.0.0.1 -n nqn.a --export ublk", `ublk is not yet supported`},
		{"connect -a 127.0.0.1 -n nqn.a --export none --export nbd-unix", `excludes the others`},
		{"connect -a 127.0.0.1 -n nqn.a --export nbd-unix=/a --export nbd-unix=/a", `is given twice`},
		{"connect-all -a 127.0.0.1 --export fuse=/x", `give no place`},
		{"disconnect", `say what to disconnect`},
		{"disconnect --all farblk0", `exclude each other`},
		{"disconnect -n nqn.a", `nqn.a: no such connection`},
		{"id-ctrl", `no DEVICE given`},
		{"id-ctrl /dev/nbd1", `/dev/nbd1: no such connection, subsystem or device`},
		{"id-ctrl EMPTY", `no DEVICE given: try 'farblk id-ctrl --help'`},
		{"bench", `say what to measure`},
		{"bench -a 127.0.0.1 -n nqn.a --rw sideways", `--rw "sideways"`},
		{"bench -a 127.0.0.1 -n nqn.a --bs 100", `--bs "100" is not a size from 512 B to 1 MiB`},
		{"bench -a 127.0.0.1 -n nqn.a --bs 1000", `--bs 1000 is not a multiple of 512`},
		{"bench -a 127.0.0.1 -n nqn.a --size 0", `--size "0"`},
		{"bench -a 127.0.0.1 -n nqn.a --rw write", `overwrites what is on the namespace`},
		{"bench -a 127.0.0.1 -n nqn.a --time 0", `--time "0" is not a number of seconds from 0.001 to 86400`},
		{"bench /dev/null -a 127.0.0.1", `--traddr goes without DEVICE`},
		{"target -n nqn.a", `say where to listen`},
		{"target --listen 127.0.0.1:0 -n nqn.a --size 12Q", `size "12Q"`},
		{"target --listen 127.0.0.1:0 -n nqn.a --size 1000", `not a multiple of the block size`},
		{"target --listen nowhere -n nqn.a", `is not ADDRESS`},
		{"target --listen 127.0.0.1:0 -n nqn.a --file EMPTY", `--file is empty`},
		{"target --listen 127.0.0.1:0 -n nqn.a --file /nowhere/x --file /nowhere/x", `--file /nowhere/x is given twice`},
		{"completion fish", `no completion for the shell "fish"`},
	} {
		var stdout, stderr bytes.Buffer
		args := strings.Fields(strings.ReplaceAll(c.args, "NQN", host))
		for i := range args {
			args[i] = strings.TrimPrefix(args[i], "EMPTY")
		}
		status := run(args, &stdout, &stderr)
		line := stderr.String()
		if status != 1 || stdout.Len() > 0 || strings.Count(line, "\n") != 1 || !regexp.MustCompile("(?m)"+c.want).MatchString(line) {
			t.Errorf("farblk %s: exit status %d, printed %q and on standard error %q, want one line that matches %q", c.args, status, &stdout, line, c.want)
		}
	}
}

// nvme-cli's words for the times that are not times: 0 is at once, -1 is never. (The host's are others.)
func TestAtOnceAndNever(t *testing.T) {
	for args, want := range map[string][2]time.Duration{ // controller loss, fast I/O fail
		"":                     {0, 0},
		"-l=-1 -F=-1":          {-time.Second, 0},
		"-l=0 -F=0":            {1, 1},
		"-l=5 -F=2.5":          {5 * time.Second, 2500 * time.Millisecond},
		"--fast-io-fail-tmo=0": {0, 1},
	} {
		var s session.Config
		app := &cli.App{Flags: tuningFlags(), Action: func(c *cli.Context) error { return tuning(c, &s) }}
		if err := app.Run(append([]string{"x"}, strings.Fields(args)...)); err != nil || s.CtrlLoss != want[0] || s.FastIOFail != want[1] {
			t.Errorf("%s: controller loss %v, fast I/O fail %v, %v", args, s.CtrlLoss, s.FastIOFail, err)
		}
	}
}

// Commands that need no connection.
func TestAlone(t *testing.T) {
	t.Setenv("FARBLK_STATE_DIR", t.TempDir()+"/s")
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	for _, c := range []struct{ args, want string }{
		{"--help", `connect-all`},
		{"connect --help", `keep-alive`},
		{"list", `NAME .*SUBSYSTEM`},
		{"list -o json", `"devices": \[\]`},
		{"list-subsys -o json", `^\[\]$`},
		{"disconnect --all", ``},
		{"version", `^farblk `},
		{"version -o json", `"version":`},
		{"gen-hostnqn", `^nqn.2014-08.org.nvmexpress:uuid:[0-9a-f-]{36}$`},
		{"completion bash", `complete .* farblk`},
		{"connect --generate-bash-completion", `(?m)^--keep-alive-tmo$`},
		{"connect --generate-bash-completion", `(?m)^-o=json$`},
		{"connect --generate-bash-completion", `(?m)^--export=nbd-unix$`},
	} {
		var stdout, stderr bytes.Buffer
		if status := run(strings.Fields(c.args), &stdout, &stderr); status != 0 || stderr.Len() > 0 || !regexp.MustCompile("(?m)"+c.want).MatchString(stdout.String()) {
			t.Errorf("farblk %s: exit status %d, printed %q and on standard error %q, want %q", c.args, status, &stdout, &stderr, c.want)
		}
	}
}

// Nonsense on a target's standard input is answered, however long it is, and the next line obeyed.
func TestTargetControl(t *testing.T) {
	var out strings.Builder
	controlTarget(strings.NewReader(strings.Repeat("x", 1<<20)+"\n\n resize 1\nadd 7\nadd"), &out, nil, nil, &targetConfig{blockSize: 512})
	const want = `^error: x{40}: unknown command
error: resize: takes 2 more words, not 1
error: add: 7 is not a multiple of the block size 512
error: add: takes 1 more words, not 0
$`
	if !regexp.MustCompile(want).MatchString(out.String()) {
		t.Errorf("%s", out.String())
	}
}

// Operands may stand before options, and letters together, as getopt has it.
func TestNormalise(t *testing.T) {
	c := idNSCommand()
	for args, want := range map[string]string{
		"id-ns farblk0 -n 1":         "id-ns -n=1 -- farblk0",
		"id-ns -n1 farblk0 -o json":  "id-ns -n=1 -o=json -- farblk0",
		"id-ns --namespace-id=2 x":   "id-ns --namespace-id=2 -- x",
		"id-ns --namespace-id 2 x":   "id-ns --namespace-id=2 -- x",
		"id-ns -- -n":                "id-ns -- -n",
		"id-ns -ojson -h":            "id-ns -o=json -h",
		"id-ns -n -1 -":              "id-ns -n=-1 -- -",
		"id-ns --output-format json": "id-ns --output-format=json",
	} {
		got, err := normalise(strings.Fields(args), c)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %q, %v; want %s", args, got, err, want)
		}
	}
}
