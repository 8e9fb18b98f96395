package rdmacm

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
)

func TestParseStatus(t *testing.T) {
	m := parseStatus([]byte("Name:\tfarblk\nVmLck:\t       9 kB\nVmPin:\t    1024 kB\nCapEff:\t0000000000004000\n"))
	if m.pinned != 1<<20 || !m.unlimited {
		t.Errorf("%+v", m)
	}
	if m := parseStatus([]byte("VmPin:\nCapEff:\t000001ffffffbfff\nnonsense\n")); m.pinned != 0 || m.unlimited {
		t.Errorf("%+v", m)
	}
}

func TestCaseH33MemlockLimit(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: 64 << 10, Max: old.Max}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old) })
	if err := checkMemlock(64<<10, true); err != nil {
		t.Errorf("exactly the limit: %v", err)
	}
	var m *verbs.MemlockError
	if err := checkMemlock(64<<10+1, true); !errors.As(err, &m) || m.Limit != 64<<10 || m.Need != 64<<10+1 {
		t.Errorf("one byte over the limit: %v", err)
	}
}
