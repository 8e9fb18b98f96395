package rdma

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"farblk/transport"
	"farblk/transport/verbs"
)

func TestConnectionRequestLayout(t *testing.T) {
	f := newFake()
	open(t, f, transport.QueueParams{ID: 3, Depth: 128, ControllerID: 0x1234}, Options{})
	want := make([]byte, 32)
	copy(want[2:], []byte{3, 0, 128, 0, 127, 0, 0x34, 0x12})
	if got := f.requests[0].PrivateData; string(got) != string(want) {
		t.Errorf("private data % x, want % x", got, want)
	}
}

func TestCaseH01StaleIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		stale := &verbs.RejectError{Reason: 10}
		f.refuse = []error{stale, stale}
		a, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, make([]byte, 4096))
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		q, err := a.OpenQueue(context.Background(), transport.QueueParams{Depth: 4})
		if err != nil {
			t.Fatal(err)
		}
		if n, d := len(f.conns), time.Since(begin); n != 3 || d != 3*staleDelay {
			t.Errorf("%d connections were tried in %v, want a fresh one each of 3 times, and time between", n, d)
		}
		_ = q.Close()
		f.refuse = []error{stale, stale, stale, stale, stale, stale, stale}
		if _, err := a.OpenQueue(context.Background(), transport.QueueParams{ID: 1, Depth: 4}); !errors.Is(err, transport.ErrStale) {
			t.Errorf("for ever stale: %v", err)
		}
		_ = a.Close()
		if f.live != 0 {
			t.Errorf("%d verbs objects left", f.live)
		}
	})
}

// inWords checks what becomes of a provider's error: its class, and one line that says words.
func inWords(t *testing.T, err, class error, words string) {
	t.Helper()
	d := NewDialer(newFake(), Options{}).(*dialer)
	addr := transport.Address{Port: 4420, Remote: netip.MustParseAddr("10.0.0.1")}
	got := d.connectError(addr, 0, err)
	if !errors.Is(got, class) || !strings.Contains(got.Error(), words) || strings.Contains(got.Error(), "\n") {
		t.Errorf("%v: %v; want class %v and %q", err, got, class, words)
	}
}

func TestCaseH03NothingListens(t *testing.T) {
	inWords(t, &verbs.RejectError{Reason: 8}, transport.ErrRefused, "nothing listens at 10.0.0.1:4420")
	inWords(t, verbs.ErrRefused, transport.ErrRefused, "nothing listens at 10.0.0.1:4420")
}

func TestRejectionsInWords(t *testing.T) {
	no := func(sts byte) error {
		return &verbs.RejectError{Reason: 28, Consumer: true, PrivateData: []byte{0, 0, sts, 0}}
	}
	inWords(t, no(6), transport.ErrRejected, "no resources for another queue (NVMe/RDMA status 6)")
	inWords(t, no(4), transport.ErrRejected, "invalid host submission queue size")
	inWords(t, verbs.ErrTimeout, transport.ErrTimeout, "check the address")
	inWords(t, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, transport.ErrTimeout, "no answer in time: check")
	slow := fmt.Errorf("%w (%w): %w", verbs.ErrTimeout, context.DeadlineExceeded, &verbs.HandshakeError{Detail: "it never answered"})
	inWords(t, slow, transport.ErrTimeout, "no answer in time: it never answered: the port is slow")
	inWords(t, &verbs.HandshakeError{Detail: "it spoke HTTP"}, transport.ErrWrongPeer, "it spoke HTTP")
}

func TestCaseH33MemlockSaysTheFix(t *testing.T) {
	f := newFake()
	f.regErr = &verbs.MemlockError{Need: 64 << 20, Limit: 8 << 20}
	_, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, make([]byte, 4096))
	if !errors.Is(err, transport.ErrMemlock) || !strings.Contains(err.Error(), "ulimit -l") {
		t.Errorf("%v", err)
	}
	if f.live != 0 {
		t.Errorf("%d verbs objects left", f.live)
	}
}

func TestRegionTooLarge(t *testing.T) {
	f := newFake()
	f.device.MaxMR = 2 << 20
	_, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, make([]byte, 3<<20))
	if err == nil || !strings.Contains(err.Error(), "3 MiB of I/O memory: the RDMA device fake0 registers at most 2 MiB: use a smaller --pool-size") {
		t.Errorf("%v", err)
	}
}

// TestCloseDuringOpen: Close ends an OpenQueue under way, and neither it nor a second Close returns while a device
// still has the memory.
func TestCloseDuringOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.connecting = make(chan struct{})
		a, err := NewDialer(f, Options{}).Dial(context.Background(), transport.Address{}, make([]byte, 4096))
		if err != nil {
			t.Fatal(err)
		}
		opened := make(chan error, 1)
		go func() {
			_, err := a.OpenQueue(context.Background(), transport.QueueParams{ID: 1, Depth: 4})
			opened <- err
		}()
		synctest.Wait() // it waits for the target
		var closes sync.WaitGroup
		for range 2 {
			closes.Go(func() {
				if err := a.Close(); err != nil {
					t.Error(err)
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				if f.live != 0 {
					t.Errorf("closed with %d verbs objects left; so far ended: %q", f.live, f.closed)
				}
			})
		}
		synctest.Wait()
		close(f.connecting)
		closes.Wait()
		if err := <-opened; !errors.Is(err, transport.ErrClosed) {
			t.Errorf("OpenQueue: %v", err)
		}
		if _, err := a.OpenQueue(context.Background(), transport.QueueParams{ID: 1, Depth: 4}); !errors.Is(err, transport.ErrClosed) {
			t.Errorf("OpenQueue after Close: %v", err)
		}
	})
}
