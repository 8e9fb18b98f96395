package target_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/target/misbehave"
	"farblk/transport/verbs"
)

// scripted starts a target that follows a script.
func scripted(t *testing.T, script string) (*bed, *misbehave.Script) {
	t.Helper()
	s, err := misbehave.Parse(script)
	if err != nil {
		t.Fatal(err)
	}
	return newBed(t, target.Config{}, func(l verbs.Listener) verbs.Listener { return misbehave.Wrap(l, s) }), s
}

// sendRead posts a read of the block at lba, without waiting for it.
func (c *client) sendRead(lba uint64) uint16 {
	_, sgl := c.data(int(lba)*512, 512)
	var cmd nvme.Command
	cmd.FillRead(1, lba, 1)
	cmd.SetSGL(sgl)
	return c.send(cmd, nil)
}

const patience = 50 * time.Millisecond

func TestScriptRejects(t *testing.T) {
	b, script := scripted(t, `
		on connect qid=2 nth=1 reject 6
		on cm qid=3 close`)
	b.subsystem()
	connectHost(t, b.addr, subNQN, 1, 32, 0)
	_, err := dial(t, b.addr, 2, 32)
	var rej *verbs.RejectError
	if !errors.As(err, &rej) || rej.PrivateData[2] != 6 {
		t.Errorf("queue 2: %v", err)
	}
	if c, err := dial(t, b.addr, 2, 32); err != nil {
		t.Errorf("queue 2 again: %v", err)
	} else {
		c.close()
	}
	if _, err := dial(t, b.addr, 3, 32); err == nil {
		t.Error("queue 3 connected")
	}
	if script.Fired(2) != 1 || script.Fired(3) == 0 {
		t.Errorf("fired %d and %d", script.Fired(2), script.Fired(3))
	}
}

// TestScriptWithoutEffect runs ordinary I/O through the decorator.
func TestScriptWithoutEffect(t *testing.T) {
	b, _ := scripted(t, "on any nth=1000000 drop")
	b.subsystem(target.NamespaceConfig{Size: 1 << 20})
	q := connectHost(t, b.addr, subNQN, 1, 32, 0).io[0]
	want := random(64 << 10)
	for range 20 {
		if err := q.write(1, 0, want, false, false); err != nil {
			t.Fatal(err)
		}
		if err := q.write(1, 200, want[:4096], true, false); err != nil {
			t.Fatal(err)
		}
		if got, err := q.read(1, 0, len(want)); err != nil || !bytes.Equal(got, want) {
			t.Fatal("data differ", err)
		}
	}
}

