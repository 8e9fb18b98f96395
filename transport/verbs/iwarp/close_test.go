package iwarp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

// cutOff is a responder that shakes hands and then reads nothing, as if the cable were cut.
type cutOff struct {
	t    *testing.T
	at   verbs.Addr
	peer chan *net.TCPConn
}

func newCutOff(t *testing.T) *cutOff {
	small := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 16<<10) })
	}}
	l, err := small.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	a := l.Addr().(*net.TCPAddr).AddrPort()
	c := &cutOff{t: t, at: verbs.Addr{IP: a.Addr(), Port: a.Port()}, peer: make(chan *net.TCPConn, 1)}
	go func() {
		s, err := l.Accept()
		if err != nil {
			return
		}
		reply, _ := mpa.Accept(request(s), mpa.Local{CRC: true}, nil)
		b, _ := reply.Append(nil)
		s.Write(b)
		c.peer <- s.(*net.TCPConn)
	}()
	return c
}

// leave connects to at and sends what fits our socket, but not the peer's.
func leave(ctx context.Context, c verbs.Conn, e *end) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if _, err := c.Connect(ctx, verbs.ConnParams{}); err != nil {
		return err
	}
	const n = 32
	var cs [n]verbs.Completion
	for i := range uint64(n) {
		if _, err := e.qp.PostSend([]verbs.SendWR{*e.send(i, verbs.OpSend, 0, 0, 8<<10)}); err != nil {
			return err
		}
	}
	for left := 0; left < n; runtime.Gosched() { // the socket's buffer may have to grow first
		got, err := e.qp.Poll(cs[:])
		if err != nil || ctx.Err() != nil {
			return fmt.Errorf("%d sends of %d have left for the socket: %w", left, n, errors.Join(err, ctx.Err()))
		}
		left += got
	}
	return nil
}

// late reads to the end; nothing may come but what the socket holds now.
func (c *cutOff) late() {
	c.t.Helper()
	s := <-c.peer
	defer s.Close()
	raw, err := s.SyscallConn()
	if err != nil {
		c.t.Fatal(err)
	}
	var here int
	if err := raw.Control(func(fd uintptr) { here, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) }); err != nil {
		c.t.Fatal(err)
	}
	_ = s.SetDeadline(time.Now().Add(patience))
	n, err := io.Copy(io.Discard, s)
	if here == 0 || n != int64(here) || !errors.Is(err, syscall.ECONNRESET) {
		c.t.Errorf("%d bytes came, %d of them late, then %v", n, n-int64(here), err)
	}
}

// TestCaseH25NothingAfterClose: what lies in the socket of a connection when it is closed is not sent later.
func TestCaseH25NothingAfterClose(t *testing.T) {
	peer := newCutOff(t)
	c, err := iwarp.New(iwarp.Options{}).Resolve(t.Context(), verbs.Route{Remote: peer.at})
	if err != nil {
		t.Fatal(err)
	}
	e := newEnd(t, c)
	if err := leave(t.Context(), c, e); err != nil {
		t.Fatal(err)
	}
	e.qp.Close()
	start := time.Now()
	c.Close()
	if d := time.Since(start); d > 5*time.Second { // 200 ms on an idle machine
		t.Errorf("Close took %v", d)
	}
	peer.late()
}

// TestCaseH25NothingAfterDeath: nor when the process dies.
func TestCaseH25NothingAfterDeath(t *testing.T) {
	peer := newCutOff(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), dieEnv+"="+peer.at.String())
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatal(err)
	}
	peer.late()
}

const dieEnv = "FARBLK_TEST_DIE"

// die is that process: TestMain calls it.
func die(at string) error {
	ap, err := netip.ParseAddrPort(at)
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := iwarp.New(iwarp.Options{}).Resolve(ctx, verbs.Route{Remote: verbs.Addr{IP: ap.Addr(), Port: ap.Port()}})
	if err != nil {
		return err
	}
	e, err := makeEnd(c)
	if err != nil {
		return err
	}
	if err := leave(ctx, c, e); err != nil {
		return err
	}
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
}
