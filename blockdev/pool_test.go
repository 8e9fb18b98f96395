package blockdev_test

import (
	"context"
	"errors"
	"math/bits"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"farblk/blockdev"
)

func newPool(t testing.TB, size int) *blockdev.Pool {
	t.Helper()
	p, err := blockdev.NewPool(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// TestPoolRandom leases and releases at random, and checks that buffers are aligned to their size, never overlap,
// and join again.
func TestPoolRandom(t *testing.T) {
	p := newPool(t, 4<<20)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(p.Region())))
	owner := make([]int, p.Size()/blockdev.PageSize)
	var out [][]byte
	drop := func(i int) {
		b := out[i]
		off := (uintptr(unsafe.Pointer(unsafe.SliceData(b))) - base) / blockdev.PageSize
		for k := range cap(b) / blockdev.PageSize {
			owner[int(off)+k] = 0
		}
		p.Release(b[:0])
		out[i] = out[len(out)-1]
		out = out[:len(out)-1]
	}
	want := 0
	for step := 1; step < 20000; step++ {
		if len(out) > 0 && rnd.IntN(2) == 0 {
			i := rnd.IntN(len(out))
			want -= cap(out[i])
			drop(i)
			continue
		}
		n := 1 + rnd.IntN(1<<(1+rnd.IntN(20)))
		b := p.TryLease(n)
		if b == nil {
			continue
		}
		off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - base
		if size := max(blockdev.PageSize, 1<<bits.Len(uint(n-1))); len(b) != n || cap(b) != size || off%uintptr(size) != 0 {
			t.Fatalf("lease of %d: length %d, capacity %d, offset %#x", n, len(b), cap(b), off)
		}
		for k := range cap(b) / blockdev.PageSize {
			if o := &owner[int(off/blockdev.PageSize)+k]; *o != 0 {
				t.Fatalf("step %d was given what step %d has", step, *o)
			} else {
				*o = step
			}
		}
		want += cap(b)
		out = append(out, b)
		if p.Leased() != want {
			t.Fatalf("%d bytes are leased, want %d", p.Leased(), want)
		}
	}
	for len(out) > 0 {
		drop(0)
	}
	for range 4 {
		b := p.TryLease(blockdev.MaxLease)
		if b == nil {
			t.Fatal("the pool is in pieces after all was released")
		}
		defer p.Release(b)
	}
	if p.TryLease(1) != nil || p.TryLease(0) != nil || p.TryLease(blockdev.MaxLease+1) != nil || p.TryLease(-1) != nil {
		t.Error("a lease that cannot be")
	}
}

func TestPoolMisuse(t *testing.T) {
	p, other := newPool(t, 1), newPool(t, 1)
	b := p.TryLease(4096)
	p.Release(b)
	foreign := other.TryLease(1)
	defer other.Release(foreign)
	for name, bad := range map[string][]byte{"twice": b, "foreign": foreign, "heap": make([]byte, 8)} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: release did not panic", name)
				}
			}()
			p.Release(bad)
		}()
	}
	if _, err := blockdev.NewPool(0); err == nil {
		t.Error("an empty pool was made")
	}
}

// TestPoolWaiters has many goroutines wait, some of whom give up, and loses no buffer.
func TestPoolWaiters(t *testing.T) {
	p := newPool(t, 1<<20)
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 0))
			for range 500 {
				ctx, cancel := context.WithCancel(context.Background())
				if rnd.IntN(3) == 0 {
					go cancel()
				}
				b, err := p.Lease(ctx, 1+rnd.IntN(blockdev.MaxLease))
				if err == nil {
					p.Release(b)
				} else if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	if n := p.Leased(); n != 0 {
		t.Errorf("%d bytes are lost", n)
	}
}

// TestPoolWaiting measures how long the first in line waits, for a buffer and for the right to collect.
func TestPoolWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 1<<20)
		if p.Waiting() != 0 {
			t.Error("somebody waits in a new pool")
		}
		all := p.TryLease(blockdev.MaxLease)
		ctx, cancel := context.WithCancel(context.Background())
		for range 2 {
			go func() {
				if b, err := p.Lease(ctx, 1); err == nil {
					p.Release(b)
				}
			}()
			time.Sleep(time.Second)
		}
		if w := p.Waiting(); w != 2*time.Second {
			t.Errorf("the first of two in line waits for %v", w)
		}
		p.Release(all)
		synctest.Wait()
		if w := p.Waiting(); w != 0 {
			t.Errorf("all were served, and somebody waits for %v", w)
		}
		if !p.TryCollect() || p.TryCollect() {
			t.Error("the right to collect is there once")
		}
		go func() {
			if err := p.Collect(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		gone := make(chan error, 1)
		go func() { gone <- p.Collect(ctx) }()
		time.Sleep(time.Second)
		if w := p.Waiting(); w != time.Second {
			t.Errorf("the right to collect is waited for %v", w)
		}
		cancel()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		p.EndCollect()
		synctest.Wait()
		if w := p.Waiting(); w != 0 {
			t.Errorf("the right was handed over, and somebody waits for %v", w)
		}
		p.EndCollect()
	})
}

func TestPoolClose(t *testing.T) {
	p := newPool(t, 1<<20)
	b := p.TryLease(blockdev.MaxLease)
	got := make(chan error)
	go func() {
		_, err := p.Lease(context.Background(), 1)
		got <- err
	}()
	for err := error(nil); err == nil; { // until the goroutine waits, the pool takes whoever asks
		if p.Close() == nil {
			t.Fatal("the pool was closed while a buffer was out")
		}
		err = <-got
		if !errors.Is(err, blockdev.ErrPoolClosed) {
			t.Fatal(err)
		}
	}
	if p.TryLease(1) != nil {
		t.Error("a closed pool gave a lease")
	}
	p.Release(b)
}

func BenchmarkPool(b *testing.B) {
	p := newPool(b, 8<<20)
	b.ReportAllocs()
	for b.Loop() {
		p.Release(p.TryLease(4096))
	}
}

func TestReserve(t *testing.T) {
	p, err := blockdev.NewPool(blockdev.MaxLease)
	if err != nil {
		t.Fatal(err)
	}
	if b := p.Reserve(blockdev.MaxLease / 4); len(b) != blockdev.MaxLease/4 || p.Leased() != 0 {
		t.Error(len(b), p.Leased())
	}
	if p.TryLease(blockdev.MaxLease) != nil || p.Reserve(blockdev.MaxLease) != nil {
		t.Error("reserved memory was given away")
	}
	if b := p.TryLease(blockdev.MaxLease / 2); b == nil {
		t.Error("the rest is missing")
	} else {
		p.Release(b)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
