package target_test

import (
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
)

// endLog hands out the lines that say how a queue ended, or that none was made.
type endLog chan string

func (l endLog) Write(p []byte) (int, error) {
	if s := string(p); strings.Contains(s, "queue ended") || strings.Contains(s, "connection rejected") {
		l <- s
	}
	return len(p), nil
}

func (l endLog) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// TestEndNoticedWithoutReceives: a queue all of whose receives are held by event requests ends with its connection.
func TestEndNoticedWithoutReceives(t *testing.T) {
	ends := make(endLog, 1)
	b := newBed(t, target.Config{Logger: ends.logger()})
	b.subsystem()
	c, err := dial(t, b.addr, 0, 4)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.connect(subNQN, hostNQN, nvme.AnyController, 0); err != nil {
		t.Fatal(err)
	}
	c.do(func(c *nvme.Command) { c.FillPropertySet(nvme.PropertyCC, uint64(nvme.EnableConfiguration)) })
	for range 4 {
		var aer nvme.Command
		aer.FillAsyncEventRequest()
		c.send(aer, nil)
	}
	for c.sent > 0 {
		if err := c.poll(time.Now().Add(limit)); err != nil {
			t.Fatal(err)
		}
	}
	c.close()
	select {
	case line := <-ends:
		if !strings.Contains(line, "level=DEBUG") {
			t.Errorf("an ordinary end: %s", line)
		}
	case <-time.After(limit):
		t.Fatal("the host hung up, and the queue is still there")
	}
}

// TestCauseOfEnd: a host that breaks the protocol, or finds that the target does, is told of in the log.
func TestCauseOfEnd(t *testing.T) {
	ends := make(endLog, 2)
	b := newBed(t, target.Config{Logger: ends.logger()})
	b.subsystem(target.NamespaceConfig{Size: 1 << 20})
	q := connectHost(t, b.addr, subNQN, 1, 32, 0).io[0]
	_, sgl := q.data(0, 4096)
	sgl.Key ^= 0x5A5A
	if _, err := q.try(func(c *nvme.Command) { c.FillRead(1, 0, 8); c.SetSGL(sgl) }, nil); !errors.Is(err, errLost) {
		t.Fatal(err)
	}
	if line := <-ends; !strings.Contains(line, "level=WARN") || !strings.Contains(line, "STag") {
		t.Errorf("a key that the host refused: %s", line)
	}
}

// TestQuietLog: the log warns neither of I/O queues that end with their controller nor of every connection that is
// rejected, but has the causes.
func TestQuietLog(t *testing.T) {
	lines := make(endLog, 16)
	b := newBed(t, target.Config{IOQueues: 2, Logger: lines.logger()})
	b.subsystem()
	expect := func(level, cause string) {
		t.Helper()
		select {
		case line := <-lines:
			if !strings.Contains(line, "level="+level) || !strings.Contains(line, cause) {
				t.Errorf("%swant %s and %q", line, level, cause)
			}
		case <-time.After(limit):
			t.Fatalf("nothing in the log of %q", cause)
		}
	}
	h := connectHost(t, b.addr, subNQN, 1, 32, 0)
	h.setCC(0)
	expect("DEBUG", "controller reset")
	h.admin.close()
	expect("DEBUG", "the host closed the connection")

	h = connectHost(t, b.addr, subNQN, 1, 32, 0)
	h.admin.close()
	for range 2 { // in either order
		expect("DEBUG", " ended")
	}
	for _, level := range []string{"WARN", "DEBUG", "DEBUG"} {
		if _, err := dial(t, b.addr, 3, 32); err == nil {
			t.Fatal("there are two I/O queues")
		}
		expect(level, "connection rejected")
	}
}

// TestMaxQueuesAtOnce: a burst of connections gets no more queues than there may be.
func TestMaxQueuesAtOnce(t *testing.T) {
	const most = 3
	b := newBed(t, target.Config{MaxQueues: most})
	b.subsystem()
	var all sync.WaitGroup
	got := make(chan *client, 8*most)
	for range cap(got) {
		all.Go(func() {
			c, err := dial(t, b.addr, 0, 32)
			var rej *verbs.RejectError
			if err == nil {
				if _, err := c.connect(subNQN, hostNQN, nvme.AnyController, 0); err == nil {
					got <- c
				}
			} else if !errors.As(err, &rej) || rej.PrivateData[2] != byte(nvme.RejectNoResources) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if len(got) == 0 || len(got) > most {
		t.Errorf("%d queues, of at most %d", len(got), most)
	}
}

// TestSilentMakeRoom: connections without Connect keep no other host out.
func TestSilentMakeRoom(t *testing.T) {
	const most = 4
	b := newBed(t, target.Config{MaxQueues: most, ConnectTimeout: 10 * limit})
	b.subsystem()
	for range most {
		if _, err := dial(t, b.addr, 1, 32); err != nil {
			t.Fatal(err)
		}
	}
	// They lose their room one by one, and no host that has connected does.
	var h *client
	for range most {
		waitFor(t, "room", func() bool {
			var err error
			h, err = dial(t, b.addr, 0, 32)
			return err == nil
		})
		if _, err := h.connect(subNQN, hostNQN, nvme.AnyController, 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := dial(t, b.addr, 0, 32); err == nil {
		t.Error("more queues than there may be")
	}
	h.close()
	waitFor(t, "room again", func() bool { return b.target.Admitted() == most-1 })
}

// TestTwoConnects: of two Connects under way at once on a queue the first counts.
func TestTwoConnects(t *testing.T) {
	b := newBed(t, target.Config{})
	b.subsystem()
	c, err := dial(t, b.addr, 0, 32)
	if err != nil {
		t.Fatal(err)
	}
	id, _ := nvme.HostIDOf(hostNQN)
	p, sgl := c.data(0, nvme.ConnectDataSize)
	copy(p, nvme.ConnectData{HostID: id, CNTLID: nvme.AnyController, SubNQN: subNQN, HostNQN: hostNQN}.Append(nil))
	var cmd nvme.Command
	cmd.FillConnect(0, 32, 0, 0)
	cmd.SetSGL(sgl)
	first, second := c.send(cmd, nil), c.send(cmd, nil)
	if cqe, err := c.await(first); err != nil || !cqe.Status().OK() {
		t.Errorf("first: %v, %v", cqe.Status(), err)
	}
	if cqe, err := c.await(second); err != nil || cqe.Status().Code() != nvme.StatusSequenceError {
		t.Errorf("second: %v, %v", cqe.Status(), err)
	}
}
