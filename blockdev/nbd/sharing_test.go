package nbd

import (
	"context"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"farblk/blockdev"
	"farblk/blockdev/blockdevtest"
)

// ask sends requests without reading a reply, until the server takes no more or the connection ends.
func (c *client) ask(count int, r request) {
	go func() {
		for i := range uint64(count) {
			r.cookie = i
			if _, err := c.sock.Write(appendRequest(nil, r)); err != nil {
				return
			}
		}
	}()
}

// held waits until n of the server's connections get no more of what they ask for before they take something.
func held(t *testing.T, s *Server, n int) {
	t.Helper()
	for end := time.Now().Add(testLimit); ; time.Sleep(time.Millisecond) { // nothing tells
		count := 0
		s.mu.Lock()
		for _, c := range s.socks {
			if c != nil {
				c.mu.Lock()
				if c.wantsRoom {
					count++
				}
				c.mu.Unlock()
			}
		}
		s.mu.Unlock()
		if count == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d connections are held, not %d", count, n)
		}
	}
}

// TestSlowReader asks for much and reads nothing for a while: the server gives it one buffer of the longest size, and
// goes on when it reads.
func TestSlowReader(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, PoolSize: 4 << 20})
	const count, n = 64, 512 << 10
	s, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c, other := dial(t, path), dial(t, path)
	c.open("n1", false)
	c.ask(count, request{command: cmdRead, length: n})
	held(t, s, 1)
	other.open("n1", false)
	other.write(0, make([]byte, n), 0)
	other.write(0, make([]byte, n), 0) // the answer to the first was sent, and its buffer is free, before this
	if reads, leased := d.Count(blockdev.Read), d.Pool().Leased(); reads != 2 || leased != blockdev.MaxLease {
		t.Errorf("a client that reads nothing has %d reads at the device, and %d bytes", reads, leased)
	}
	for range count {
		if r := c.next(n); r.errno != 0 {
			t.Fatalf("%+v", r)
		}
	}
}

// TestGreedy has many clients ask for much and read nothing: another one does not notice.
func TestGreedy(t *testing.T) {
	const greedy = 12
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, Queues: 2, PoolSize: 32 << 20})
	counted, all := blockdevtest.Arrived(d, blockdev.Read, greedy/3+greedy/3+16) // one each, and one whole Read of 16 MiB
	_, path := serve(t, Config{StallTimeout: 2 * testLimit}, Export{Name: "n1", Device: counted})
	for i := range greedy {
		c := dial(t, path)
		c.open("n1", i%3 == 1)
		switch i % 3 {
		case 0:
			c.ask(64, request{command: cmdRead, length: 1 << 20})
		case 1: // answered in parts
			c.ask(8, request{command: cmdRead, length: 16 << 20})
		case 2: // the one that is served first holds half of the pool
			c.ask(8, request{command: cmdRead, length: 16 << 20})
		}
	}
	<-all
	good := dial(t, path)
	good.open("n1", false)
	begin := time.Now()
	for i := range uint64(20) {
		good.write(i<<20, make([]byte, 1<<20), 0)
		good.read(i<<20, 1<<20)
		good.read(i<<20, 4096)
	}
	t.Logf("the good client took %v", time.Since(begin))
}

// TestEarned reads well until the client may have much leased: as much as a deep queue needs, not all there is, however
// many others are connected that do nothing.
func TestEarned(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, PoolSize: 16 << 20})
	s, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c, other := dial(t, path), dial(t, path)
	other.open("n1", false)
	for range 14 {
		dial(t, path).open("n1", false)
	}
	c.open("n1", false)
	for range 64 {
		c.read(0, 1<<20)
	}
	c.ask(64, request{command: cmdRead, length: 1 << 20})
	held(t, s, 1)
	for range 20 {
		other.read(0, 1<<20)
	}
	if n := d.Count(blockdev.Read); n != 64+8+20 { // half of the pool
		t.Errorf("%d reads reached the device", n)
	}
}

