package host

import (
	"fmt"
	"math"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
)

// maxRetries is how often a command is sent again that the controller refused without forbidding it.
const maxRetries = 5

// maxLate is how often a command gets no completion in time, and ends the connection, before it is given up: not counting
// when it may only have had to wait for its turn, see ioQueue.advanceClock.
const maxLate = 5

// IOError is a request that the controller completed with an error. It is one of blockdev's errors, and an
// *nvme.StatusError.
type IOError struct {
	Class  error // one of blockdev's errors, or nil
	Status *nvme.StatusError
}

// Error is what the controller said.
func (e *IOError) Error() string {
	if e.Class == nil {
		return e.Status.Error()
	}
	return fmt.Sprintf("%v: %v", e.Class, e.Status)
}

// Unwrap gives the class and the status.
func (e *IOError) Unwrap() []error {
	if e.Class == nil {
		return []error{e.Status}
	}
	return []error{e.Class, e.Status}
}

// statusError is what the request of c ends with after status s.
func statusError(c *command, s nvme.StatusCode) error {
	cmd := (*nvme.Command)(&c.tr.Command)
	cqe := (*nvme.Completion)(&c.tr.Completion)
	return &IOError{statusClass(cmd.Opcode(), s), &nvme.StatusError{Opcode: cmd.Opcode(), Status: s, Result: cqe.Result()}}
}

// lateError is what the request of c ends with that was late too often.
func lateError(c *command) error {
	cmd := (*nvme.Command)(&c.tr.Command)
	name := (&nvme.StatusError{Opcode: cmd.Opcode()}).Command()
	err := fmt.Errorf("%w: %w, %d times", blockdev.ErrLost, &TimeoutError{name, c.q.ns.ctrl.cfg.IOTimeout}, c.late)
	if c.writes {
		err = fmt.Errorf("%w; it may have been carried out", err)
	}
	return err
}

func statusClass(op nvme.Opcode, s nvme.StatusCode) error {
	switch s.Code() {
	case nvme.StatusLBAOutOfRange:
		return blockdev.ErrRange
	case nvme.StatusCapacityExceeded:
		return blockdev.ErrNoSpace
	case nvme.StatusNamespaceWriteProtected:
		return blockdev.ErrReadOnly
	case nvme.StatusReadOnlyRange:
		return blockdev.ErrReadOnly
	case nvme.StatusInvalidOpcode:
		return blockdev.ErrUnsupported
	case nvme.StatusInvalidNamespace:
		return blockdev.ErrLost // it was there: it has been detached
	case nvme.StatusANAPersistentLoss, nvme.StatusANAInaccessible, nvme.StatusANATransition:
		return blockdev.ErrLost
	case nvme.StatusInvalidField:
		if op == nvme.IODatasetManagement || op == nvme.IOWriteZeroes {
			return blockdev.ErrUnsupported
		}
	}
	switch s.Type() {
	case nvme.TypeMedia:
		return blockdev.ErrMedia
	case nvme.TypePath:
		return blockdev.ErrLost
	}
	return nil
}

// retryDelay says whether a command that has been sent again n times is to be, after status s, and in how
// many ticks. A namespace that is inaccessible here for the moment (ANA) is waited for as long as a lost
// connection would be: there is no other path.
func (c *Controller) retryDelay(s nvme.StatusCode, n int) (ticks uint32, ok bool) {
	if s.DNR() {
		return 0, false
	}
	switch s.Code() {
	case nvme.StatusANAInaccessible, nvme.StatusANATransition:
		pause := max(time.Second/2, c.tick)
		patience := c.cfg.patience()
		if patience > 0 && time.Duration(n)*pause >= min(patience, (math.MaxUint16-1)*pause) {
			return 0, false
		}
		return c.ticks(pause), true
	case nvme.StatusANAPersistentLoss, nvme.StatusLBAOutOfRange, nvme.StatusCapacityExceeded, nvme.StatusInvalidOpcode,
		nvme.StatusInvalidNamespace, nvme.StatusNamespaceWriteProtected, nvme.StatusReservationConflict, nvme.StatusInvalidField,
		nvme.StatusReadOnlyRange:
		return 0, false // it would be the same, though the controller forgot to say so
	}
	if n >= maxRetries {
		return 0, false
	}
	if s.Type() == nvme.TypeMedia && s.Code() != nvme.StatusWriteFault {
		return 0, false
	}
	delay := c.retryDelays.Load()
	if i := s.CRD(); delay != nil && i > 0 {
		return c.ticks(delay[i-1]), true
	}
	return c.ticks(c.tick), true
}

// ticks is d in ticks, at least 1 for any d above 0.
func (c *Controller) ticks(d time.Duration) uint32 {
	return uint32((d + c.tick - 1) / c.tick)
}
