package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"farblk/host/nvme"
	"farblk/transport"
)

// Causes of a connect that make no sense to repeat.
var (
	// ErrAuthRequired is a controller that wants in-band authentication.
	ErrAuthRequired = errors.New("the controller requires authentication (DH-HMAC-CHAP), which is not supported")
	// ErrIdentity is a controller that is not the one that was asked for.
	ErrIdentity = errors.New("the controller is not the one that was asked for")
)

// openAdmin makes an association as far as an enabled, identified controller. On error nothing is left.
func openAdmin(ctx context.Context, cfg *Config, cmds *adminCommands, discovery bool) (_ *association, err error) {
	a := &association{
		cfg: cfg, cmds: cmds, stop: make(chan struct{}), events: make(chan nvme.AsyncEvent, 1), unwell: make(chan struct{}, 1),
	}
	a.ctx, a.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if a.fabric, err = a.dial(ctx, cmds.pool.Region()); err != nil {
		a.cancel()
		return nil, err
	}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if a.admin, err = a.openQueue(ctx, transport.QueueParams{ID: 0, Depth: adminDepth}); err != nil {
		return nil, err
	}
	if err = a.connectQueue(ctx, a.admin, 0, adminDepth); err != nil {
		return nil, err
	}
	if err = a.enable(ctx, discovery); err != nil {
		return nil, err
	}
	return a, a.identify(ctx, discovery)
}

func (a *association) dial(ctx context.Context, mem []byte) (transport.Association, error) {
	ctx, cancel := a.connectTimeout(ctx, "connect")
	defer cancel()
	f, err := a.cfg.Dialer.Dial(ctx, a.cfg.Address, mem)
	return f, causeOf(ctx, err)
}

func (a *association) openQueue(ctx context.Context, p transport.QueueParams) (transport.Queue, error) {
	ctx, cancel := a.connectTimeout(ctx, fmt.Sprintf("connecting queue %d", p.ID))
	defer cancel()
	q, err := a.fabric.OpenQueue(ctx, p)
	return q, causeOf(ctx, err)
}

func (a *association) connectTimeout(ctx context.Context, what string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, a.cfg.ConnectTimeout,
		&transport.ConnectError{Addr: a.cfg.Address.String(), Class: transport.ErrTimeout, Err: &TimeoutError{what, a.cfg.ConnectTimeout}})
}

// causeOf replaces a bare context error by the context's cause.
func causeOf(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		var c *transport.ConnectError
		if !errors.As(err, &c) {
			return context.Cause(ctx)
		}
	}
	return err
}

// connectQueue sends the Fabrics Connect (Base 6.3) that makes tq queue qid of the controller.
func (a *association) connectQueue(ctx context.Context, tq transport.Queue, qid uint16, depth int) error {
	data := nvme.ConnectData{HostID: a.cfg.HostID, CNTLID: a.cntlid, SubNQN: a.cfg.SubsysNQN, HostNQN: a.cfg.HostNQN}
	var kato uint32
	if qid == 0 {
		data.CNTLID = nvme.AnyController
		kato = uint32(a.cfg.KeepAlive.Milliseconds())
	}
	var attributes uint8
	if a.cfg.DisableSQFlow && qid != 0 {
		attributes = nvme.ConnectNoFlowControl
	}
	var cmd nvme.Command
	cmd.FillConnect(qid, uint16(depth), attributes, kato)
	cqe, err := a.cmds.call(ctx, tq, a.cfg.ConnectTimeout, &cmd, data.Append(nil), transport.ToController)
	if err != nil {
		return err
	}
	r := nvme.ConnectResult(cqe.Result())
	if r.AuthRequired() {
		return ErrAuthRequired
	}
	if qid == 0 {
		a.cntlid = r.CNTLID()
	} else if r.CNTLID() != a.cntlid {
		return fmt.Errorf("%w: queue %d was given to controller %d instead of %d", ErrIdentity, qid, r.CNTLID(), a.cntlid)
	}
	return nil
}

