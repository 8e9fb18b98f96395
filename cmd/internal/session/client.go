package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"farblk/host/nvme"
)

// StatusTimeout bounds how long a session may take to say how it is.
const StatusTimeout = 2 * time.Second

// List asks every session of the state directory at once, and shows those that do not answer within
// StatusTimeout as Unresponsive, with what is known of them. What dead sessions left is removed first.
func (d *StateDir) List() ([]Status, error) {
	d.Sweep()
	entries, err := d.Scan()
	if slices.ContainsFunc(entries, func(e Entry) bool { return !e.Alive }) { // died since, or is to stay
		d.Sweep()
		entries, err = d.Scan()
	}
	if err != nil {
		return nil, err
	}
	all := make([]Status, len(entries))
	var wg sync.WaitGroup
	for i, e := range entries {
		if !e.Alive { // what Sweep has left
			all[i] = e.Crashed()
			continue
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), StatusTimeout)
			defer cancel()
			if err := askStatus(ctx, e.Path, &all[i]); err != nil {
				all[i] = Status{Name: e.Name, State: Unresponsive, Error: err.Error(), Config: e.Config, Address: e.Config.Address().String()}
			}
		})
	}
	wg.Wait()
	ended := make([]bool, len(all))
	for i, s := range all {
		ended[i] = s.State == Unresponsive && ends(d.folder(s.Name), 200*time.Millisecond)
	}
	d.Sweep()
	left := all[:0]
	for i, e := range entries {
		switch _, err := readConfig(e.Path); {
		case !ended[i] || alive(e.Path):
			left = append(left, all[i])
		case err == nil: // it has died just now, and its devices are in use
			left = append(left, e.Crashed())
		} // else it was ending, which is no news
	}
	return left, nil
}

// askStatus asks the session in the folder how it is. One that is just starting or ending has no socket for a moment.
func askStatus(ctx context.Context, path string, s *Status) error {
	for {
		err := call(ctx, path, http.MethodGet, "/status", nil, s)
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) || !alive(path) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.New("it does not listen on its control socket")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Crashed shows a session that died while its devices were in use.
func (e Entry) Crashed() Status {
	s := Status{
		Name: e.Name, State: Crashed, Config: e.Config, Address: e.Config.Address().String(),
		Error: fmt.Sprintf("its process died while its devices were in use: each request to a block device waits for %v, then it fails: "+
			"connect again in the same way to go on, or disconnect it with --force; its log is %s", e.Config.DeadTimeout(), filepath.Join(e.Path, "log")),
	}
	for _, l := range readLeftovers(e.Path) {
		s.Namespaces = append(s.Namespaces, NamespaceStatus{
			Namespace: Namespace{NSID: l.NSID, Exports: []Export{{Kind: l.Kind, Path: l.Path}}},
		})
	}
	return s
}

// ends tells whether a session's process ends in time: one that was killed may still be giving back its memory.
func ends(path string, in time.Duration) bool {
	for end := time.Now().Add(in); alive(path); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// Find picks the sessions that what names: a session ("farblk0"), a subsystem's NQN (perhaps several), or the
// path of an export: device, file or socket.
func (d *StateDir) Find(what string) ([]Status, error) {
	all, err := d.List()
	if err != nil {
		return nil, err
	}
	path, err := filepath.Abs(what)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(s Status) bool { return !s.isCalled(what, path) }), nil
}

// IsCalled is what Find goes by.
func (s *Status) IsCalled(what string) bool {
	path, err := filepath.Abs(what)
	return err == nil && s.isCalled(what, path)
}

// isCalled is IsCalled with what as an absolute path, too.
func (s *Status) isCalled(what, path string) bool {
	if s.Name == what || s.Config.Subsystem == what {
		return true
	}
	for _, e := range s.Config.Exports { // counts also while the session does not answer
		if e.Where != "" && (e.Where == path || e.Where == what) {
			return true
		}
	}
	for _, n := range s.Namespaces {
		if what == fmt.Sprintf("%sn%d", s.Name, n.NSID) {
			return true
		}
		for _, e := range n.Exports {
			if e.Path == path || e.Path == what || e.URI == what || e.Kind == KindFUSE && filepath.Dir(e.Path) == path {
				return true
			}
		}
	}
	return false
}

// Disconnect asks the session called name to disconnect and waits until its process has ended and its folder is
// gone. With force it does so though exports are in use, and kills a session that does not answer in time. Errors:
// *BusyError and *UnfinishedError when the session goes on.
func (d *StateDir) Disconnect(ctx context.Context, name string, force bool) error {
	path := d.folder(name)
	if !alive(path) {
		return d.clear(name, force)
	}
	process, err := openOwner(path) // not before: it is this owner's
	if err == nil {
		defer unix.Close(process)
	}
	switch {
	case !alive(path):
		return d.clear(name, force)
	case err != nil: // it has not written its number yet
		return fmt.Errorf("%s is just being started: try again", name)
	}
	begin := time.Now()
	err = askToDisconnect(ctx, path, force)
	var busy *BusyError
	var unfinished *UnfinishedError
	if errors.As(err, &busy) || errors.As(err, &unfinished) || errors.Is(err, context.Canceled) {
		return err
	}
	patience := 200 * time.Millisecond
	if hungUp(err) { // nobody is there any more: what it had is being given back
		patience = 2 * time.Second
	}
	if err != nil && !exits(process, patience) {
		if !force {
			return fmt.Errorf("%s does not answer (%v): --force kills it", name, err)
		}
		if err := unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("%s: %w", name, os.NewSyscallError("pidfd_send_signal", err))
		}
	}
	// The kernel may take a moment to give back what the process had.
	if !exits(process, max(time.Second, disconnectLimit-time.Since(begin))) {
		return fmt.Errorf("%s has disconnected but its process does not end", name)
	}
	return d.clear(name, force)
}

