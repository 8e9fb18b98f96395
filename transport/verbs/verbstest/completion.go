package verbstest

import (
	"errors"
	"sync"
	"testing"

	"farblk/transport/verbs"
)

func testFlush(t *testing.T, p verbs.Provider, o Options) {
	for _, who := range []string{"Here", "There"} {
		t.Run(who, func(t *testing.T) {
			cl, sv := connect(t, p, o, shape{})
			owed := map[uint64]verbs.Opcode{}
			for range 32 {
				owed[cl.recv(0, 64)] = verbs.OpRecv
			}
			var wrs []verbs.SendWR
			for i := range 24 {
				w := cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, 1<<20)
				if i%3 == 2 {
					w.Op = verbs.OpRDMARead
				}
				owed[w.ID] = w.Op
				wrs = append(wrs, w)
			}
			cl.post(wrs...)
			first := cl
			if who == "There" {
				first = sv
			}
			if err := first.conn.Disconnect(); err != nil {
				t.Fatal(err)
			}
			for _, c := range cl.take(len(owed)) {
				op, ok := owed[c.ID]
				if !ok {
					t.Fatalf("%+v completes twice, or was never posted", c)
				}
				delete(owed, c.ID)
				if c.Status == verbs.StatusOK && (op == verbs.OpRecv || c.Op != op) {
					t.Errorf("%+v, a %v", c, op)
				}
			}
			_ = cl.down()
			if n, err := cl.poll(); n != 0 || err != nil {
				t.Errorf("%d more completions, %v", n, err)
			}
		})
	}
}

func testPostAfterDisconnect(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{mem: 1 << 16})
	if err := sv.conn.Disconnect(); err != nil {
		t.Fatal(err)
	}
	_ = cl.down()
	w := cl.send(0, 64)
	if n, err := cl.qp.PostSend([]verbs.SendWR{w}); err == nil && n == 1 {
		if c := cl.take(1)[0]; c.ID != w.ID || c.Status != verbs.StatusFlushed {
			t.Errorf("posted after the end: %+v", c)
		}
	} else if err == nil || n != 0 {
		t.Errorf("PostSend after the end: %d, %v", n, err)
	}
}

func testQueueFull(t *testing.T, p verbs.Provider, o Options) {
	const depth, many = 4, 1024
	cl, sv := connect(t, p, o, shape{qp: verbs.QPConfig{SendDepth: depth, RecvDepth: depth}})
	var wrs []verbs.SendWR
	for range many {
		wrs = append(wrs, cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, 1024))
	}
	for range 3 { // room comes back
		n, err := cl.qp.PostSend(wrs)
		if n < depth || n == many || !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("posted %d to a queue of %d: %v", n, depth, err)
		}
		cl.await(n, verbs.StatusOK)
	}
	var rs []verbs.RecvWR
	for range many {
		rs = append(rs, sv.recvWR(0, 64))
	}
	if n, err := sv.qp.PostRecv(rs); n < depth || n == many || !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("posted %d receives to a queue of %d: %v", n, depth, err)
	}
}

func testPingPong(t *testing.T, p verbs.Provider, o Options) {
	rounds := o.PingPongs
	if testing.Short() {
		rounds = min(rounds, 1000)
	}
	cl, sv := connect(t, p, o, shape{mem: 4096})
	var echo sync.WaitGroup
	echo.Add(1)
	sv.recv(0, 8)
	failed := make(chan error, 1)
	go func() {
		defer echo.Done()
		for range rounds {
			if err := sv.message(verbs.OpRecv); err != nil {
				failed <- err
				_ = cl.conn.Disconnect()
				return
			}
			if _, err := sv.qp.PostRecv([]verbs.RecvWR{sv.recvWR(0, 8)}); err != nil {
				failed <- err
				_ = cl.conn.Disconnect()
				return
			}
			w := sv.send(8, 8)
			w.Flags = 0
			if sv.next%8 == 0 { // some signals, so that the queue drains
				w.Flags = verbs.Signaled
			}
			if _, err := sv.qp.PostSend([]verbs.SendWR{w}); err != nil {
				failed <- err
				_ = cl.conn.Disconnect()
				return
			}
		}
	}()
	for i := range rounds {
		cl.recv(0, 8)
		cl.post(cl.send(8, 8))
		for range 2 {
			if cs := cl.take(1); cs[0].Status != verbs.StatusOK {
				select {
				case err := <-failed:
					t.Fatalf("round %d: passive side: %v", i, err)
				default:
					t.Fatalf("round %d: %+v", i, cs[0])
				}
			}
		}
	}
	echo.Wait()
}

