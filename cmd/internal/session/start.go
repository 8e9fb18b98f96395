package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Descriptors that a session's process inherits.
const (
	lockFD  = 3
	readyFD = 4
)

// message is what a starting session reports to the process that waits for it.
type message struct {
	Result *Result `json:"result,omitempty"`
	Error  string  `json:"error,omitempty"`
}

// Start runs `farblk args... FOLDER` as the session's own process, detached from this one, and waits until it
// has reported. The new process takes the folder over; when it fails it has removed it. When ctx ends first, the
// session is told to stop and waited for.
func (f *Folder) Start(ctx context.Context, args ...string) (*Result, error) {
	log, err := os.OpenFile(f.file("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		f.Remove()
		return nil, fmt.Errorf("session log: %w", err)
	}
	defer log.Close()
	ready, report, err := os.Pipe()
	if err != nil {
		f.Remove()
		return nil, err
	}
	defer ready.Close()
	cmd := exec.Command("/proc/self/exe", append(args, f.Path)...)
	cmd.Args[0] = "farblk"
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{f.lock, report} // lockFD, readyFD
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// Nothing else that this process was given may live on in the session, such as a script's lock. (Linux 5.11.)
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	err = startFlusher(cmd)
	report.Close()
	if err != nil {
		f.Remove()
		return nil, fmt.Errorf("cannot start the session's process: %w", err)
	}
	f.lock.Close() // the child has it

	got := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(ready)
		got <- b
	}()
	var b []byte
	select {
	case b = <-got:
	case <-ctx.Done():
		_ = cmd.Process.Signal(syscall.SIGTERM)
		f.reap(cmd)
		return nil, errors.New("interrupted")
	}
	var m message
	switch err := json.Unmarshal(b, &m); {
	case err == nil && m.Result != nil:
		return m.Result, nil
	case err == nil && m.Error != "":
		f.reap(cmd)
		return nil, errors.New(m.Error)
	}
	state := f.reap(cmd)
	return nil, fmt.Errorf("the session's process ended (%s) before it was ready%s", state, f.words)
}

// startFlusher starts cmd with the I/O flusher state, where that is allowed: memory that the kernel allocates for
// a process that serves a block device must not wait for that same device to write pages back. The state belongs
// to a thread and is inherited, so the process must be born with it for all of its threads to have it.
func startFlusher(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0) == nil {
		defer func() { _ = unix.Prctl(unix.PR_SET_IO_FLUSHER, 0, 0, 0, 0) }()
	}
	return cmd.Start()
}

// reap waits for a session that has failed or was told to stop, kills it if it does not end, and removes what it
// left behind.
func (f *Folder) reap(cmd *exec.Cmd) *os.ProcessState {
	kill := time.AfterFunc(4*time.Second, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait()
	kill.Stop()
	unlock, err := lockDir(f.dir.Path, lockLimit)
	if err != nil {
		return cmd.ProcessState // the next one to look does the rest
	}
	defer unlock()
	if _, err := os.Stat(f.Path); err != nil || alive(f.Path) { // it has removed it, and the name may have been taken
		return cmd.ProcessState
	}
	f.words = f.lastWords() // read before the log goes
	if f.dir.removeLeftovers(f.Path, false) == nil && f.dir.noteFailedStart(f.Path) == nil {
		if kept := f.dir.keepLog(f.Path); kept != "" && f.words != "" {
			f.words += " (its log is " + kept + ")"
		}
		removeFolder(f.Path)
	}
	return cmd.ProcessState
}

// lastWords is the end of the session's log, for a message: ": LINE".
func (f *Folder) lastWords() string {
	b, err := os.ReadFile(f.file("log"))
	if err != nil {
		return ""
	}
	for _, mark := range []string{"panic: ", "fatal error: "} { // says more than the end of its trace
		if i := bytes.Index(b, []byte(mark)); i >= 0 {
			b, _, _ = bytes.Cut(b[i:], []byte("\n"))
		}
	}
	b = bytes.TrimSpace(b)
	if len(b) == 0 {
		return ""
	}
	return ": " + string(b[bytes.LastIndexByte(b, '\n')+1:])
}

// Report tells the process that waits for this session how its start went, once. It fails when nobody waits any
// more.
type Report struct{ w *os.File }

// Inherited takes the descriptors that Start gave to this process.
func Inherited(path string) (*Folder, *Config, *Report, error) {
	unix.CloseOnExec(readyFD)
	unix.CloseOnExec(lockFD)
	lock, w := os.NewFile(lockFD, "lock"), os.NewFile(readyFD, "ready")
	f := &Folder{Path: path, lock: lock}
	inherited, err := lock.Stat()
	if err != nil {
		return nil, nil, nil, errors.New("this command is for farblk itself")
	}
	if own, err := os.Stat(f.file("lock")); err != nil || !os.SameFile(own, inherited) {
		return nil, nil, nil, errors.New("this command is for farblk itself")
	}
	c, err := readConfig(path)
	if err == nil {
		err = f.Own()
	}
	return f, c, &Report{w}, err
}

// Ready reports success.
func (r *Report) Ready(res *Result) error { return r.send(message{Result: res}) }

// Failed reports why the session did not start.
func (r *Report) Failed(err error) error { return r.send(message{Error: err.Error()}) }

func (r *Report) send(m message) error {
	if r.w == nil {
		return nil
	}
	err := json.NewEncoder(r.w).Encode(m)
	if cerr := r.w.Close(); err == nil {
		err = cerr
	}
	r.w = nil
	return err
}
