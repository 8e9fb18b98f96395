package main

import (
	"bufio"
	"encoding/binary"
	"io"
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
	"golang.org/x/sys/unix"
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
			e.Setenv("XDG_STATE_HOME", filepath.Join(e.WorkDir, "home"))
			e.Setenv("HOSTNQN", "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555")
			e.Defer(func() { killSessions(filepath.Join(e.WorkDir, "s")) })
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
			"quick":       quick,
			"target":      startTarget,
			"kill9":       kill9,
			"freeze":      freeze,
			"hold":        hold,
			"foreground":  foreground,
			"terminate":   terminate,
			"tell":        tell,
			"stop-target": stopTarget,
			"silent":      silent,
			"eventually":  eventually,
			"interrupt":   interrupt,
			"nbd-client":  nbdClient,
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
	cmd := exec.Command("/proc/self/exe", append([]string{"target", "--listen", "127.0.0.1:0", "--provider", "iwarp", "--control"}, args...)...)
	cmd.Args[0] = "farblk"
	out, err := cmd.StdoutPipe()
	ts.Check(err)
	in, err := cmd.StdinPipe()
	ts.Check(err)
	cmd.Stderr = os.Stderr
	ts.Check(cmd.Start())
	tt := &runningTarget{cmd: cmd, in: in, lines: make(chan string, 100)}
	go func() {
		defer close(tt.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			tt.lines <- s.Text()
		}
	}()
	targets.Store(ts, tt)
	ts.Defer(tt.stop)
	m := ready.FindStringSubmatch(<-tt.lines)
	if m == nil {
		ts.Fatalf("the target did not say where it listens")
	}
	ts.Setenv("PORT", m[1])
}

// runningTarget is the process of startTarget.
type runningTarget struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string // what it prints
	once  sync.Once
}

var targets sync.Map // *testscript.TestScript: the newest *runningTarget

func (r *runningTarget) stop() {
	r.once.Do(func() {
		r.in.Close()
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
		_ = r.cmd.Wait()
		for range r.lines {
		}
	})
}

func stopTarget(ts *testscript.TestScript, _ bool, _ []string) {
	v, _ := targets.Load(ts)
	v.(*runningTarget).stop()
}

// tell gives the target a command of its --control and waits until it has obeyed.
func tell(ts *testscript.TestScript, _ bool, args []string) {
	v, _ := targets.Load(ts)
	r := v.(*runningTarget)
	_, err := io.WriteString(r.in, strings.Join(args, " ")+"\n")
	ts.Check(err)
	timeout := time.After(10 * time.Second)
	for {
		select {
		case line, ok := <-r.lines:
			if strings.HasPrefix(line, "ok: ") {
				return
			}
			if !ok || strings.HasPrefix(line, "error") {
				ts.Fatalf("the target said %q", line)
			}
		case <-timeout:
			ts.Fatalf("the target did not obey")
		}
	}
}

// silent listens on $PORT, accepts and never says anything.
func silent(ts *testscript.TestScript, _ bool, _ []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	}()
	ts.Defer(func() {
		l.Close()
		<-done
	})
	_, port, _ := net.SplitHostPort(l.Addr().String())
	ts.Setenv("PORT", port)
}

// eventually runs a command again and again until its output matches: what it waits for shows only in there.
func eventually(ts *testscript.TestScript, _ bool, args []string) {
	want := regexp.MustCompile("(?m)" + args[0])
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := ts.Exec(args[1], args[2:]...)
		if err == nil && want.MatchString(ts.ReadFile("stdout")) {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("never matched %s: %v", want, err)
		}
	}
}

