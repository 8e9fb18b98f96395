package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// A controller that is given up fails requests at once, and still has buffers for them: an export must be able to read
// what it is to refuse.
func TestDeadControllerRefusesRequests(t *testing.T) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(1 << 20)
		c := connect(t, testConfig(ft))
		n := c.Namespaces()[0]
		ft.change(func() { ft.id.SubNQN = "nqn.2024-01.org.example:other" })
		ft.cut()
		<-c.Done()
		b, err := n.Pool().Lease(bg, 4096)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Pool().Release(b)
		begin := time.Now()
		for _, op := range []blockdev.Op{blockdev.Read, blockdev.Write, blockdev.Flush} {
			if err := do(n, op, 0, fill(b, 1), 0); !errors.Is(err, blockdev.ErrLost) || !errors.Is(err, nvme.StatusConnectInvalidParameters) {
				t.Error(op, err)
			}
		}
		if _, err := c.Admin(bg, &nvme.Command{}, nil, transport.None); !errors.Is(err, blockdev.ErrLost) {
			t.Error(err)
		}
		if d := time.Since(begin); d != 0 {
			t.Error("took", d)
		}
	})
}

// An admin command that has the association but not yet its memory when the controller goes.
func TestAdminCommandDuringShutdown(t *testing.T) {
	inTime(t, func(t *testing.T) {
		var cmd nvme.Command
		cmd.FillIdentify(nvme.CNSController, 0, 0)
		for range 20 {
			c := connect(t, testConfig(newFakeTarget(1<<20)))
			a, err := c.live()
			if err != nil {
				t.Fatal(err)
			}
			shut(t, c)
			if _, err := a.call(bg, &cmd, make([]byte, 4096), transport.ToHost); !errors.Is(err, blockdev.ErrClosed) {
				t.Fatal("afterwards:", err)
			}
		}
	})
}

// One that waits for a buffer does not keep the controller from going.
func TestAdminCommandWithoutBufferDuringShutdown(t *testing.T) {
	inTime(t, func(t *testing.T) {
		c := connect(t, testConfig(newFakeTarget(1<<20)))
		for size := blockdev.MaxLease; size >= blockdev.PageSize; size /= 2 {
			for b := c.pool.TryLease(size); b != nil; b = c.pool.TryLease(size) {
				defer c.pool.Release(b)
			}
		}
		waits := make(chan error, 1)
		go func() {
			var cmd nvme.Command
			cmd.FillIdentify(nvme.CNSController, 0, 0)
			_, err := c.Admin(bg, &cmd, make([]byte, 8192), transport.ToHost)
			waits <- err
		}()
		synctest.Wait()
		if err := c.Shutdown(bg); err == nil {
			t.Error("leased buffers were not noticed")
		}
		if err := <-waits; !errors.Is(err, transport.ErrClosed) {
			t.Error(err)
		}
	})
}

// A free slot is no reason to use it on a queue that has ended.
func TestAdminCommandOnAnEndedQueue(t *testing.T) {
	inTime(t, func(t *testing.T) {
		c := connect(t, testConfig(newFakeTarget(1<<20)))
		ended := endedQueue{make(chan struct{})}
		close(ended.done)
		var cmd nvme.Command
		for range 100 {
			ctx, cancel := context.WithCancel(bg)
			if _, err := c.cmds.call(ctx, ended, time.Second, &cmd, nil, transport.None); !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			cancel()
		}
	})
}

// endedQueue has ended and is not to be given anything.
type endedQueue struct{ done chan struct{} }

func (q endedQueue) Submit(*transport.Request) error { return errors.New("was given a command") }
func (q endedQueue) Kick()                           {}
func (q endedQueue) Poll(time.Duration) int          { return 0 }
func (q endedQueue) Outstanding() int                { return 0 }
func (q endedQueue) Done() <-chan struct{}           { return q.done }
func (q endedQueue) Err() error                      { return errCut }
func (q endedQueue) Fail(error)                      {}
func (q endedQueue) Close() error                    { return nil }
func (q endedQueue) Counters() transport.Counters    { return transport.Counters{} }
