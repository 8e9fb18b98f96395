package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// Memory of admin commands, reserved in the pool, so that a reconnect never waits for a buffer that
// a waiting request holds.
const (
	adminSlots    = 8
	adminSlotSize = nvme.IdentifySize
)

// adminCommands runs commands, one at a time on each of its slots, on the admin queue and, for Connect, on
// new I/O queues. It outlives associations.
type adminCommands struct {
	pool      *blockdev.Pool
	free      chan *adminSlot // for all
	keepAlive *adminSlot      // for the keep-alive, which must not wait for the others

	mu     sync.Mutex
	closed bool
	users  sync.WaitGroup // calls under way: they use the pool's memory; Add with mu held
}

// adminSlot is the record and the data of one command.
type adminSlot struct {
	tr    transport.Request
	buf   []byte         // adminSlotSize bytes of the pool
	lease []byte         // instead, for larger data
	home  *adminCommands // nil: belongs to one user
	timer *time.Timer    // fails the queue
	state atomic.Uint32  // slotPending, slotDone, slotAbandoned
	done  chan struct{}  // has one entry when slotDone
}

const (
	slotPending = iota
	slotDone
	slotAbandoned // nobody waits: the completion gives the slot back
)

// newAdminCommands reserves memory from a pool nobody else uses yet.
func newAdminCommands(pool *blockdev.Pool) *adminCommands {
	a := &adminCommands{pool: pool, free: make(chan *adminSlot, adminSlots)}
	region := pool.Reserve((adminSlots + 1) * adminSlotSize)
	for i := range adminSlots + 1 {
		s := &adminSlot{buf: region[i*adminSlotSize:][:adminSlotSize], done: make(chan struct{}, 1)}
		s.tr.Done, s.tr.Owner = adminDone, s
		if i == adminSlots {
			a.keepAlive = s
			break
		}
		s.home = a
		a.free <- s
	}
	return a
}

func adminDone(tr *transport.Request) {
	s := tr.Owner.(*adminSlot)
	s.timer.Stop()
	if s.state.CompareAndSwap(slotPending, slotDone) {
		s.done <- struct{}{}
	} else {
		s.recycle()
	}
}

func (s *adminSlot) recycle() {
	s.tr.Data = nil
	if s.lease != nil {
		s.home.pool.Release(s.lease)
		s.lease = nil
	}
	if s.home != nil {
		s.home.free <- s
	}
}

// TimeoutError is a command that got no completion in time.
type TimeoutError struct {
	What  string
	After time.Duration
}

// Error says which command, and how long it was waited for.
func (e *TimeoutError) Error() string { return fmt.Sprintf("%s: no answer within %v", e.What, e.After) }

// Timeout marks it as one.
func (e *TimeoutError) Timeout() bool { return true }

// close makes further calls fail and waits for those under way, whose queue has ended: then nobody uses the
// pool's memory.
func (a *adminCommands) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.users.Wait()
}

// call runs cmd on tq and waits for its completion, moving data, ordinary memory, in direction dir. After
// timeout without completion the queue fails. Errors: *nvme.StatusError, with the completion; *TimeoutError;
// *transport.LostError; blockdev.ErrClosed; ctx's, and then the command may still be under way.
func (a *adminCommands) call(ctx context.Context, tq transport.Queue, timeout time.Duration, cmd *nvme.Command, data []byte, dir transport.Direction) (nvme.Completion, error) {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nvme.Completion{}, blockdev.ErrClosed
	}
	a.users.Add(1)
	a.mu.Unlock()
	defer a.users.Done()
	select { // rather than a slot that is free as well
	case <-tq.Done():
		return nvme.Completion{}, tq.Err()
	default:
	}
	select {
	case s := <-a.free:
		return s.call(ctx, tq, timeout, cmd, data, dir)
	case <-tq.Done():
		return nvme.Completion{}, tq.Err()
	case <-ctx.Done():
		return nvme.Completion{}, context.Cause(ctx)
	}
}

func (s *adminSlot) call(ctx context.Context, tq transport.Queue, timeout time.Duration, cmd *nvme.Command, data []byte, dir transport.Direction) (cqe nvme.Completion, err error) {
	buf := s.buf
	if len(data) > len(buf) {
		if s.lease, err = leaseFor(ctx, tq, s.home.pool, len(data)); err != nil {
			s.recycle()
			return cqe, err
		}
		buf = s.lease
	}
	buf = buf[:len(data)]
	switch dir {
	case transport.ToController:
		copy(buf, data)
	case transport.ToHost:
		clear(buf) // nothing of an older command is to be taken for an answer
	}
	s.tr.Command, s.tr.Data, s.tr.Direction = *cmd, buf, dir
	s.state.Store(slotPending)
	late := &TimeoutError{commandName(cmd), timeout}
	s.timer = time.AfterFunc(timeout, func() { tq.Fail(late) })
	if err := tq.Submit(&s.tr); err != nil {
		s.timer.Stop()
		s.recycle()
		return cqe, err
	}
	tq.Kick()
	select {
	case <-s.done:
	case <-tq.Done():
		if err = tq.Err(); errors.Is(err, late) {
			err = late // say it plainly
		}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		if s.state.CompareAndSwap(slotPending, slotAbandoned) {
			return cqe, err
		}
		<-s.done // it came at the same moment
		err = nil
	}
	defer s.recycle()
	if s.tr.Err != nil {
		return cqe, s.tr.Err
	}
	cqe = s.tr.Completion
	if err := nvme.CommandError(cmd, true, &cqe); err != nil {
		return cqe, err
	}
	if dir == transport.ToHost {
		copy(data, buf)
	}
	return cqe, nil
}

// leaseFor waits for a buffer for a command on tq as long as that lives.
func leaseFor(ctx context.Context, tq transport.Queue, pool *blockdev.Pool, size int) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-tq.Done():
			cancel(tq.Err())
		case <-ctx.Done():
		}
	}()
	b, err := pool.Lease(ctx, size)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return b, err
}

func commandName(cmd *nvme.Command) string {
	return (&nvme.StatusError{Opcode: cmd.Opcode(), Admin: true, Fabrics: cmd.FabricsType()}).Command()
}

// statusOf returns the status in err, or 0.
func statusOf(err error) nvme.StatusCode {
	var s *nvme.StatusError
	if errors.As(err, &s) {
		return s.Status
	}
	return 0
}