// interrupt starts a command, waits until there is a session that tries to connect, and sends SIGINT.
func interrupt(ts *testscript.TestScript, _ bool, args []string) {
	cmd := exec.Command("/proc/self/exe", args[1:]...)
	cmd.Args[0] = args[0]
	cmd.Env = append(os.Environ(), "FARBLK_STATE_DIR="+ts.Getenv("FARBLK_STATE_DIR"))
	stderr, err := os.Create(filepath.Join(ts.Getenv("WORK"), "interrupted"))
	ts.Check(err)
	defer stderr.Close()
	cmd.Stderr = stderr
	ts.Check(cmd.Start())
	ts.Defer(func() { _ = cmd.Process.Kill() })
	eventually(ts, false, []string{"^farblk0 .* connecting ", "farblk", "list"})
	begin := time.Now()
	ts.Check(cmd.Process.Signal(os.Interrupt))
	if err := cmd.Wait(); err == nil {
		ts.Fatalf("interrupted, and yet exit status 0")
	}
	if took := time.Since(begin); took > 5*time.Second {
		ts.Fatalf("took %v", took)
	}
	ts.Check(ts.Exec("cat", stderr.Name()))
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
	process, err := unix.PidfdOpen(pid, 0)
	ts.Check(err)
	defer unix.Close(process)
	ts.Check(unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0))
	ended := []unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}
	if n, err := unix.Poll(ended, 5000); n != 1 {
		ts.Fatalf("process %d does not end: %v", pid, err)
	}
}

// killSessions ends what a script that failed has left running.
func killSessions(dir string) {
	locks, _ := filepath.Glob(dir + "/farblk*/lock")
	for _, path := range locks {
		b, _ := os.ReadFile(path)
		pid, err := strconv.Atoi(string(b))
		args, _ := os.ReadFile("/proc/" + string(b) + "/cmdline")
		if err == nil && strings.Contains(string(args), filepath.Dir(path)) { // the number may be another's by now
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// freeze stops every thread of a session; it is killed when the script ends. It is not our child: that it has stopped
// can only be seen by looking.
func freeze(ts *testscript.TestScript, _ bool, args []string) {
	pid := sessionPID(ts, args[0])
	ts.Check(syscall.Kill(pid, syscall.SIGSTOP))
	ts.Defer(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	running := func() bool {
		stats, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
		return slices.ContainsFunc(stats, func(path string) bool { return !inState(path, "T") })
	}
	for end := time.Now().Add(5 * time.Second); running(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("process %d does not stop", pid)
		}
	}
}

// inState reads a thread's state (proc_pid_stat(5), field 3).
func inState(path, state string) bool {
	b, _ := os.ReadFile(path)
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, state)
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

// terminate sends SIGTERM, or with the argument `hangup` SIGHUP, to the running `foreground`, which must end well and
// soon.
func terminate(ts *testscript.TestScript, _ bool, args []string) {
	v, _ := foregrounds.Load(ts)
	cmd := v.(*exec.Cmd)
	begin := time.Now()
	sig := syscall.SIGTERM
	if slices.Contains(args, "hangup") {
		sig = syscall.SIGHUP
	}
	ts.Check(cmd.Process.Signal(sig))
	ts.Check(cmd.Wait())
	if took := time.Since(begin); took > 5*time.Second {
		ts.Fatalf("took %v", took)
	}
}

// nbdClient negotiates with an NBD server (NBD protocol, "Fixed newstyle negotiation", option NBD_OPT_EXPORT_NAME)
// and stays connected until the script ends.
func nbdClient(ts *testscript.TestScript, _ bool, args []string) {
	c, err := net.Dial("unix", args[0])
	ts.Check(err)
	ts.Defer(func() { c.Close() })
	ts.Check(c.SetDeadline(time.Now().Add(10 * time.Second)))
	_, err = io.ReadFull(c, make([]byte, 18)) // two magics and flags
	ts.Check(err)
	b := binary.BigEndian.AppendUint32(nil, 3) // fixed newstyle, no zeroes
	b = append(b, "IHAVEOPT"...)
	b = binary.BigEndian.AppendUint32(b, 1)
	b = binary.BigEndian.AppendUint32(b, uint32(len(args[1])))
	_, err = c.Write(append(b, args[1]...))
	ts.Check(err)
	_, err = io.ReadFull(c, make([]byte, 10)) // size and flags
	ts.Check(err)
}
