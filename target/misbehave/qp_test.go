package misbehave

import "testing"

// TestTimersGo: what was put off is forgotten when it has been done.
func TestTimersGo(t *testing.T) {
	q := newQP(&conn{}, nil, nil)
	done := make(chan struct{})
	q.mu.Lock()
	q.after(0, func() { close(done) })
	q.mu.Unlock()
	<-done
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.timers) != 0 {
		t.Errorf("%d timers are left", len(q.timers))
	}
}