func (a *association) property(ctx context.Context, p nvme.Property) (uint64, error) {
	var cmd nvme.Command
	cmd.FillPropertyGet(p)
	cqe, err := a.call(ctx, &cmd, nil, transport.None)
	if err != nil {
		return 0, fmt.Errorf("reading %v: %w", p, err)
	}
	if p.Wide() {
		return cqe.Result64(), nil
	}
	return uint64(cqe.Result()), nil
}

func (a *association) setProperty(ctx context.Context, p nvme.Property, v uint64) error {
	var cmd nvme.Command
	cmd.FillPropertySet(p, v)
	if _, err := a.call(ctx, &cmd, nil, transport.None); err != nil {
		return fmt.Errorf("setting %v: %w", p, err)
	}
	return nil
}

// enable reads what the controller is, refuses what cannot be driven, and enables it (Base 3.5.2).
func (a *association) enable(ctx context.Context, discovery bool) error {
	v, err := a.property(ctx, nvme.PropertyCAP)
	if err != nil {
		return err
	}
	a.caps = nvme.Capabilities(v)
	if v, err = a.property(ctx, nvme.PropertyVS); err != nil {
		return err
	}
	a.version = nvme.Version(v)
	if err := checkCapabilities(a.caps, discovery); err != nil {
		return err
	}
	if err := a.setProperty(ctx, nvme.PropertyCC, uint64(nvme.EnableConfiguration)); err != nil {
		return err
	}
	timeout := max(a.caps.Timeout(), 500*time.Millisecond)
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, &TimeoutError{"controller enable (CSTS.RDY)", timeout})
	defer cancel()
	return a.waitStatus(ctx, func(s nvme.ControllerStatus) bool { return s.Ready() })
}

