package nbd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// AttachConfig describes an attachment to the kernel. Device is needed.
type AttachConfig struct {
	// Index is the N of /dev/nbdN; any free one if below 0.
	Index  int
	Device blockdev.Device
	// ReadOnly refuses writes also to a device that takes them.
	ReadOnly bool
	// Connections is how many sockets the device has, which is also its number of hardware queues; 1 if 0. With
	// one the kernel waits for each request as long as it takes, and sends what a killed owner had not answered
	// again within seconds of a Reattach. With several it does either only after RequestTimeout.
	Connections int
	// Identifier is kept by the kernel. A later Reattach must give the same; the device's ID if empty.
	Identifier string
	// RequestTimeout matters with several connections only: it is how long a request may take before the kernel
	// gives up its socket and sends it again on another, so that a write may happen twice. It must be well above
	// the time after which the device itself fails requests; one hour if 0, and at most two weeks, because the
	// kernel counts it in 32 bits of up to 1,000 a second.
	RequestTimeout time.Duration
	// DeadTimeout is how long new requests wait for a Reattach when this process is gone, before they fail; two
	// minutes if 0. Those that the process had taken wait until there is a Reattach or DetachIndex.
	DeadTimeout time.Duration
	// BusyTimeout is how long to wait for an index that is still being torn down; 2 s if 0.
	BusyTimeout time.Duration
	// LockDir is where a lock file tells other processes that this one looks after the device;
	// /run/lock/farblk if empty.
	LockDir string
	Logger  *slog.Logger // nothing if nil
}

const (
	identifierPrefix = "farblk:" // marks the devices that Stale may find
	maxBlock         = 4096      // the kernel takes no block larger than its page
	longestTimeout   = 14 * 24 * time.Hour
	readyTimeout     = 5 * time.Second
	lockTimeout      = time.Second          // who looks for what is left over has a lock for a moment
	lookAgain        = 10 * time.Second     // how often the kernel looks at a request that takes long
	pollInterval     = 5 * time.Millisecond // between looks at sysfs, which gives no events for these
)

func (c *AttachConfig) setDefaults() error {
	if c.Device == nil {
		return errors.New("nbd: attach: no device")
	}
	info := c.Device.Info()
	if info.BlockSize > maxBlock {
		return fmt.Errorf("nbd: attach: blocks of %d bytes are more than the kernel's NBD driver takes (%d)", info.BlockSize, maxBlock)
	}
	if c.Connections <= 0 {
		c.Connections = 1
	}
	if c.Identifier == "" {
		c.Identifier = info.ID
	}
	if c.RequestTimeout <= 0 {
		c.RequestTimeout = time.Hour
	}
	if c.DeadTimeout <= 0 {
		c.DeadTimeout = 2 * time.Minute
	}
	c.RequestTimeout = min(c.RequestTimeout, longestTimeout)
	c.DeadTimeout = min(c.DeadTimeout, longestTimeout)
	if c.BusyTimeout <= 0 {
		c.BusyTimeout = 2 * time.Second
	}
	if c.LockDir == "" {
		c.LockDir = defaultLockDir
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// kernelTimeout is NBD_ATTR_TIMEOUT. 0 would not keep a device with several sockets from giving up one of them
// after 30 s; it does keep a device with one.
func (c *AttachConfig) kernelTimeout() time.Duration {
	if c.Connections == 1 {
		return 0
	}
	return c.RequestTimeout
}

// Attachment is a device that the kernel has as /dev/nbdN, served by this process.
type Attachment struct {
	Path  string // "/dev/nbdN"
	Index int

	cfg     AttachConfig
	srv     *Server
	export  *export
	backend string
	lock    *os.File      // nil if there could be none
	retire  chan struct{} // closed: the thread that connected may end
	named   chan struct{} // closed: Path and Index are set

	detaching sync.Mutex // one Detach at a time; taken before kernel

	// kernel holds a token: who has it may give a netlink command for this index, which can take as long as the
	// requests under way. It is never taken on the data path, and guards:
	kernel   chan struct{}
	detached bool
	size     int64 // what the kernel was told
	resize   chan struct{}
	unwatch  func()
	stop     chan struct{}
	running  sync.WaitGroup
}

// Attach gives c.Device to the kernel, and returns when /dev/nbdN can be opened and has its size. On an error
// the kernel's device is as it was. Errors: ErrNoModule, ErrNotRoot, *BusyError, ctx's.
func Attach(ctx context.Context, c AttachConfig) (*Attachment, error) {
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	if err := loadModule(ctx); err != nil {
		return nil, fmt.Errorf("nbd: attach: %w", err)
	}
	if c.Index >= 0 {
		if err := waitFree(ctx, c.Index, c.BusyTimeout); err != nil {
			return nil, fmt.Errorf("nbd: attach: %w", err)
		}
	}
	a, err := newAttachment(c)
	if err != nil {
		return nil, err
	}
	ours, theirs, err := socketPairs(c.Connections)
	if err != nil {
		a.discard()
		return nil, err
	}
	for i, sock := range ours {
		a.serve(sock, i)
	}
	info := a.export.info.Load()
	err = a.connect(ctx, kernelSettings{
		index: c.Index, size: info.Size, blockSize: info.BlockSize, flags: a.export.flags(false),
		timeout: c.kernelTimeout(), deadTimeout: c.DeadTimeout, fds: descriptors(theirs), backend: a.backend,
	}, theirs)
	if err != nil {
		a.discard()
		return nil, fmt.Errorf("nbd: attach: %w", err)
	}
	a.size = info.Size
	a.tune(ctx)
	if err = a.begin(ctx); err != nil {
		detachCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readyTimeout)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("nbd: attach: %w", err), a.Detach(detachCtx, true))
	}
	return a, nil
}

