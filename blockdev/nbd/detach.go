package nbd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forcedSync is how long a forced Detach tries to save what was written; but for half of the time that it has, since
// the sync of a device that hangs ends only when the kernel has let go of it.
const forcedSync = 2 * time.Second

// openerPatience is how long short visitors, such as udev's probes, may keep a device open before they count.
const openerPatience = time.Second

// Detach takes the device from the kernel: what was written is made durable first; if somebody uses the
// device it is an error (*BusyError) and nothing happens. With force neither matters: requests under way fail,
// and what was not written is lost. It returns when the device is gone, or (force) when those who have it open
// keep the kernel from forgetting it. When ctx ends first that is an error, and requests that the device does not answer
// may still be under way. A second call is no error.
func (a *Attachment) Detach(ctx context.Context, force bool) error {
	a.detaching.Lock()
	defer a.detaching.Unlock()
	if a.detached { // written with both locks held
		return nil
	}
	if err := a.disconnect(ctx, force); err != nil {
		return fmt.Errorf("nbd: detach: %w", err)
	}
	if a.unwatch != nil {
		a.unwatch()
	}
	close(a.stop)
	done := make(chan error, 1)
	go func() { // requests that the device does not answer keep it from ending
		err := a.srv.Close()
		a.running.Wait()
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	err = errors.Join(err, waitGone(ctx, a.Index, force))
	if a.lock != nil {
		a.lock.Close()
	}
	close(a.retire)
	return err
}

// disconnect syncs the device, looks for its users, and has the kernel disconnect it.
func (a *Attachment) disconnect(ctx context.Context, force bool) error {
	mine := func() bool { // else somebody else did it, and perhaps took the index
		s := readState(a.Index)
		return s.connected && s.backend == a.backend
	}
	if mine() {
		f, err := claim(ctx, a.Index, force)
		if err != nil {
			return err
		}
		if f != nil {
			defer f.Close()
			if err := syncDevice(ctx, f, a.Index, force); err != nil {
				return err
			}
		}
	}
	if err := a.lockKernel(ctx); err != nil {
		return err
	}
	defer a.unlockKernel()
	if mine() {
		if err := disconnectCall(ctx, a.Index, a.backend); err != nil {
			return err
		}
	}
	a.detached = true
	return nil
}

// syncDevice makes durable what was written to f, looks once more who uses it, and has the kernel forget the
// partitions. With force it only tries.
func syncDevice(ctx context.Context, f *os.File, index int, force bool) error {
	if force {
		limit := forcedSync
		if end, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(end)/2)
		}
		c, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		ctx = c
	}
	err := call(ctx, func() error {
		if err := unix.Fsync(int(f.Fd())); err != nil {
			return fmt.Errorf("%s cannot be synced: %w", devPath(index), err)
		}
		if h := holders(index, int(f.Fd())); len(h) > 0 && !force { // somebody came in the meantime
			return &BusyError{Index: index, Holders: h}
		}
		dropPartitions(f, index)
		return nil
	})
	if force {
		return nil
	}
	return err
}

func disconnectCall(ctx context.Context, index int, backend string) error {
	return call(ctx, func() error {
		_, err := kernelCall(nlDisconnect, kernelSettings{index: index, backend: backend})
		return err
	})
}

// DetachIndex is Detach for a device of this program whose process is gone; see Stale. There is nothing left to
// sync it to: without force it fails if the device is in use, or has requests waiting. The latter may be those of a process
// that is closing the device, which does not show as its holder any more, and would not learn that what it wrote is lost.
func DetachIndex(ctx context.Context, index int, force bool) error {
	s := readState(index)
	if !s.connected {
		return nil
	}
	if _, mine := ownIdentifier(s.backend); !mine {
		return fmt.Errorf("nbd: detach: %w", &BusyError{Index: index, PID: s.pid, Backend: s.backend})
	}
	if !force {
		h, waiting := holders(index, -1), requestsWait(index)
		if len(h) > 0 || waiting {
			return fmt.Errorf("nbd: detach: %w", &BusyError{Index: index, Holders: h, Waiting: waiting})
		}
	}
	if err := disconnectCall(ctx, index, s.backend); err != nil {
		return fmt.Errorf("nbd: detach: %w", err)
	}
	return waitGone(ctx, index, force)
}

// claim opens the device so that nobody can mount it or claim it otherwise any more, and checks that nobody
// has it open. With force it only tries, and gives nil if the device cannot be opened at all.
func claim(ctx context.Context, index int, force bool) (*os.File, error) {
	for end := time.Now().Add(openerPatience); ; {
		f, err := openDevice(index, os.O_RDONLY|unix.O_EXCL)
		if force {
			if err != nil {
				f, _ = openDevice(index, os.O_RDONLY)
			}
			return f, nil
		}
		except := -1
		if err == nil {
			except = int(f.Fd())
		}
		users := holders(index, except)
		if err == nil && len(users) == 0 {
			return f, nil
		}
		if err == nil {
			f.Close()
		} else if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, &BusyError{Index: index, Holders: users}
		}
		time.Sleep(pollInterval)
	}
}

// dropPartitions has the kernel forget the partitions, which would outlive the device's content.
func dropPartitions(f *os.File, index int) {
	for _, n := range partitions(index) {
		p := unix.BlkpgPartition{Pno: int32(n)}
		arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_DEL_PARTITION, Datalen: int32(unsafe.Sizeof(p)), Data: (*byte)(unsafe.Pointer(&p))}
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg)))
	}
}

// call runs f, which may block in the kernel, for as long as ctx lasts. When ctx ends first f goes on alone.
func call(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitGone waits until the kernel has taken the device apart. With force it does not wait for those who have
// it open, which they may as long as they like.
func waitGone(ctx context.Context, index int, force bool) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		s := readState(index)
		if !s.connected && s.size == 0 {
			return nil
		}
		if force && len(holders(index, -1)) > 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nbd: %s is disconnected but not gone: %w", devPath(index), ctx.Err())
		case <-time.After(pollInterval):
		}
	}
}
