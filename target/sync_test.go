package target_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"

	"farblk/host/nvme"
	"farblk/target"

	"golang.org/x/sys/unix"
)

// slowSyncs is a host's queue on a file whose syncs wait for the test.
func slowSyncs(t *testing.T) (*bed, *client, *target.SyncGate) {
	t.Helper()
	b, h, gate := slowHost(t)
	return b, h.io[0], gate
}

func slowHost(t *testing.T) (*bed, *host, *target.SyncGate) {
	t.Helper()
	b := newBed(t, target.Config{})
	s := b.subsystem(target.NamespaceConfig{Size: 1 << 30, File: filepath.Join(t.TempDir(), "disk")})
	gate := s.GateSyncs(1)
	return b, connectHost(t, b.addr, subNQN, 1, 32, 0), gate
}

func (c *client) sendFlush() uint16 {
	var cmd nvme.Command
	cmd.FillFlush(1)
	return c.send(cmd, nil)
}

// TestSyncAside: while a Flush waits for the disk the queue's other commands go on, and all that has to be made
// durable meanwhile is with one sync.
func TestSyncAside(t *testing.T) {
	_, q, gate := slowSyncs(t)
	want := random(4096)
	first := q.sendFlush()
	<-gate.Began
	for range 3 * q.depth {
		if err := q.write(1, 0, want, false, false); err != nil {
			t.Fatal(err)
		}
		if got, err := q.read(1, 0, len(want)); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("data differ, %v", err)
		}
	}
	var fua, zeroes nvme.Command
	fua.FillWrite(1, 8, 8, true)
	fua.SetSGL(nvme.InCapsuleSGL(uint32(len(want))))
	zeroes.FillWriteZeroes(1, 0, 1, true, true)
	waiting := []uint16{q.send(fua, want), q.send(zeroes, nil), q.sendFlush()}
	if _, err := q.read(1, 0, 512); err != nil { // the three have been begun before it
		t.Fatal(err)
	}
	for _, id := range append(waiting, first) {
		if len(q.done[id]) > 0 {
			t.Errorf("command %d ended before the data was durable", id)
		}
	}
	gate.End <- nil
	if cqe, err := q.await(first); err != nil || !cqe.Status().OK() {
		t.Errorf("flush: %v, %v", cqe.Status(), err)
	}
	<-gate.Began
	gate.End <- unix.EIO
	for _, id := range waiting {
		if cqe, err := q.await(id); err != nil || cqe.Status().Code() != nvme.StatusWriteFault {
			t.Errorf("data that did not become durable: %v, %v", cqe.Status(), err)
		}
	}
	if got, err := q.read(1, 0, 8192); err != nil || !bytes.Equal(got[512:], append(want[512:4096:4096], want...)) || got[0] != 0 {
		t.Errorf("data differ, %v", err)
	}
}

// TestCloseWaitsForSync: a store stays open until a sync that has begun is over.
func TestCloseWaitsForSync(t *testing.T) {
	b, q, gate := slowSyncs(t)
	q.sendFlush()
	<-gate.Began
	closed := make(chan error, 1)
	go func() { closed <- b.target.Close() }()
	if _, err := q.awaitFor(0xFFFF, limit); !errors.Is(err, errLost) {
		t.Errorf("a target that closes: %v", err)
	}
	select {
	case <-gate.Closed:
		t.Error("the store was closed during a sync")
	case err := <-closed:
		t.Errorf("the target was closed during a sync: %v", err)
	default:
	}
	gate.End <- nil
	if err := <-closed; err != nil {
		t.Error(err)
	}
	<-gate.Closed
}

// TestShutdownMakesDurable: a controller has shut down when all data is durable, and says when that went wrong.
func TestShutdownMakesDurable(t *testing.T) {
	_, h, gate := slowHost(t)
	for _, result := range []error{nil, unix.EIO} {
		h.setCC(nvme.EnableConfiguration | nvme.ConfigShutdown)
		<-gate.Began
		if st := h.status(); st != nvme.StatusShutdownOngoing {
			t.Errorf("CSTS %#x during a sync", st)
		}
		if _, err := h.io[0].read(1, 0, 512); !errors.Is(err, nvme.StatusSequenceError) {
			t.Errorf("a read during shutdown: %v", err)
		}
		gate.End <- result
		waitFor(t, "the shutdown", func() bool { return h.status().ShutdownComplete() })
		if st := h.status(); st.Fatal() != (result != nil) {
			t.Errorf("CSTS %#x after a sync with %v", st, result)
		}
		h.setCC(nvme.EnableConfiguration) // SHN goes back, so that it can be set again
	}
	// A reset in the midst of it, which must not be said to be over before it is; and many of them.
	h.setCC(nvme.EnableConfiguration | nvme.ConfigShutdown)
	<-gate.Began
	for range 100 {
		h.setCC(0)
		h.setCC(nvme.EnableConfiguration | nvme.ConfigShutdown)
	}
	h.setCC(0)
	if st := h.status(); st != nvme.StatusShutdownOngoing {
		t.Errorf("CSTS %#x", st)
	}
	gate.End <- nil
	waitFor(t, "the reset", func() bool { return h.status() == 0 })
}

// TestResetWaitsForWrites: no write of before a reset is carried out after it.
func TestResetWaitsForWrites(t *testing.T) {
	_, h, gate := slowHost(t)
	gate.Writes.Store(true)
	var write nvme.Command
	write.FillWrite(1, 0, 1, false)
	write.SetSGL(nvme.InCapsuleSGL(512))
	h.io[0].send(write, make([]byte, 512))
	<-gate.Began
	h.setCC(0)
	if st := h.status(); st == 0 {
		t.Error("reset during a write")
	}
	gate.End <- nil
	waitFor(t, "the reset", func() bool { return h.status() == 0 })
}

// TestResetStopsLongCommand: a command that clears the namespace again and again holds up no reset.
func TestResetStopsLongCommand(t *testing.T) {
	_, h, gate := slowHost(t)
	gate.Writes.Store(true)
	const ranges = 256
	var all []byte
	for range ranges {
		all = nvme.Range{Blocks: 1 << 30 / 512}.Append(all)
	}
	var trim nvme.Command
	trim.FillDatasetManagement(1, ranges)
	trim.SetSGL(nvme.InCapsuleSGL(uint32(len(all))))
	h.io[0].send(trim, all)
	<-gate.Began
	h.setCC(0)
	steps := 0
	for done := false; !done; {
		select {
		case <-gate.Began:
			steps++
		case gate.End <- nil:
		default:
			done = h.status() == 0
		}
	}
	if steps >= ranges-1 {
		t.Errorf("the reset took %d steps of %d ranges", steps, ranges)
	}
}