// Reattach takes over /dev/nbd<c.Index>, whose process is gone, while its requests wait for DeadTimeout. The
// identifier must be the one it was attached with. Connections is ignored: it has as many as before.
func Reattach(ctx context.Context, c AttachConfig) (*Attachment, error) {
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	state := readState(c.Index)
	switch {
	case !state.connected:
		return nil, fmt.Errorf("nbd: reattach: %s is not connected", devPath(c.Index))
	case state.backend != identifierPrefix+c.Identifier:
		return nil, fmt.Errorf("nbd: reattach: %s is connected to %q, not to %q", devPath(c.Index), state.backend, identifierPrefix+c.Identifier)
	}
	a, err := newAttachment(c)
	if err != nil {
		return nil, err
	}
	a.setIndex(c.Index)
	if a.lock, err = lockIndex(ctx, c.LockDir, c.Index, unix.LOCK_EX, lockTimeout); err != nil {
		a.discard()
		return nil, fmt.Errorf("nbd: reattach: another process looks after %s: %w", devPath(c.Index), err)
	}
	if err := noteThread(a.lock, state.pid); err != nil {
		c.Logger.Warn("nbd: the device may not be found after a crash", "device", a.Path, "err", err)
	}
	a.size = state.size // changed later, if it has to be
	replaceCtx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := a.replace(replaceCtx, max(1, state.queues)); err != nil {
		a.discard()
		return nil, fmt.Errorf("nbd: reattach: %w", err)
	}
	if err := a.begin(ctx); err != nil {
		a.discard()
		return nil, fmt.Errorf("nbd: reattach: %w", err)
	}
	return a, nil
}

func newAttachment(c AttachConfig) (*Attachment, error) {
	a := &Attachment{
		cfg: c, backend: identifierPrefix + c.Identifier,
		srv:    NewServer(Config{MaxConnections: 4 * 1024, Logger: c.Logger}),
		retire: make(chan struct{}), named: make(chan struct{}), kernel: make(chan struct{}, 1), stop: make(chan struct{}), resize: make(chan struct{}, 1),
	}
	d := c.Device
	if c.Connections == 1 {
		d = blockdev.Spread(d) // one socket, but all of the device's queues
	}
	if err := a.srv.Add(Export{Name: c.Identifier, Device: d, ReadOnly: c.ReadOnly}); err != nil {
		return nil, err
	}
	a.export = a.srv.lookup(c.Identifier)
	return a, nil
}

func (a *Attachment) setIndex(i int) {
	a.Index, a.Path = i, devPath(i)
	close(a.named)
}

// discard ends this process's part, and leaves the kernel's, if there is one.
func (a *Attachment) discard() {
	close(a.retire)
	close(a.stop)
	_ = a.srv.Close()
	a.running.Wait()
	if a.lock != nil {
		a.lock.Close()
	}
}