func TestScriptOnReads(t *testing.T) {
	for _, tt := range []struct {
		script string
		check  func(t *testing.T, q *client, want []byte)
	}{
		{"on read delay 60ms", func(t *testing.T, q *client, want []byte) {
			start := time.Now()
			got, err := q.read(1, 1, 512)
			if err != nil || !bytes.Equal(got, want[512:1024]) || time.Since(start) < 60*time.Millisecond {
				t.Error(err, time.Since(start))
			}
		}},
		{"on read hold 60ms", func(t *testing.T, q *client, want []byte) {
			start := time.Now()
			got, err := q.read(1, 1, 512)
			if err != nil || !bytes.Equal(got, want[512:1024]) || time.Since(start) < 60*time.Millisecond {
				t.Error(err, time.Since(start))
			}
		}},
		{"on read lba=1 drop", func(t *testing.T, q *client, _ []byte) {
			if _, err := q.awaitFor(q.sendRead(1), patience); err == nil {
				t.Error("a response came")
			}
			if _, err := q.await(q.sendRead(2)); err != nil {
				t.Error(err)
			}
		}},
		{"on read lba=1 ignore", func(t *testing.T, q *client, _ []byte) {
			if _, err := q.awaitFor(q.sendRead(1), patience); err == nil {
				t.Error("a response came")
			}
			if _, err := q.await(q.sendRead(2)); err != nil {
				t.Error(err)
			}
		}},
		{"on read lba=1 duplicate", func(t *testing.T, q *client, _ []byte) {
			id := q.sendRead(1)
			for range 2 {
				if _, err := q.await(id); err != nil {
					t.Error(err)
				}
			}
		}},
		{"on read lba=1 reorder", func(t *testing.T, q *client, _ []byte) {
			a := q.sendRead(1)
			if _, err := q.awaitFor(a, patience); err == nil {
				t.Fatal("a response came at once")
			}
			b := q.sendRead(2)
			if _, err := q.await(b); err != nil {
				t.Error(err)
			}
			if _, err := q.await(a); err != nil {
				t.Error(err)
			}
		}},
		{"on read status 0x281 dnr", func(t *testing.T, q *client, _ []byte) {
			_, err := q.read(1, 1, 512)
			var se *nvme.StatusError
			if !errors.As(err, &se) || se.Status.Code() != nvme.StatusUnrecoveredRead || !se.Status.DNR() {
				t.Error(err)
			}
		}},
		{"on read unknown-cid and sqhd 77", func(t *testing.T, q *client, _ []byte) {
			cqe, err := q.await(^q.sendRead(1))
			if err != nil || cqe.SQHD() != 77 {
				t.Error(err, cqe.SQHD())
			}
		}},
		{"on read lba=2 stale-cid", func(t *testing.T, q *client, _ []byte) {
			a := q.sendRead(1)
			if _, err := q.await(a); err != nil {
				t.Error(err)
			}
			q.sendRead(2)
			if _, err := q.await(a); err != nil {
				t.Error(err)
			}
		}},
		{"on read corrupt", func(t *testing.T, q *client, want []byte) {
			got, err := q.read(1, 1, 512)
			if err != nil || bytes.Equal(got, want[512:1024]) {
				t.Error("data is right", err)
			}
		}},
		{"on read short", func(t *testing.T, q *client, want []byte) {
			buf, _ := q.data(0, 512)
			clear(buf)
			got, err := q.read(1, 1, 512)
			if err != nil || !bytes.Equal(got[:256], want[512:768]) || !bytes.Equal(got[256:], make([]byte, 256)) {
				t.Error("not half of it", err)
			}
		}},
		{"on read overrun 16", func(t *testing.T, q *client, _ []byte) {
			buf, _ := q.data(0, 1024)
			clear(buf)
			if _, err := q.read(1, 1, 512); err != nil || bytes.Equal(buf[512:528], make([]byte, 16)) {
				t.Error("nothing was overrun", err)
			}
		}},
		{"on read bad-key", func(t *testing.T, q *client, _ []byte) {
			if _, err := q.read(1, 1, 512); !errors.Is(err, errLost) {
				t.Error(err)
			}
		}},
		{"on read invalidate", func(t *testing.T, q *client, _ []byte) {
			// A region's key cannot be invalidated: the connection ends.
			if _, err := q.read(1, 1, 512); !errors.Is(err, errLost) {
				t.Error(err)
			}
		}},
		{"on read nth=3 close", func(t *testing.T, q *client, _ []byte) {
			for range 2 {
				if _, err := q.read(1, 1, 512); err != nil {
					t.Error(err)
				}
			}
			if _, err := q.read(1, 1, 512); !errors.Is(err, errLost) {
				t.Error(err)
			}
		}},
		{"on read nth=2 blackhole", func(t *testing.T, q *client, _ []byte) {
			if _, err := q.read(1, 1, 512); err != nil {
				t.Error(err)
			}
			for range 3 {
				if _, err := q.awaitFor(q.sendRead(1), patience); !errors.Is(err, errTimeout) {
					t.Error(err)
				}
			}
		}},
	} {
		t.Run(tt.script, func(t *testing.T) {
			b, _ := scripted(t, tt.script)
			s := b.subsystem(target.NamespaceConfig{Size: 1 << 20})
			want := random(4096)
			if err := s.WriteAt(1, want, 0); err != nil {
				t.Fatal(err)
			}
			tt.check(t, connectHost(t, b.addr, subNQN, 1, 32, 0).io[0], want)
		})
	}
}

