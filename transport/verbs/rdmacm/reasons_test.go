package rdmacm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"farblk/transport/verbs"
)

func TestConnectFailureClasses(t *testing.T) {
	a := addr(t, "10.0.0.1:4420")
	for _, c := range []struct {
		kind   eventType
		status int
		is     error
		words  string
	}{
		{rejected, 8, verbs.ErrRefused, "nothing listens"},
		{rejected, 10, verbs.ErrStale, "stale"},
		{rejected, -int(syscall.ECONNREFUSED), verbs.ErrRefused, "nothing listens"},
		{unreachable, -int(syscall.ETIMEDOUT), verbs.ErrUnreachable, "no answer"},
		{connectError, -int(syscall.ENOMEM), syscall.ENOMEM, "connect error"},
		{connectError, -int(syscall.EHOSTUNREACH), verbs.ErrUnreachable, "unreachable"},
		{deviceRemoval, 0, verbs.ErrDeviceRemoved, "removed"},
		{disconnected, 0, verbs.ErrDisconnected, "while connecting"},
	} {
		err := connectFailure(c.kind, c.status, nil, a)
		if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.words) || !strings.HasPrefix(err.Error(), "10.0.0.1:4420: ") {
			t.Errorf("%v %d: %v", c.kind, c.status, err)
		}
	}
}

func TestRejectedByTheConsumer(t *testing.T) {
	a := addr(t, "10.0.0.1:4420")
	for _, c := range []struct {
		status  int
		reason  int
		private string
	}{{28, 28, "xy"}, {-int(syscall.ECONNRESET), 0, "xy"}, {8, 8, ""}} {
		var r *verbs.RejectError
		err := connectFailure(rejected, c.status, []byte("xy"), a)
		if !errors.As(err, &r) || r.Reason != c.reason || r.Consumer != (c.status != 8) || string(r.PrivateData) != c.private {
			t.Errorf("status %d: %+v", c.status, r)
		}
	}
}

func TestResolveFailureClasses(t *testing.T) {
	a := addr(t, "10.0.0.1:4420")
	for _, c := range []struct {
		kind   eventType
		status int
		is     error
	}{
		{addrError, -int(syscall.ENODEV), verbs.ErrNoDevice},
		{routeError, -int(syscall.ENODEV), verbs.ErrNoDevice},
		{addrError, -int(syscall.EADDRNOTAVAIL), verbs.ErrAddrNotAvailable},
		{addrError, -int(syscall.ETIMEDOUT), verbs.ErrUnreachable},
		{addrError, -int(syscall.ENETUNREACH), verbs.ErrUnreachable},
		{routeError, -int(syscall.EINVAL), verbs.ErrUnreachable},
		{deviceRemoval, 0, verbs.ErrDeviceRemoved},
	} {
		if err := resolveFailure(c.kind, c.status, a); !errors.Is(err, c.is) {
			t.Errorf("%v %d: %v, want %v", c.kind, c.status, err, c.is)
		}
	}
}

func TestCaseH31LateUnreachable(t *testing.T) {
	for k := addrResolved; k <= timewaitExit; k++ {
		ends := k == disconnected || k == deviceRemoval || k == addrChange
		if (endReason(k) != nil) != ends {
			t.Errorf("%v on a connection that is up: %v", k, endReason(k))
		}
	}
}

func TestWorkStatus(t *testing.T) {
	for s, want := range map[int]verbs.Status{
		0: verbs.StatusOK, 3: verbs.StatusOther, 5: verbs.StatusFlushed, 10: verbs.StatusRemoteAccess,
		13: verbs.StatusRNRRetryExceeded, 14: verbs.StatusOther, 19: verbs.StatusFatal, 21: verbs.StatusOther, 99: verbs.StatusOther,
		-1: verbs.StatusOther,
	} {
		if got := workStatus(s); got != want {
			t.Errorf("status %d is %q, want %q", s, got, want)
		}
	}
}

func TestOpenFailureSaysWhatToDo(t *testing.T) {
	dir := t.TempDir()
	devices, node := filepath.Join(dir, "infiniband"), filepath.Join(dir, "rdma_cm")
	check := func(e syscall.Errno, words string) {
		t.Helper()
		if err := openFailure(e, devices, node); !errors.Is(err, verbs.ErrNoDevice) || !strings.Contains(err.Error(), words) {
			t.Errorf("%v: %v; want %q", e, err, words)
		}
	}
	check(syscall.ENODEV, "this machine has none")
	if err := os.MkdirAll(filepath.Join(devices, "rxe0"), 0o700); err != nil {
		t.Fatal(err)
	}
	check(syscall.ENOENT, node+" is missing: 'modprobe rdma_ucm'")
	if err := os.WriteFile(node, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check(syscall.EACCES, "run as root")
	check(syscall.ENODEV, "install ibverbs-providers")
	check(syscall.EIO, "input/output error: 'modprobe rdma_ucm'")
}