// TestSharedPool has two servers on one pool. The client of the first is the kernel, which need not show that it reads;
// each of the two leaves room to others.
func TestSharedPool(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, PoolSize: 16 << 20})
	ours, theirs, err := socketPairs(1)
	if err != nil {
		t.Fatal(err)
	}
	kernel, err := net.FileConn(theirs[0])
	closeAll(theirs)
	if err != nil {
		t.Fatal(err)
	}
	if err := ours[0].(*net.UnixConn).SetWriteBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	config := AttachConfig{Device: d}
	if err := config.setDefaults(); err != nil {
		t.Fatal(err)
	}
	a, err := newAttachment(config)
	if err != nil {
		t.Fatal(err)
	}
	a.serve(ours[0], 0)
	defer func() { kernel.Close(); a.discard() }()
	(&client{t, kernel}).ask(64, request{command: cmdRead, length: 1 << 20})
	held(t, a.srv, 1)
	if n := d.Count(blockdev.Read); n != 8 {
		t.Errorf("%d of the kernel's reads reached the device", n)
	}
	s, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c, other := dial(t, path), dial(t, path)
	c.open("n1", false)
	for range 64 {
		c.read(0, 1<<20)
	}
	c.ask(64, request{command: cmdRead, length: 1 << 20})
	held(t, s, 1)
	other.open("n1", false)
	for range 20 {
		other.read(0, 1<<20)
	}
	if n := d.Count(blockdev.Read); n != 8+64+4+20 { // half of what was left
		t.Errorf("%d reads reached the device", n)
	}
}

// TestStall has a client stop in the midst of a transfer: it is dropped when somebody needs its buffer.
func TestStall(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 8 << 20, PoolSize: 1 << 20})
	_, path := serve(t, Config{StallTimeout: 10 * time.Millisecond}, Export{Name: "n1", Device: d})
	good := dial(t, path)
	good.open("n1", false)
	for name, stop := range map[string]func(*client){
		// The server has taken what does not fit a socket's buffer when send returns.
		"writer": func(c *client) {
			c.send(append(appendRequest(nil, request{command: cmdWrite, length: 1 << 20}), make([]byte, 500_000)...))
		},
		"reader": func(c *client) {
			c.send(appendRequest(nil, request{command: cmdRead, length: 1 << 20}))
			c.receive(simpleSize)
		},
	} {
		bad := dial(t, path)
		bad.open("n1", false)
		stop(bad)
		good.read(0, 1<<20) // gets what the other holds
		if n, err := bad.sock.Write(make([]byte, 1<<20)); err == nil {
			t.Errorf("%s: the server took %d bytes more", name, n)
		}
	}
}

// TestMayStall: a client may stop for as long as nobody has waited for long.
func TestMayStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 10 * time.Second
		pool, err := blockdev.NewPool(1)
		if err != nil {
			t.Fatal(err)
		}
		c := &conn{srv: NewServer(Config{StallTimeout: limit}), pool: pool}
		var deadline time.Time
		set := func(t time.Time) error { deadline = t; return nil }
		until := func(end time.Time) func() error { // a transfer that takes that long
			return func() error {
				if deadline.Before(end) {
					time.Sleep(time.Until(deadline))
					return os.ErrDeadlineExceeded
				}
				time.Sleep(time.Until(end))
				return nil
			}
		}
		begin := time.Now()
		if err := c.mayStall(begin, set, until(begin.Add(time.Hour))); err != nil || time.Since(begin) != time.Hour || !deadline.IsZero() {
			t.Errorf("alone: %v after %v", err, time.Since(begin))
		}
		held := pool.TryLease(blockdev.MaxLease)
		wait := func(d time.Duration) { // somebody waits for d, and on
			go func() {
				time.Sleep(d)
				b, err := pool.Lease(context.Background(), 1)
				if err != nil {
					t.Error(err)
				}
				pool.Release(b)
			}()
		}
		begin = time.Now()
		wait(time.Minute)
		if err := c.mayStall(begin, set, until(begin.Add(time.Hour))); err != errStalled || time.Since(begin) > time.Minute+limit*5/4 {
			t.Errorf("with others: %v after %v", err, time.Since(begin))
		}
		begin = time.Now() // another transfer, while they still wait
		if err := c.mayStall(begin, set, until(begin.Add(limit/2))); err != nil {
			t.Errorf("a transfer that ends in time: %v", err)
		}
		pool.Release(held)
		synctest.Wait()
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
}
