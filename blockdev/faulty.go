package blockdev

import (
	"sync"
	"time"
)

// Fault is what a Faulty device does to a request. The zero value does nothing.
type Fault struct {
	// Err is the request's outcome; it does not reach the device, unless After says that it does, and fails only
	// then: what becomes of a write whose answer was lost.
	Err   error
	After bool
	// Delay passes before the request ends.
	Delay time.Duration
	// Hold keeps the request from ending until it is closed.
	Hold <-chan struct{}
}

// Faulty is a Device with faults, for tests: a decorator, which needs nothing of the device below.
type Faulty struct {
	Device
	rule   func(*Request) Fault
	queues []Queue

	mu     sync.Mutex
	late   sync.WaitGroup // requests whose end is delayed
	closed bool
}

// NewFaulty puts faults before d. rule is asked about each request, on any goroutine, and must not block.
// Closing the Faulty closes d, and waits for delayed requests.
func NewFaulty(d Device, rule func(*Request) Fault) *Faulty {
	f := &Faulty{Device: d, rule: rule}
	for i := range d.Queues() {
		f.queues = append(f.queues, &faultyQueue{d.Queue(i), f})
	}
	return f
}

// Queue is queue i, modulo their number, with the faults.
func (f *Faulty) Queue(i int) Queue { return f.queues[uint(i)%uint(len(f.queues))] }

// Close closes the device below.
func (f *Faulty) Close() error {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.late.Wait()
	return f.Device.Close()
}

type faultyQueue struct {
	Queue
	dev *Faulty
}

// Submit asks the rule about r.
func (q *faultyQueue) Submit(r *Request) {
	fault := q.dev.rule(r)
	if fault == (Fault{}) {
		q.Queue.Submit(r)
		return
	}
	if fault.Err != nil && !fault.After {
		r.Err = fault.Err
		q.dev.end(r, fault, r.Done)
		return
	}
	done := r.Done
	r.Done = func(r *Request) {
		r.Done = done
		if fault.Err != nil {
			r.Err = fault.Err
		}
		q.dev.end(r, fault, done)
	}
	q.Queue.Submit(r)
}

// end completes r when the fault says so.
func (f *Faulty) end(r *Request, fault Fault, done func(*Request)) {
	f.mu.Lock()
	late := !f.closed && (fault.Delay > 0 || fault.Hold != nil)
	if late {
		f.late.Add(1)
	}
	f.mu.Unlock()
	if !late {
		done(r)
		return
	}
	go func() {
		defer f.late.Done()
		if fault.Hold != nil {
			<-fault.Hold
		}
		time.Sleep(fault.Delay)
		done(r)
	}()
}
