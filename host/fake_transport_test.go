package host

import (
	"context"
	"errors"
	"sync"
	"time"

	"farblk/transport"
)

// fakeDialer connects to a fakeTarget in the same process.
type fakeDialer struct{ t *fakeTarget }

func (d fakeDialer) Dial(ctx context.Context, addr transport.Address, mem []byte) (transport.Association, error) {
	d.t.mu.Lock()
	d.t.dials++
	f := d.t.onDial
	d.t.mu.Unlock()
	if f != nil {
		if err := f(ctx); err != nil {
			return nil, err
		}
	}
	return &fakeAssociation{t: d.t, ctrl: &fakeController{t: d.t, addr: addr}}, nil
}

type fakeAssociation struct {
	t    *fakeTarget
	ctrl *fakeController
}

func (a *fakeAssociation) Provider() string { return "fake" }
func (a *fakeAssociation) Device() string   { return "fake0" }

func (a *fakeAssociation) OpenQueue(ctx context.Context, p transport.QueueParams) (transport.Queue, error) {
	a.t.mu.Lock()
	f := a.t.onOpen
	a.t.opened = append(a.t.opened, p)
	a.t.mu.Unlock()
	if f != nil {
		if err := f(ctx, p); err != nil {
			return nil, err
		}
	}
	q := &fakeQueue{ctrl: a.ctrl, params: p, done: make(chan struct{}), wake: make(chan struct{}, 1), under: make(map[*transport.Request]bool)}
	a.ctrl.mu.Lock()
	a.ctrl.queues = append(a.ctrl.queues, q)
	a.ctrl.mu.Unlock()
	q.wg.Go(q.watch)
	return q, nil
}

func (a *fakeAssociation) Close() error {
	for _, q := range a.ctrl.allQueues() {
		_ = q.Close()
	}
	a.ctrl.end(false)
	return nil
}

// fakeQueue executes what is kicked on its own goroutine, what is polled on the poller's.
type fakeQueue struct {
	ctrl   *fakeController
	params transport.QueueParams
	wg     sync.WaitGroup
	late   sync.Mutex // held while performLater executes: Close waits for it

	mu        sync.Mutex
	submitted []*transport.Request
	ready     []*transport.Request        // completed by the target, Done not called
	under     map[*transport.Request]bool // submitted, Done not called
	err       error
	closed    bool
	done      chan struct{}
	wake      chan struct{}
	counters  transport.Counters
}

func (q *fakeQueue) Submit(r *transport.Request) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return q.err
	}
	if len(q.under) == q.params.Depth-1 {
		return transport.ErrQueueFull
	}
	if q.under[r] {
		panic("request submitted twice")
	}
	q.under[r] = true
	q.submitted = append(q.submitted, r)
	q.counters.Commands++
	return nil
}

func (q *fakeQueue) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *fakeQueue) Kick() { q.poke() }

// complete is the target's answer to r, at any time, from any goroutine.
func (q *fakeQueue) complete(r *transport.Request) {
	q.mu.Lock()
	if q.under[r] && !q.closed {
		q.ready = append(q.ready, r)
	}
	q.mu.Unlock()
	q.poke()
}

// performLater executes r after a while, unless the queue has given it up by then.
func (q *fakeQueue) performLater(r *transport.Request, after time.Duration) {
	time.AfterFunc(after, func() {
		q.late.Lock()
		defer q.late.Unlock()
		q.mu.Lock()
		ours := q.under[r] && !q.closed
		q.mu.Unlock()
		if ours {
			q.ctrl.perform(q, r)
		}
	})
}

func (q *fakeQueue) Poll(time.Duration) int {
	q.mu.Lock()
	s := q.submitted
	q.submitted = nil
	err := q.err
	q.mu.Unlock()
	if err == nil {
		for _, r := range s {
			q.ctrl.execute(q, r)
		}
	}
	n := 0
	for {
		q.mu.Lock()
		if len(q.ready) == 0 || q.closed {
			q.mu.Unlock()
			return n
		}
		r := q.ready[0]
		q.ready = q.ready[1:]
		delete(q.under, r)
		q.mu.Unlock()
		r.Err = nil
		r.Done(r)
		n++
	}
}

func (q *fakeQueue) watch() {
	for {
		select {
		case <-q.wake:
			q.Poll(0)
		case <-q.done:
			return
		}
	}
}

func (q *fakeQueue) Outstanding() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.under)
}
func (q *fakeQueue) Done() <-chan struct{} { return q.done }
func (q *fakeQueue) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

func (q *fakeQueue) Fail(cause error) { q.end(&transport.LostError{Cause: cause}) }

func (q *fakeQueue) end(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
		close(q.done)
	}
}

func (q *fakeQueue) Close() error {
	q.end(transport.ErrClosed)
	q.wg.Wait()
	q.late.Lock()
	defer q.late.Unlock()
	q.mu.Lock()
	q.closed = true
	var rest []*transport.Request
	for r := range q.under {
		rest = append(rest, r)
	}
	clear(q.under)
	err := q.err
	q.mu.Unlock()
	for _, r := range rest {
		r.Err = err
		r.Done(r)
	}
	return nil
}

func (q *fakeQueue) Counters() transport.Counters {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.counters
}

var errCut = errors.New("cable cut")
