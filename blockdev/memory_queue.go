package blockdev

import (
	"sync"
	"time"
)

// requestList is a first-in first-out list of requests, linked through their Private.
type requestList struct{ first, last *Request }

func (l *requestList) push(r *Request) {
	r.Private.Next = nil
	if l.first == nil {
		l.first = r
	} else {
		l.last.Private.Next = r
	}
	l.last = r
}

func (l *requestList) pop() *Request {
	r := l.first
	if r != nil {
		l.first, r.Private.Next = r.Private.Next, nil
	}
	return r
}

func (l *requestList) append(m *requestList) {
	if m.first == nil {
		return
	}
	if l.first == nil {
		*l = *m
	} else {
		l.last.Private.Next = m.first
		l.last = m.last
	}
	*m = requestList{}
}

// memoryQueue is a queue of a Memory: submitted, then started, then done. A started request's
// Private.Progress is when it is due, in nanoseconds since the queue was made.
//
// Locks: mu is a leaf; Done is called without it. polling is held by the one goroutine that completes.
type memoryQueue struct {
	dev     *Memory
	epoch   time.Time
	polling sync.Mutex
	wake    chan struct{} // one token: something was started
	stop    chan struct{}
	gone    chan struct{}

	mu                 sync.Mutex
	submitted, started requestList
	closed             bool
}

func newMemoryQueue(m *Memory) *memoryQueue {
	q := &memoryQueue{
		dev: m, epoch: time.Now(),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), gone: make(chan struct{}),
	}
	if m.cfg.Latency < 0 {
		close(q.gone)
	} else {
		go q.run()
	}
	return q
}

// Submit takes r.
func (q *memoryQueue) Submit(r *Request) {
	err := q.dev.info.Load().Check(r)
	q.mu.Lock()
	if q.closed {
		err = ErrClosed
	}
	if err == nil {
		q.submitted.push(r)
	}
	q.mu.Unlock()
	if err != nil {
		r.Err = err
		r.Done(r)
	}
}

// Kick starts everything submitted.
func (q *memoryQueue) Kick() {
	if q.dev.cfg.Latency < 0 {
		q.completeAll()
		return
	}
	q.start()
	q.rouse()
}

func (q *memoryQueue) start() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.submitted.first == nil {
		return
	}
	if q.dev.cfg.Latency > 0 {
		due := int64(time.Since(q.epoch) + q.dev.cfg.Latency)
		for r := q.submitted.first; r != nil; r = r.Private.Next {
			r.Private.Progress = due
		}
	}
	q.started.append(&q.submitted)
}

// completeAll does, on this goroutine, all that was submitted when it was called.
func (q *memoryQueue) completeAll() int {
	q.mu.Lock()
	list := q.submitted
	q.submitted = requestList{}
	q.mu.Unlock()
	n := 0
	for r := list.pop(); r != nil; r = list.pop() {
		q.dev.perform(r)
		r.Done(r)
		n++
	}
	return n
}

// Poll completes what is due.
func (q *memoryQueue) Poll(wait time.Duration) int {
	if q.dev.cfg.Latency < 0 {
		return q.completeAll()
	}
	q.start()
	if !q.polling.TryLock() { // whoever polls may be past what was just started
		q.rouse()
		return 0
	}
	defer q.polling.Unlock()
	n, next := q.completeDue()
	if n == 0 && next >= 0 && wait > 0 {
		for end := time.Now().Add(wait); n == 0 && next >= 0 && time.Now().Before(end); {
			n, next = q.completeDue()
		}
	}
	if n == 0 && next >= 0 && wait >= 0 {
		q.rouse() // the device's own goroutine watches from here on
	}
	return n
}

func (q *memoryQueue) rouse() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// completeDue does all that is due now, and says in how long the next one is: below 0 if there is none.
func (q *memoryQueue) completeDue() (n int, next time.Duration) {
	var list requestList
	q.mu.Lock()
	next = -1
	if q.dev.cfg.Latency == 0 {
		list, q.started = q.started, requestList{}
	} else if q.started.first != nil {
		now := int64(time.Since(q.epoch))
		for q.started.first != nil && q.started.first.Private.Progress <= now {
			list.push(q.started.pop())
		}
		if q.started.first != nil {
			next = time.Duration(q.started.first.Private.Progress - now)
		}
	}
	q.mu.Unlock()
	for r := list.pop(); r != nil; r = list.pop() {
		q.dev.perform(r)
		r.Done(r)
		n++
	}
	return n, next
}

// run completes what no poller does.
func (q *memoryQueue) run() {
	defer close(q.gone)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-q.stop:
			return
		case <-q.wake:
		case <-timer.C:
		}
		q.polling.Lock()
		_, next := q.completeDue()
		q.polling.Unlock()
		if next >= 0 {
			timer.Reset(next)
		}
	}
}

// close fails what has not been done, and waits for what is being done.
func (q *memoryQueue) close() {
	close(q.stop)
	<-q.gone
	q.polling.Lock() // after a poller that is in the midst of completing
	defer q.polling.Unlock()
	q.mu.Lock()
	q.closed = true
	list := q.submitted
	list.append(&q.started)
	q.submitted, q.started = requestList{}, requestList{}
	q.mu.Unlock()
	for r := list.pop(); r != nil; r = list.pop() {
		r.Err = ErrClosed
		r.Done(r)
	}
}
