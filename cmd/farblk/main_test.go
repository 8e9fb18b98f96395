package main

import (
	"bufio"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"
)

// leakChecked fails a run that leaves goroutines behind.
type leakChecked struct{ m *testing.M }

func (l leakChecked) Run() int {
	status := l.m.Run()
	if status == 0 {
		if err := goleak.Find(); err != nil {
			_, _ = os.Stderr.WriteString(err.Error() + "\n")
			return 1
		}
	}
	return status
}

func TestMain(m *testing.M) {
	testscript.Main(leakChecked{m}, map[string]func(){"farblk": main})
}

// TestScript runs the command line as a user does. Each script has a state directory of its own. A line of its own
// kind, `quick`, is `exec` with the limit of five seconds that every failure and every disconnect must keep.
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			e.Setenv("FARBLK_STATE_DIR", filepath.Join(e.WorkDir, "s"))
			e.Setenv("HOSTNQN", "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555")
			return nil
		},
		Condition: func(c string) (bool, error) {
			switch c {
			case "fuse":
				f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
				if err == nil {
					f.Close()
				}
				return err == nil && os.Geteuid() == 0, nil
			case "rdma":
				all, _ := filepath.Glob("/sys/class/infiniband/*")
				return len(all) > 0, nil
			case "nbd":
				_, err := os.Stat("/sys/module/nbd")
				return err == nil, nil
			case "root":
				return os.Geteuid() == 0, nil
			}
			return false, nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"quick":      quick,
			"target":     startTarget,
			"kill9":      kill9,
			"freeze":     freeze,
			"hold":       hold,
			"foreground": foreground,
			"terminate":  terminate,
		},
	})
}

// quick is exec; what fails, and disconnect, must not take five seconds.
func quick(ts *testscript.TestScript, neg bool, args []string) {
	begin := time.Now()
	err := ts.Exec(args[0], args[1:]...)
	if took := time.Since(begin); took > 5*time.Second && (neg || slices.Contains(args, "disconnect")) {
		ts.Fatalf("took %v", took)
	}
	if neg != (err != nil) {
		ts.Fatalf("unexpected outcome: %v", err)
	}
	if neg && strings.Count(ts.ReadFile("stderr"), "\n") != 1 {
		ts.Fatalf("not one line on standard error")
	}
}

var ready = regexp.MustCompile(`^listening on .*:([0-9]+) \(`)

// startTarget runs `farblk target` on software iWARP with the given options until the script ends, and puts its port
// into $PORT.
func startTarget(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("target cannot be negated")
	}
	cmd := exec.Command("/proc/self/exe", append([]string{"target", "--listen", "127.0.0.1:0", "--provider", "iwarp"}, args...)...)
	cmd.Args[0] = "farblk"
	out, err := cmd.StdoutPipe()
	ts.Check(err)
	in, err := cmd.StdinPipe()
	ts.Check(err)
	cmd.Stderr = os.Stderr
	ts.Check(cmd.Start())
	ts.Defer(func() {
		in.Close()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			ts.Logf("target: %v", err)
		}
	})
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		ts.Fatalf("the target did not start")
	}
	m := ready.FindStringSubmatch(lines.Text())
	if m == nil {
		ts.Fatalf("the target said %q", lines.Text())
	}
	ts.Setenv("PORT", m[1])
	go func() {
		for lines.Scan() { // keeps the pipe empty until the target ends
		}
	}()
}

func sessionPID(ts *testscript.TestScript, name string) int {
	b, err := os.ReadFile(filepath.Join(ts.Getenv("FARBLK_STATE_DIR"), name, "lock"))
	ts.Check(err)
	pid, err := strconv.Atoi(string(b))
	ts.Check(err)
	return pid
}

// kill9 kills the process of a session and waits until it is gone.
func kill9(ts *testscript.TestScript, _ bool, args []string) {
	pid := sessionPID(ts, args[0])
	ts.Check(syscall.Kill(pid, syscall.SIGKILL))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for syscall.Kill(pid, 0) == nil && !zombie(pid) {
		select {
		case <-ctx.Done():
			ts.Fatalf("process %d does not end", pid)
		case <-time.After(time.Millisecond):
		}
	}
}

func zombie(pid int) bool {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "Z")
}

// freeze stops the process of a session; it is killed when the script ends.
func freeze(ts *testscript.TestScript, _ bool, args []string) {
	pid := sessionPID(ts, args[0])
	ts.Check(syscall.Kill(pid, syscall.SIGSTOP))
	ts.Defer(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
}

// hold keeps a file open in another process until the script ends.
func hold(ts *testscript.TestScript, _ bool, args []string) {
	f, err := os.Open(args[0])
	ts.Check(err)
	defer f.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.Stdin = f
	ts.Check(cmd.Start())
	ts.Defer(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

var foregrounds sync.Map // *testscript.TestScript: *exec.Cmd

// foreground starts `farblk connect --foreground` with a service manager's socket, and waits until it says that it is
// ready.
func foreground(ts *testscript.TestScript, _ bool, args []string) {
	path := filepath.Join(ts.Getenv("WORK"), "notify")
	_ = os.Remove(path)
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	ts.Check(err)
	defer l.Close()
	cmd := exec.Command("/proc/self/exe", append([]string{"connect", "--foreground"}, args...)...)
	cmd.Args[0] = "farblk"
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+path, "FARBLK_STATE_DIR="+ts.Getenv("FARBLK_STATE_DIR"))
	ts.Check(cmd.Start())
	foregrounds.Store(ts, cmd)
	ts.Defer(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	ts.Check(l.SetReadDeadline(time.Now().Add(10 * time.Second)))
	b := make([]byte, 1000)
	n, err := l.Read(b)
	ts.Check(err)
	if !strings.HasPrefix(string(b[:n]), "READY=1") {
		ts.Fatalf("notified %q", b[:n])
	}
}

// terminate sends SIGTERM to the running `foreground`, which must end well and soon.
func terminate(ts *testscript.TestScript, _ bool, _ []string) {
	v, _ := foregrounds.Load(ts)
	cmd := v.(*exec.Cmd)
	begin := time.Now()
	ts.Check(cmd.Process.Signal(syscall.SIGTERM))
	ts.Check(cmd.Wait())
	if took := time.Since(begin); took > 5*time.Second {
		ts.Fatalf("took %v", took)
	}
}
