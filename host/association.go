package host

import (
	"context"
	"sync"
	"time"

	"farblk/host/nvme"
	"farblk/transport"
)

// association is one association with a controller, from connect to loss.
type association struct {
	cfg    *Config
	cmds   *adminCommands
	ctx    context.Context // ends when the association does
	cancel context.CancelFunc
	fabric transport.Association
	admin  transport.Queue
	io     []transport.Queue
	depth  int // entries of each I/O queue

	cntlid       uint16
	caps         nvme.Capabilities
	version      nvme.Version
	id           *nvme.IdentifyController
	limits       *limits
	kato         time.Duration // as the controller has it; 0: no keep-alive
	trafficBased bool

	event  transport.Request    // the Asynchronous Event Request
	events chan nvme.AsyncEvent // what it completed with; it is sent again when that has been dealt with

	unwell chan struct{} // has an entry when the namespaces are to be looked at again

	goroutines sync.WaitGroup
	stop       chan struct{}
	stopOnce   sync.Once
}

// keepAlive sends a Keep Alive each half KATO until the association ends. traffic counts the completions of
// all queues: where the controller takes traffic for a sign of life, so do we.
func (a *association) keepAlive(traffic func() uint64) {
	if a.kato == 0 {
		return
	}
	a.goroutines.Go(func() {
		tick := time.NewTicker(max(a.kato/2, time.Millisecond))
		defer tick.Stop()
		seen := traffic()
		for {
			select {
			case <-tick.C:
			case <-a.stop:
				return
			}
			if now := traffic(); a.trafficBased && now != seen {
				seen = now
				continue
			}
			var cmd nvme.Command
			cmd.FillKeepAlive()
			if _, err := a.cmds.keepAlive.call(a.ctx, a.admin, a.kato, &cmd, nil, transport.None); err != nil {
				if s := statusOf(err); s != 0 {
					a.admin.Fail(err) // the controller has given us up
				}
				return // else the queue has ended, and its watcher says so
			}
		}
	})
}

// watch calls lost, from another goroutine, with the cause each time a queue ends.
func (a *association) watch(lost func(error)) {
	for _, q := range append([]transport.Queue{a.admin}, a.io...) {
		a.goroutines.Go(func() {
			select {
			case <-q.Done():
				lost(q.Err())
			case <-a.stop:
			}
		})
	}
}

// listen asks for the events that the controller offers and calls handle for each.
func (a *association) listen(ctx context.Context, handle func(context.Context, nvme.AsyncEvent)) error {
	if offered := a.id.OAES & (nvme.EventsNamespace | nvme.EventsANA | nvme.EventsDiscovery); offered != 0 {
		var cmd nvme.Command
		cmd.FillSetFeatures(nvme.FeatureAsyncEvents, 0, offered)
		if _, err := a.call(ctx, &cmd, nil, transport.None); err != nil {
			if statusOf(err) == 0 {
				return err
			}
			a.cfg.Logger.Warn("the controller refuses to report events", "err", err)
		}
	}
	(*nvme.Command)(&a.event.Command).FillAsyncEventRequest()
	a.event.Done = func(r *transport.Request) {
		if r.Err != nil {
			return
		}
		cqe := nvme.Completion(r.Completion)
		if !cqe.Status().OK() {
			a.cfg.Logger.Warn("the controller reports no events", "err", cqe.Status())
			return
		}
		a.events <- nvme.AsyncEvent(cqe.Result()) // has room: only one is under way
	}
	arm := func() {
		if a.admin.Submit(&a.event) == nil { // else the queue has ended
			a.admin.Kick()
		}
	}
	arm()
	a.goroutines.Go(func() {
		var last time.Time
		for {
			select {
			case e := <-a.events:
				handle(a.ctx, e)
				if pause := eventPause - time.Since(last); pause > 0 {
					select {
					case <-time.After(pause):
					case <-a.stop:
						return
					}
				}
				last = time.Now()
				arm()
			case <-a.stop:
				return
			}
		}
	})
	return nil
}

// eventPause is the least time between two events asked for: a controller that reports without end is not to
// keep us busy.
const eventPause = 100 * time.Millisecond

// close ends the association: no goroutine and no request of it is left, and no device touches its memory.
func (a *association) close() {
	a.stopOnce.Do(func() { close(a.stop) })
	a.cancel()
	_ = a.fabric.Close() // there is nobody who could do anything about it
	a.goroutines.Wait()
}

// shutdown tells the controller to shut down and waits until it has (Base 3.6.1), within ctx.
func (a *association) shutdown(ctx context.Context) error {
	if err := a.setProperty(ctx, nvme.PropertyCC, uint64(nvme.EnableConfiguration|nvme.ConfigShutdown)); err != nil {
		return err
	}
	return a.waitStatus(ctx, func(s nvme.ControllerStatus) bool { return s.ShutdownComplete() })
}