// message waits for a completion of the operation, skipping others; it can run outside the test's goroutine.
func (e *end) message(op verbs.Opcode) error {
	for {
		for len(e.seen) > 0 {
			c := e.seen[0]
			e.seen = e.seen[:copy(e.seen, e.seen[1:])]
			if c.Status != verbs.StatusOK {
				return errors.New(c.Status.String())
			}
			if c.Op == op {
				return nil
			}
		}
		if err := e.qp.Arm(); err != nil {
			return err
		}
		n, err := e.poll()
		if err != nil {
			return err
		}
		if n == 0 {
			if err := e.qp.Wait(); err != nil {
				return err
			}
		}
	}
}

func testCloseInterruptsWait(t *testing.T, p verbs.Provider, o Options) {
	for _, armed := range []bool{false, true} {
		cl, _ := connect(t, p, o, shape{mem: 1 << 16})
		result := make(chan error, 1)
		if armed {
			if err := cl.qp.Arm(); err != nil {
				t.Fatal(err)
			}
		}
		go func() {
			for {
				if err := cl.qp.Wait(); err != nil {
					result <- err
					return
				}
			}
		}()
		mustClose(t, "queue pair", cl.qp.Close)
		if err := <-result; !errors.Is(err, verbs.ErrClosed) {
			t.Errorf("armed %v: interrupted Wait: %v", armed, err)
		}
	}
}

// testCloseUnderLoad closes a connection while one goroutine posts and another polls.
func testCloseUnderLoad(t *testing.T, p verbs.Provider, o Options) {
	l := listen(t, p, o)
	for range 5 {
		cl, sv := connectTo(t, p, l, shape{})
		var wg sync.WaitGroup
		started := make(chan struct{})
		start := sync.OnceFunc(func() { close(started) })
		wg.Add(2)
		go func() {
			defer wg.Done()
			defer start()
			wrs := []verbs.SendWR{cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, 16<<10), cl.rdma(verbs.OpRDMARead, 0, sv, 0, 16<<10)}
			for i := 0; ; i++ {
				if i == 50 {
					start()
				}
				if _, err := cl.qp.PostSend(wrs); err != nil && !errors.Is(err, verbs.ErrQueueFull) {
					return
				}
			}
		}()
		go func() {
			defer wg.Done()
			var cs [16]verbs.Completion
			for {
				n, err := cl.qp.Poll(cs[:])
				if err == nil && n == 0 {
					if err = cl.qp.Arm(); err == nil {
						if n, err = cl.qp.Poll(cs[:]); err == nil && n == 0 {
							err = cl.qp.Wait()
						}
					}
				}
				if err != nil {
					return
				}
			}
		}()
		<-started
		mustClose(t, "active side", cl.conn.Close)
		wg.Wait()
		_ = sv.down()
	}
}

func testConcurrentPosters(t *testing.T, p verbs.Provider, o Options) {
	cl, sv := connect(t, p, o, shape{qp: verbs.QPConfig{SendDepth: 256, RecvDepth: 16}})
	const posters, each = 4, 50
	wrs := make([][]verbs.SendWR, posters)
	owed := map[uint64]bool{}
	for i := range wrs {
		for range each {
			w := cl.rdma(verbs.OpRDMAWrite, 0, sv, 0, 512)
			owed[w.ID] = true
			wrs[i] = append(wrs[i], w)
		}
	}
	errs := make(chan error, posters)
	for _, mine := range wrs {
		go func() {
			for i := range mine {
				if _, err := cl.qp.PostSend(mine[i : i+1]); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for _, c := range cl.await(posters*each, verbs.StatusOK) {
		if !owed[c.ID] {
			t.Fatalf("%+v completes twice, or was never posted", c)
		}
		delete(owed, c.ID)
	}
	for range posters {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