// hungUp tells whether an error of call means that the other end's process had no socket any more, or let go of it.
func hungUp(err error) bool {
	return slices.ContainsFunc([]error{unix.ECONNREFUSED, unix.ENOENT, unix.ECONNRESET, unix.EPIPE, io.EOF, io.ErrUnexpectedEOF},
		func(e error) bool { return errors.Is(err, e) })
}

// askToDisconnect asks a session that answers at all.
func askToDisconnect(ctx context.Context, path string, force bool) error {
	sctx, cancel := context.WithTimeout(ctx, StatusTimeout)
	defer cancel()
	if err := call(sctx, path, http.MethodGet, "/status", nil, new(Status)); err != nil {
		return err
	}
	dctx, cancel := context.WithTimeout(ctx, disconnectLimit)
	defer cancel()
	return call(dctx, path, http.MethodPost, "/disconnect", disconnectRequest{force}, nil)
}

// openOwner opens a handle (pidfd) of the process that owns a session's folder; -1 with an error. The caller looks
// afterwards whether the folder is still locked: a process's number can be given to another one.
func openOwner(path string) (int, error) {
	pid, err := owner(path)
	if err != nil {
		return -1, err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, os.NewSyscallError("pidfd_open", err)
	}
	return fd, nil
}

// exits waits until a process has ended, all of its threads included.
func exits(pidfd int, in time.Duration) bool {
	for end := time.Now().Add(in); ; {
		left := time.Until(end)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(max(left.Milliseconds(), 0)))
		if n > 0 {
			return true
		}
		if !errors.Is(err, unix.EINTR) && left <= 0 {
			return false
		}
	}
}

// clear removes what a session whose process is gone has left. Errors: *BusyError.
func (d *StateDir) clear(name string, force bool) error {
	d.clearing.Lock()
	defer d.clearing.Unlock()
	unlock, err := lockDir(d.Path, lockLimit)
	if err != nil {
		return err
	}
	defer unlock()
	path := d.folder(name)
	if alive(path) {
		return nil // the next one, under the same name
	}
	if err := d.removeLeftovers(path, force); err != nil {
		return err
	}
	if err := d.bury(path, force); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Admin passes an admin command to the session called name. An error status of the controller is a
// *nvme.StatusError.
func (d *StateDir) Admin(ctx context.Context, name string, q AdminRequest) (*AdminResponse, error) {
	a := new(AdminResponse)
	if err := call(ctx, d.folder(name), http.MethodPost, "/admin", q, a); err != nil {
		return nil, err
	}
	if !a.Status.OK() {
		return nil, &nvme.StatusError{Opcode: q.Opcode, Admin: true, Status: a.Status, Result: a.Result}
	}
	return a, nil
}

// Metrics writes the metrics of the session called name in Prometheus' text format.
func (d *StateDir) Metrics(ctx context.Context, name string, w io.Writer) error {
	return call(ctx, d.folder(name), http.MethodGet, "/metrics", nil, w)
}

// call makes one request to the session with the given folder. answer is decoded into, or written to if it is an
// io.Writer.
func call(ctx context.Context, folder, method, path string, body, answer any) error {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(folder, "socket"))
		},
		DisableKeepAlives: true,
	}
	defer t.CloseIdleConnections()
	var b bytes.Buffer
	if body != nil {
		if err := json.NewEncoder(&b).Encode(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://session"+path, &b)
	if err != nil {
		return err
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("no answer in time: %w", ctx.Err())
		}
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var e errorBody
		if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Error == "" {
			return fmt.Errorf("the session answered %s", resp.Status)
		}
		if e.Busy {
			return &BusyError{Detail: e.Error}
		}
		if e.Unfinished {
			return &UnfinishedError{Detail: e.Error}
		}
		return errors.New(e.Error)
	}
	switch a := answer.(type) {
	case nil:
		return nil
	case io.Writer:
		_, err = io.Copy(a, resp.Body)
	default:
		err = json.NewDecoder(resp.Body).Decode(a)
	}
	return err
}