// waitStatus reads CSTS until ok, or fatal.
func (a *association) waitStatus(ctx context.Context, ok func(nvme.ControllerStatus) bool) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		v, err := a.property(ctx, nvme.PropertyCSTS)
		if err != nil {
			return err
		}
		s := nvme.ControllerStatus(v)
		if ok(s) {
			return nil
		}
		if s.Fatal() {
			return fmt.Errorf("the controller reports a fatal error (CSTS %#x)", v)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// identifyData runs one Identify command.
func (a *association) identifyData(ctx context.Context, cns nvme.CNS, nsid uint32) ([]byte, error) {
	var cmd nvme.Command
	cmd.FillIdentify(cns, nsid, 0)
	data := make([]byte, nvme.IdentifySize)
	_, err := a.call(ctx, &cmd, data, transport.ToHost)
	return data, err
}

// identify reads and checks the controller's Identify data, and settles keep-alive.
func (a *association) identify(ctx context.Context, discovery bool) error {
	data, err := a.identifyData(ctx, nvme.CNSController, 0)
	if err != nil {
		return fmt.Errorf("identifying the controller: %w", err)
	}
	if a.id, err = nvme.ParseIdentifyController(data); err != nil {
		return err
	}
	if a.id.CNTLID != a.cntlid {
		return fmt.Errorf("%w: Connect made controller %d, Identify says %d", ErrIdentity, a.cntlid, a.id.CNTLID)
	}
	if discovery {
		return nil
	}
	if a.id.CNTRLTYPE == nvme.ControllerDiscovery {
		return refusedf("%s is a discovery controller: it has no namespaces", a.cfg.SubsysNQN)
	}
	if a.id.SubNQN != "" && !strings.EqualFold(a.id.SubNQN, a.cfg.SubsysNQN) {
		return fmt.Errorf("%w: it is subsystem %s", ErrIdentity, a.id.SubNQN)
	}
	if a.limits, err = checkController(a.caps, a.id); err != nil {
		return err
	}
	if a.version >= nvme.MakeVersion(1, 4, 0) {
		// The structure is optional: a controller without it has none of its limits.
		if data, err := a.identifyData(ctx, nvme.CNSCommandSetController, 0); err == nil {
			if n, err := nvme.ParseNVMController(data); err == nil {
				a.limits.refine(a.caps, n)
			}
		} else if statusOf(err) == 0 {
			return err
		}
	}
	return a.settleKeepAlive(ctx)
}

// settleKeepAlive reads KATO back, because the controller may have rounded it.
func (a *association) settleKeepAlive(ctx context.Context) error {
	if a.kato = a.cfg.KeepAlive; a.kato == 0 {
		return nil
	}
	a.trafficBased = a.id.CTRATT&nvme.CTRATTTrafficKeep != 0
	var cmd nvme.Command
	cmd.FillGetFeatures(nvme.FeatureKeepAlive, 0)
	cqe, err := a.call(ctx, &cmd, nil, transport.None)
	switch {
	case err == nil && cqe.Result() > 0:
		a.kato = time.Duration(cqe.Result()) * time.Millisecond
	case err != nil && statusOf(err) == 0:
		return err
	}
	return nil
}

// openIO asks for up to want I/O queues and connects as many as it gets, at least one.
func (a *association) openIO(ctx context.Context, want, size int) error {
	var cmd nvme.Command
	cmd.FillSetFeatures(nvme.FeatureNumberOfQueues, 0, uint32(nvme.MakeQueueCount(want)))
	cqe, err := a.call(ctx, &cmd, nil, transport.None)
	if err != nil {
		return fmt.Errorf("asking for %d I/O queues: %w", want, err)
	}
	n := min(want, nvme.QueueCount(cqe.Result()).Queues())
	a.depth = min(size, a.limits.maxCommands)
	for i := 1; i <= n; i++ {
		qid := uint16(i)
		q, err := a.openQueue(ctx, transport.QueueParams{
			ID: qid, Depth: a.depth, ControllerID: a.cntlid, InCapsule: a.limits.inCapsule,
		})
		if err == nil {
			if err = a.connectQueue(ctx, q, qid, a.depth); err != nil {
				_ = q.Close() // its end is not the news
			}
		}
		if err == nil {
			a.io = append(a.io, q)
			continue
		}
		select { // what ended the admin queue is the cause
		case <-a.admin.Done():
			return a.admin.Err()
		default:
		}
		if i == 1 || ctx.Err() != nil {
			return fmt.Errorf("I/O queue %d: %w", qid, err)
		}
		a.cfg.Logger.Warn("the target took fewer I/O queues than it granted", "granted", n, "queues", len(a.io), "err", err)
		break
	}
	return nil
}

// call runs an admin command.
func (a *association) call(ctx context.Context, cmd *nvme.Command, data []byte, dir transport.Direction) (nvme.Completion, error) {
	return a.cmds.call(ctx, a.admin, a.cfg.AdminTimeout, cmd, data, dir)
}

// readLog reads a log page from off into buf, whose length is a multiple of 4, in pieces.
func (a *association) readLog(ctx context.Context, id nvme.LogID, nsid uint32, off uint64, buf []byte, retain bool) error {
	for len(buf) > 0 {
		n := min(len(buf), adminSlotSize)
		var cmd nvme.Command
		cmd.FillGetLogPage(id, nsid, off, uint32(n), retain)
		if _, err := a.call(ctx, &cmd, buf[:n], transport.ToHost); err != nil {
			return err
		}
		buf, off = buf[n:], off+uint64(n)
	}
	return nil
}

// verdictOf says whether another attempt may do better than the one that ended with err.
func verdictOf(err error) verdict {
	var refused *RefusedError
	var config *ConfigError
	switch s := statusOf(err); {
	case s.DNR(), s.Code() == nvme.StatusAuthRequired, s.Code() == nvme.StatusConnectInvalidHost,
		errors.Is(err, ErrAuthRequired), errors.As(err, &refused), errors.As(err, &config):
		return hopeless
	case errors.Is(err, transport.ErrStale):
		return stale
	}
	return again
}
