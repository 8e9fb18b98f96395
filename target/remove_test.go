package target_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
)

// TestRemovedNamespaceFreed: a namespace that was removed is freed when no command uses it any more, though the queues
// that knew it live on.
func TestRemovedNamespaceFreed(t *testing.T) {
	b, q, gate := slowSyncs(t)
	s := b.target.Subsystem(subNQN)
	flush := q.sendFlush()
	<-gate.Began
	if err := s.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	if _, err := q.read(1, 0, 512); !errors.Is(err, nvme.StatusInvalidNamespace) {
		t.Errorf("removed namespace: %v", err)
	}
	select {
	case <-gate.Closed:
		t.Error("the store was closed during a Flush")
	default:
	}
	gate.End <- nil
	if cqe, err := q.await(flush); err != nil || !cqe.Status().OK() {
		t.Errorf("flush: %v, %v", cqe.Status(), err)
	}
	freed := func(g *target.SyncGate) {
		t.Helper()
		select {
		case <-g.Closed:
		case <-time.After(limit):
			t.Fatal("still held")
		}
	}
	freed(gate)

	// Of an idle queue.
	if _, err := s.AddNamespace(target.NamespaceConfig{Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	gate = s.GateSyncs(1)
	if _, err := q.read(1, 0, 512); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveNamespace(1); err != nil {
		t.Fatal(err)
	}
	freed(gate)
}

// TestRemoveUnderIO removes namespaces while a device moves data into and out of them.
func TestRemoveUnderIO(t *testing.T) {
	for name, store := range stores {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, target.Config{}, store.wrap...)
			s := b.subsystem(store.config(t))
			q := connectHost(t, b.addr, subNQN, 1, 64, 0).io[0]
			for range 20 {
				id, err := s.AddNamespace(store.config(t))
				if err != nil {
					t.Fatal(err)
				}
				var ids []uint16
				for i := range 60 {
					_, sgl := q.data(i*32<<10, 32<<10)
					var c nvme.Command
					if c.FillWrite(id, uint64(i*64), 64, i%7 == 0); i%2 == 0 {
						c.FillRead(id, uint64(i*64), 64)
					}
					c.SetSGL(sgl)
					ids = append(ids, q.send(c, nil))
				}
				if err := s.RemoveNamespace(id); err != nil {
					t.Fatal(err)
				}
				for _, id := range ids {
					cqe, err := q.await(id)
					if err != nil || !cqe.Status().OK() && cqe.Status().Code() != nvme.StatusInvalidNamespace {
						t.Fatalf("%v, %v", cqe.Status(), err)
					}
				}
			}
			if _, err := q.read(1, 0, 512); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestManyPieces: a transfer goes over more pieces of a namespace that grew than a small queue has work requests.
func TestManyPieces(t *testing.T) {
	b := newBed(t, target.Config{}, asDevice(verbs.LinkRoCE))
	s := b.subsystem(target.NamespaceConfig{Size: 4096})
	const n = 40 * 4096
	for size := uint64(2 * 4096); size <= n; size += 4096 {
		if err := s.ResizeNamespace(1, size); err != nil {
			t.Fatal(err)
		}
	}
	q := connectHost(t, b.addr, subNQN, 1, 2, 0).io[0]
	want := random(n)
	if err := q.write(1, 0, want, false, false); err != nil {
		t.Fatal(err)
	}
	if got, err := q.read(1, 0, n); err != nil || !bytes.Equal(got, want) {
		t.Errorf("data differ, %v", err)
	}
}
