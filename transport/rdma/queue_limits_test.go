package rdma

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"farblk/transport"
)

// TestCaseH04ReadsAdvertised: the target is promised as many RDMA READs at once as the device can answer. That a
// provider answers exactly so many is a test of package verbstest.
func TestCaseH04ReadsAdvertised(t *testing.T) {
	for most, want := range map[int]uint8{1: 1, 8: 8, 16: 16, 128: 16, 0: 16} {
		f := newFake()
		f.device.MaxResponderResources = most
		open(t, f, transport.QueueParams{ID: 1, Depth: 8}, Options{})
		if got := f.requests[0].ResponderResources; got != want {
			t.Errorf("of a device that can answer %d reads, %d are promised, want %d", most, got, want)
		}
	}
}

// TestCaseH22NoDisconnectedEvent: nobody waits for an event that may never come.
func TestCaseH22NoDisconnectedEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.mute = true
		a, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 8}, Options{})
		var rec recorder
		r := rec.request(mem[:4096], transport.ToHost)
		submit(t, q, r)
		q.Kick()
		begin := time.Now()
		_ = q.Close()
		_ = a.Close()
		if d := time.Since(begin); d > time.Second || rec.count(r) != 1 {
			t.Errorf("closing took %v, the request ended %d times", d, rec.count(r))
		}
	})
}

// TestCaseH28InCapsuleOffset: data in the capsule begin where the target expects them.
func TestCaseH28InCapsuleOffset(t *testing.T) {
	f := newFake()
	_, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 32, InCapsule: 4096}, Options{})
	var rec recorder
	for _, at := range []int{0, 512, 4095} {
		submit(t, q, rec.request(mem[at:at+4096], transport.ToController))
		q.Kick()
		b := f.far().take(t, 0).SGEs[0].Data
		if off := binary.LittleEndian.Uint64(b[24:]); off != 0 || b[39] != 1 {
			t.Errorf("descriptor % x", b[24:40])
		}
	}
}

// TestCaseH29NeverMoreThanTheReceives: neither end is sent more than it has receives for, and a retry goes on.
func TestCaseH29NeverMoreThanTheReceives(t *testing.T) {
	f := newFake()
	_, q, _ := open(t, f, transport.QueueParams{ID: 1, Depth: 8}, Options{})
	if n := f.requests[0].RNRRetryCount; n != 7 {
		t.Errorf("RNR retry count %d, want 7: for ever", n)
	}
	if n := len(f.far().recvs); n != 8 {
		t.Errorf("%d receives for a queue of 8", n)
	}
	var rec recorder
	for i := range 8 {
		if err := q.Submit(rec.request(nil, transport.None)); errors.Is(err, transport.ErrQueueFull) != (i == 7) {
			t.Errorf("command %d of a queue of 8: %v", i, err)
		}
	}
	q.Kick()
	if n := len(f.far().sends); n != 7 {
		t.Errorf("%d commands are under way, want 7", n)
	}
	for entries, ok := range map[byte]bool{7: true, 8: true, 6: false, 0: true} {
		var wrong *transport.ProtocolError
		if err := checkAccept([]byte{0, 0, entries, 0}, 8); (err == nil) != ok || !ok && !errors.As(err, &wrong) {
			t.Errorf("a controller with %d receives for a queue of 8: %v", entries, err)
		}
	}
}

// TestCaseH30QuiesceBeforeDeregister closes all while the target may still access memory: the queue pairs end
// first, then the requests, and the memory's registration last.
func TestCaseH30QuiesceBeforeDeregister(t *testing.T) {
	f := newFake()
	a, _, mem := open(t, f, transport.QueueParams{Depth: 32}, Options{})
	var ended atomic.Int32
	for id := range uint16(4) {
		q, err := a.OpenQueue(context.Background(), transport.QueueParams{ID: 1 + id, Depth: 8})
		if err != nil {
			t.Fatal(err)
		}
		qp := f.far()
		submit(t, q, &transport.Request{Data: mem[:4096], Direction: transport.ToHost, Done: func(*transport.Request) {
			if ended.Add(1); !qp.isClosed() {
				t.Error("a request ended, and its buffer was free, while the target could still write there")
			}
		}})
		q.Kick()
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	memory := slices.Index(f.closed, "1048576 bytes")
	if before := f.closed[:memory]; ended.Load() != 4 || slices.Contains(f.closed[memory:], "queue pair") || !slices.Contains(before, "queue pair") {
		t.Errorf("%d requests ended; closed in this order: %q", ended.Load(), f.closed)
	}
}

// TestCaseH40OrdinaryMemory: a target is never asked to invalidate the key of ordinary memory (descriptor type 4Fh):
// it could not, and the command would have no end.
func TestCaseH40OrdinaryMemory(t *testing.T) {
	f := newFake()
	_, q, mem := open(t, f, transport.QueueParams{ID: 1, Depth: 8, InCapsule: 512}, Options{})
	var rec recorder
	for _, d := range []transport.Direction{transport.ToHost, transport.ToController, transport.None} {
		data := mem[:4096]
		if d == transport.None {
			data = nil
		}
		submit(t, q, rec.request(data, d))
		q.Kick()
		if kind := f.far().take(t, 0).SGEs[0].Data[39]; kind != 0x40 {
			t.Errorf("%v: descriptor type %#x, want 40h", d, kind)
		}
	}
}