// connect has the kernel make the device, on a thread that lives as long as the attachment: its number is what
// the kernel shows as the device's owner. It closes theirs when the kernel has them.
func (a *Attachment) connect(ctx context.Context, k kernelSettings, theirs []*os.File) error {
	type answer struct {
		index int
		err   error
	}
	got := make(chan answer, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		end := time.Now().Add(a.cfg.BusyTimeout)
		for {
			index, err := kernelCall(nlConnect, k)
			// Somebody who looks into a free device makes it busy for a moment.
			if errors.Is(err, unix.EBUSY) && time.Now().Before(end) && !readState(k.index).connected {
				time.Sleep(pollInterval)
				continue
			}
			closeAll(theirs)
			got <- answer{index, err}
			break
		}
		<-a.retire
	}()
	var r answer
	select {
	case r = <-got:
	case <-ctx.Done():
		// The kernel cannot be interrupted. What it makes is taken apart by whoever gets the answer.
		go func() {
			if r := <-got; r.err == nil {
				_, _ = kernelCall(nlDisconnect, kernelSettings{index: r.index, backend: k.backend})
			}
		}()
		return ctx.Err()
	}
	switch {
	case errors.Is(r.err, unix.EBUSY):
		s := readState(k.index)
		return &BusyError{Index: k.index, PID: s.pid, Backend: s.backend}
	case r.err != nil && k.index >= 0:
		return fmt.Errorf("connect %s: %w", devPath(k.index), r.err)
	case r.err != nil:
		return fmt.Errorf("connect: %w", r.err)
	}
	a.setIndex(r.index)
	return nil
}

// begin waits until the device is ready, and starts to look after it.
func (a *Attachment) begin(ctx context.Context) error {
	if a.lock == nil {
		var err error
		if a.lock, err = lockIndex(ctx, a.cfg.LockDir, a.Index, unix.LOCK_EX, a.cfg.BusyTimeout); err != nil {
			a.cfg.Logger.Warn("nbd: no lock file; other processes may take the device for a left-over", "device", a.Path, "err", err)
		} else if err := noteThread(a.lock, readState(a.Index).pid); err != nil {
			a.cfg.Logger.Warn("nbd: the lock file cannot be written", "device", a.Path, "err", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := a.waitReady(ctx); err != nil {
		return err
	}
	a.running.Go(a.follow)
	a.unwatch = a.export.Device.Watch(func(blockdev.Info) {
		select {
		case a.resize <- struct{}{}:
		default:
		}
	})
	a.resize <- struct{}{} // it may have changed since
	return nil
}

// waitReady waits until the device can be opened and has its size, then has its partitions looked for.
func (a *Attachment) waitReady(ctx context.Context) error {
	for {
		err := call(ctx, a.tryOpen)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w", a.Path, err)
		case <-time.After(pollInterval):
		}
	}
}

func (a *Attachment) tryOpen() error {
	f, err := openDevice(a.Index, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if size != a.size {
		return fmt.Errorf("%s has %d bytes, not %d", a.Path, size, a.size)
	}
	_ = unix.IoctlSetInt(int(f.Fd()), unix.BLKRRPART, 0) // busy if somebody else does, who will find them
	return nil
}

// lockKernel waits for the turn to give the kernel a command.
func (a *Attachment) lockKernel(ctx context.Context) error {
	select {
	case a.kernel <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the kernel is still at work on %s: %w", a.Path, ctx.Err())
	}
}

func (a *Attachment) unlockKernel() { <-a.kernel }

// follow tells the kernel about changes of the size.
func (a *Attachment) follow() {
	for {
		select {
		case <-a.stop:
			return
		case <-a.resize:
		}
		if err := a.setSize(a.export.Device.Info().Size); err != nil {
			a.cfg.Logger.Error("nbd: the kernel does not take the new size", "device", a.Path, "err", err)
		}
	}
}

func (a *Attachment) setSize(size int64) error {
	if err := a.lockKernel(context.Background()); err != nil {
		return err
	}
	defer a.unlockKernel()
	if a.detached || size == a.size {
		return nil
	}
	if _, err := kernelCall(nlReconfigure, kernelSettings{index: a.Index, size: size, backend: a.backend}); err != nil {
		return err
	}
	if got := readState(a.Index).size; got != size {
		return fmt.Errorf("it has %d bytes, not %d", got, size)
	}
	a.size = size
	a.cfg.Logger.Info("nbd: size changed", "device", a.Path, "size", size)
	return nil
}

// waitFree waits until index has no user, not even one that is just leaving.
func waitFree(ctx context.Context, index int, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		s := readState(index)
		if !s.connected && s.size == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			if s.connected {
				return &BusyError{Index: index, PID: s.pid, Backend: s.backend}
			}
			return &BusyError{Index: index, Holders: holders(index, -1)}
		case <-time.After(pollInterval):
		}
	}
}