// TestCaseH25LateWrite has the first write applied after the second.
func TestCaseH25LateWrite(t *testing.T) {
	t.Parallel()
	b, _ := scripted(t, "on write nth=1 hold 1s") // time enough for the second to come
	s := b.subsystem(target.NamespaceConfig{Size: 1 << 20})
	q := connectHost(t, b.addr, subNQN, 1, 32, 0).io[0]
	send := func(v byte) uint16 {
		var c nvme.Command
		c.FillWrite(1, 0, 1, false)
		c.SetSGL(nvme.InCapsuleSGL(512))
		return q.send(c, bytes.Repeat([]byte{v}, 512))
	}
	for _, id := range []uint16{send(1), send(2)} {
		if _, err := q.await(id); err != nil {
			t.Fatal(err)
		}
	}
	got := make([]byte, 1)
	if err := s.ReadAt(1, got, 0); err != nil || got[0] != 1 {
		t.Errorf("the block holds %d, %v", got[0], err)
	}
}

func TestCaseH24SwappedIdentity(t *testing.T) {
	b, _ := scripted(t, `
		on identify cns=0 swap-nguid
		on identify cns=3 nth=2.. swap-nguid
		on log log=0x0c patch 16=07
		on connect nth=1 result 0x20001`)
	b.subsystem(target.NamespaceConfig{Size: 1 << 20, NGUID: nvme.NGUID{1}, UUID: nvme.UUID{2}})
	h := connectHost(t, b.addr, subNQN, 0, 0, 0)
	if !nvme.ConnectResult(0x20001).AuthRequired() || h.id != 1 {
		t.Errorf("Connect result %d", h.id)
	}
	p, err := h.admin.identify(nvme.CNSNamespace, 1)
	if n, _ := nvme.ParseIdentifyNamespace(p); err != nil || n.NGUID[0] != 0xFE || n.NSZE != 2048 {
		t.Errorf("%v, %v", n.NGUID, err)
	}
	for _, want := range []byte{1, 0xFE} {
		p, err = h.admin.identify(nvme.CNSNamespaceDescriptors, 1)
		if d, _ := nvme.ParseNamespaceIDs(p); err != nil || d.NGUID[0] != want {
			t.Errorf("%v, want %#x, %v", d.NGUID, want, err)
		}
	}
	p, err = h.admin.log(nvme.LogANA, 0, 64)
	if l, _ := nvme.ParseANALog(p); err != nil || len(l.Groups) != 1 || l.Groups[0].ID != 7 {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestCaseH18RecordsClaimed(t *testing.T) {
	b, _ := scripted(t, "on log log=0x70 records 1099511627776")
	h := connectHost(t, b.addr, nvme.DiscoveryNQN, 0, 0, 0)
	p, err := h.admin.log(nvme.LogDiscovery, 0, 1024)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nvme.ParseDiscoveryHeader(p); err == nil {
		t.Error("2^40 records believed")
	}
}

func TestScriptDuringKeepAlive(t *testing.T) {
	t.Parallel()
	b, script := scripted(t, "on keepalive nth=2.. ignore")
	b.subsystem()
	h := connectHost(t, b.addr, subNQN, 0, 0, time.Second)
	h.admin.do(func(c *nvme.Command) { c.FillKeepAlive() })
	if _, err := h.admin.try(func(c *nvme.Command) { c.FillKeepAlive() }, nil); !errors.Is(err, errLost) {
		t.Errorf("keep-alive that the target never saw: %v", err)
	}
	if script.Fired(1) != 1 {
		t.Errorf("fired %d times", script.Fired(1))
	}
}
