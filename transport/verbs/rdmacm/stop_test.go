//go:build cgo && linux

package rdmacm

import (
	"bytes"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
)

// stopping is a queue pair that is being closed, of a device that answers the move into the error state with errno.
func stopping(errno int, log io.Writer) *queuePair {
	c := &conn{p: New(Options{Logger: slog.New(slog.NewTextHandler(log, nil))}), closed: make(chan struct{})}
	q := &queuePair{
		conn: c, domain: &domain{}, stopped: make(chan struct{}), destroyed: make(chan struct{}),
		toError: func() int { return errno },
	}
	c.qp = q
	q.once.Do(func() { q.closeBy = time.Now().Add(closeLimit) })
	c.once.Do(func() { c.closeBy = time.Now().Add(closeLimit) })
	return q
}

// TestCloseWaitsForTheStop: as long as a queue pair is neither in the error state nor gone, the peer may write into
// buffers, and nothing says that they are free.
func TestCloseWaitsForTheStop(t *testing.T) {
	for name, end := range map[string]func(*queuePair) error{
		"queue pair": (*queuePair).Close,
		"connection": func(q *queuePair) error { return q.conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				q := stopping(int(syscall.EIO), &log)
				q.conn.mu.Lock()
				q.halt()
				q.conn.mu.Unlock()
				if q.settle(make([]verbs.Completion, 1)) != 0 || q.haltedAt.Load() != 0 {
					t.Error("work requests may be flushed, though the device refused to stop")
				}
				closed := make(chan error, 1)
				go func() { closed <- end(q) }()
				time.Sleep(time.Minute) // of the bubble's time
				select {
				case <-closed:
					t.Error("closed with the device not stopped")
				default:
				}
				q.domain.gone(q)
				if err := <-closed; err != nil {
					t.Error(err)
				}
				if n := strings.Count(log.String(), "takes long to stop"); n != 1 {
					t.Errorf("logged %d times", n)
				}
			})
		})
	}
}

// TestCloseOfAStopped: a queue pair that is in the error state holds nobody, though the kernel holds it.
func TestCloseOfAStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := stopping(0, io.Discard)
		q.conn.mu.Lock()
		q.halt()
		q.halt()
		q.lost.Stop()
		q.conn.mu.Unlock()
		begin := time.Now()
		if err := q.Close(); err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d != closeLimit || q.domain.lingering != 1 {
			t.Errorf("closed after %v, %d queue pairs linger", d, q.domain.lingering)
		}
	})
}

type slowCloser struct{ closed *atomic.Int32 }

func (s slowCloser) Close() error {
	time.Sleep(closeLimit)
	s.closed.Add(1)
	return nil
}

func TestPendingCloseSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed atomic.Int32
		pending := make(chan slowCloser, defaultBacklog)
		for range defaultBacklog {
			pending <- slowCloser{&closed}
		}
		begin := time.Now()
		closeAll(pending)
		if d := time.Since(begin); d != closeLimit || closed.Load() != defaultBacklog {
			t.Errorf("%d of %d closed after %v", closed.Load(), defaultBacklog, d)
		}
	})
}

// TestEventErrorPauses: an error of the event channel that stays costs no processor, and an end interrupts the pause.
func TestEventErrorPauses(t *testing.T) {
	efd, err := unix.Eventfd(1, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(efd) }()
	c := &channel{ended: make(chan struct{}), next: func() syscall.Errno { return syscall.EIO }}
	if c.fd, err = newPollFD(efd, "events"); err != nil {
		t.Fatal(err)
	}
	failures := make(chan time.Time, 1)
	c.read(func(e event) {
		if e.kind != connectError || e.status != -int(syscall.EIO) {
			t.Errorf("%+v", e)
		}
		select {
		case failures <- time.Now():
		case <-c.ended:
		}
	})
	begin := <-failures
	<-failures
	<-failures
	if d := (<-failures).Sub(begin); d < 100*time.Millisecond {
		t.Errorf("four failures within %v", d)
	}
	c.stop()
	c.stop()
}
