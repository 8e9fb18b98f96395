// Package blockdevtest is the conformance suite that every blockdev.Device passes.
package blockdevtest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"farblk/blockdev"
)

// limit is how long the suite waits for anything before it calls it lost.
const limit = 30 * time.Second

// Run tests the devices that open gives: each is new or holds anything, is at least 4 MiB, may be written all
// over, and is closed by the suite.
func Run(t *testing.T, open func(*testing.T) blockdev.Device) {
	for _, c := range []struct {
		name string
		test func(*testing.T, blockdev.Device)
	}{
		{"Geometry", testGeometry},
		{"Range", testRange},
		{"Model", testModel},
		{"Large", testLarge},
		{"Zeroes", testZeroes},
		{"WholeDeviceDiscard", testWholeDiscard},
		{"Flush", testFlush},
		{"Concurrent", testConcurrent},
		{"SubmitFromDone", testSubmitFromDone},
		{"Poll", testPoll},
		{"PoolExhausted", testPoolExhausted},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t)
			c.test(t, d)
			if n := d.Pool().Leased(); n != 0 {
				t.Errorf("%d bytes are still leased", n)
			}
			if err := d.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	t.Run("Close", func(t *testing.T) { testClose(t, open(t)) })
}

// do runs one request on queue i, by polling or by waiting as i is odd or even, and gives its outcome.
func do(t *testing.T, d blockdev.Device, i int, r *blockdev.Request) error {
	t.Helper()
	var calls atomic.Int32
	done := make(chan struct{})
	r.Done = func(x *blockdev.Request) {
		if x != r {
			t.Error("Done was given another request")
		}
		if calls.Add(1) == 1 {
			close(done)
		} else {
			t.Error("Done was called twice")
		}
	}
	q := d.Queue(i)
	q.Submit(r)
	if i%2 == 1 {
		for range 3 {
			q.Poll(-1)
		}
		for q.Poll(time.Millisecond) > 0 {
		}
	}
	q.Kick()
	wait(t, done)
	return r.Err
}

func wait(t *testing.T, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatal("a request was not completed")
	}
}

func lease(t *testing.T, d blockdev.Device, n int) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	b, err := d.Pool().Lease(ctx, n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// fill gives b content that tells where on the device, and in which round, it was written.
func fill(b []byte, off int64, round byte) {
	for i := range b {
		x := uint64(off+int64(i))/8*0x9e3779b97f4a7c15 + uint64(round)*0x100000001b3
		b[i] = byte(x>>32) ^ byte(i)
	}
}

func testGeometry(t *testing.T, d blockdev.Device) {
	i := d.Info()
	if i.BlockSize < 512 || i.BlockSize > 65536 || i.BlockSize&(i.BlockSize-1) != 0 {
		t.Errorf("block size %d", i.BlockSize)
	}
	if i.Size < 4<<20 || i.Size%int64(i.BlockSize) != 0 {
		t.Errorf("size %d", i.Size)
	}
	if i.MaxTransfer < i.BlockSize {
		t.Errorf("largest transfer %d", i.MaxTransfer)
	}
	if i.ID == "" || i.Name == "" {
		t.Errorf("identity %q, name %q", i.ID, i.Name)
	}
	if d.Queues() < 1 || d.Queue(0) == nil || d.Queue(d.Queues()) != d.Queue(0) {
		t.Errorf("%d queues", d.Queues())
	}
	d.Watch(func(blockdev.Info) {})()
}

func testRange(t *testing.T, d blockdev.Device) {
	info := d.Info()
	bs := int64(info.BlockSize)
	buf := lease(t, d, 2*info.BlockSize)
	defer d.Pool().Release(buf)
	for _, c := range []struct {
		name   string
		off, n int64
		want   error
	}{
		{"last block", info.Size - bs, bs, nil},
		{"across the end", info.Size - bs, 2 * bs, blockdev.ErrRange},
		{"at the end", info.Size, bs, blockdev.ErrRange},
		{"far behind", math.MaxInt64 &^ (bs - 1), bs, blockdev.ErrRange},
		{"negative", -bs, bs, blockdev.ErrRange},
		{"empty", 0, 0, blockdev.ErrRange},
		{"offset", 1, bs, blockdev.ErrAlignment},
		{"length", 0, bs + 1, blockdev.ErrAlignment},
		{"half a block", bs / 2, bs / 2, blockdev.ErrAlignment},
	} {
		for op := blockdev.Read; op <= blockdev.WriteZeroes; op++ {
			want := c.want
			switch {
			case op == blockdev.Flush:
				continue
			case op == blockdev.Discard && !info.Discard, op == blockdev.WriteZeroes && !info.WriteZeroes:
				want = blockdev.ErrUnsupported
			case op != blockdev.Read && info.ReadOnly:
				want = blockdev.ErrReadOnly
			}
			for q := range 2 {
				err := do(t, d, q, &blockdev.Request{Op: op, Off: c.off, Len: c.n, Data: buf[:c.n]})
				if !errors.Is(err, want) {
					t.Errorf("%v %s: %v, want %v", op, c.name, err, want)
				}
			}
		}
	}
	if err := do(t, d, 0, &blockdev.Request{Op: 200}); !errors.Is(err, blockdev.ErrUnsupported) {
		t.Errorf("operation 200: %v", err)
	}
}

// testModel does random requests and compares each read with a model.
func testModel(t *testing.T, d blockdev.Device) {
	info := d.Info()
	if info.ReadOnly {
		t.Skip("read-only")
	}
	const area = 2 << 20
	base := (info.Size - area) &^ int64(info.BlockSize-1) / 2 &^ int64(info.BlockSize-1)
	model := make([]byte, area)
	if err := writeAll(t, d, base, model); err != nil {
		t.Fatal(err)
	}
	known := bytes.Repeat([]byte{1}, area/info.BlockSize) // blocks whose content is defined
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for step := range 600 {
		blocks := 1 + rnd.IntN(min(16, blockdev.MaxLease/info.BlockSize))
		if rnd.IntN(16) == 0 {
			blocks = 1 + rnd.IntN(blockdev.MaxLease/info.BlockSize)
		}
		n := blocks * info.BlockSize
		first := rnd.IntN(area/info.BlockSize - blocks + 1)
		off := first * info.BlockSize
		r := &blockdev.Request{Off: base + int64(off), Len: int64(n)}
		switch k := rnd.IntN(10); {
		case k < 4:
			r.Op = blockdev.Write
		case k == 4 && info.WriteZeroes:
			r.Op = blockdev.WriteZeroes
		case k == 5 && info.Discard:
			r.Op = blockdev.Discard
		}
		if r.Op != blockdev.Read && rnd.IntN(4) == 0 {
			r.Flags = blockdev.FUA
		}
		if r.Op == blockdev.Read || r.Op == blockdev.Write {
			r.Data = lease(t, d, n)
		}
		if r.Op == blockdev.Write {
			fill(r.Data, r.Off, byte(step))
		}
		if err := do(t, d, step%(d.Queues()+1), r); err != nil {
			t.Fatalf("step %d: %v of %d at %d: %v", step, r.Op, n, r.Off, err)
		}
		part, def := model[off:off+n], known[first:first+blocks]
		switch r.Op {
		case blockdev.Read:
			for i := range blocks {
				got, want := r.Data[i*info.BlockSize:][:info.BlockSize], part[i*info.BlockSize:][:info.BlockSize]
				if def[i] == 1 && !bytes.Equal(got, want) {
					t.Fatalf("step %d: block at %d differs from what was written", step, r.Off+int64(i*info.BlockSize))
				}
			}
		case blockdev.Write:
			copy(part, r.Data)
		default:
			clear(part)
		}
		if r.Op == blockdev.Discard && !info.DiscardZeroes {
			clear(def)
		} else if r.Op != blockdev.Read {
			copy(def, bytes.Repeat([]byte{1}, blocks))
		}
		if r.Data != nil {
			d.Pool().Release(r.Data)
		}
	}
}

func writeAll(t *testing.T, d blockdev.Device, off int64, b []byte) error {
	t.Helper()
	buf := lease(t, d, blockdev.MaxLease)
	defer d.Pool().Release(buf)
	for len(b) > 0 {
		n := copy(buf, b)
		if err := do(t, d, 0, &blockdev.Request{Op: blockdev.Write, Off: off, Data: buf[:n]}); err != nil {
			return err
		}
		off, b = off+int64(n), b[n:]
	}
	return nil
}

// testLarge moves as much as one request can, which is more than one command can on most devices.
func testLarge(t *testing.T, d blockdev.Device) {
	info := d.Info()
	if info.ReadOnly {
		t.Skip("read-only")
	}
	buf, back := lease(t, d, blockdev.MaxLease), lease(t, d, blockdev.MaxLease)
	defer d.Pool().Release(buf)
	defer d.Pool().Release(back)
	for i, n := range []int{blockdev.MaxLease, info.MaxTransfer + info.BlockSize, 3*info.MaxTransfer - info.BlockSize} {
		if n > blockdev.MaxLease || n <= 0 {
			continue
		}
		off := int64(info.BlockSize)
		fill(buf[:n], off, byte(i))
		if err := do(t, d, i, &blockdev.Request{Op: blockdev.Write, Off: off, Data: buf[:n]}); err != nil {
			t.Fatal(err)
		}
		clear(back)
		if err := do(t, d, i+1, &blockdev.Request{Op: blockdev.Read, Off: off, Data: back[:n]}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(buf[:n], back[:n]) {
			t.Errorf("%d bytes came back different", n)
		}
	}
}

func testZeroes(t *testing.T, d blockdev.Device) {
	info := d.Info()
	if info.ReadOnly {
		t.Skip("read-only")
	}
	buf := lease(t, d, 16*info.BlockSize)
	defer d.Pool().Release(buf)
	for _, c := range []struct {
		op      blockdev.Op
		flags   blockdev.Flags
		support bool
		zero    bool
	}{
		{blockdev.WriteZeroes, 0, info.WriteZeroes, true},
		{blockdev.WriteZeroes, blockdev.NoUnmap | blockdev.FUA, info.WriteZeroes, true},
		{blockdev.Discard, 0, info.Discard, info.DiscardZeroes},
	} {
		if !c.support {
			continue
		}
		n, bs := int64(len(buf)), int64(info.BlockSize)
		for i := range buf {
			buf[i] = 0xa5
		}
		if err := do(t, d, 0, &blockdev.Request{Op: blockdev.Write, Data: buf}); err != nil {
			t.Fatal(err)
		}
		if err := do(t, d, 1, &blockdev.Request{Op: c.op, Flags: c.flags, Off: bs, Len: n - 2*bs}); err != nil {
			t.Fatalf("%v: %v", c.op, err)
		}
		if err := do(t, d, 0, &blockdev.Request{Op: blockdev.Read, Data: buf}); err != nil {
			t.Fatal(err)
		}
		for i, b := range buf {
			inside := int64(i) >= bs && int64(i) < n-bs
			if inside && c.zero && b != 0 || !inside && b != 0xa5 {
				t.Fatalf("%v: byte %d is %#x", c.op, i, b)
			}
		}
	}
}

// testWholeDiscard discards everything with one request, whatever the device's own limits.
func testWholeDiscard(t *testing.T, d blockdev.Device) {
	info := d.Info()
	if info.ReadOnly || !info.Discard {
		t.Skip("no discard")
	}
	if err := do(t, d, 0, &blockdev.Request{Op: blockdev.Discard, Len: info.Size}); err != nil {
		t.Fatal(err)
	}
}

func testFlush(t *testing.T, d blockdev.Device) {
	info := d.Info()
	buf := lease(t, d, info.BlockSize)
	defer d.Pool().Release(buf)
	for q := range d.Queues() + 1 {
		if !info.ReadOnly {
			if err := do(t, d, q, &blockdev.Request{Op: blockdev.Write, Flags: blockdev.FUA, Data: buf}); err != nil {
				t.Error(err)
			}
		}
		// its place and length mean nothing
		if err := do(t, d, q, &blockdev.Request{Op: blockdev.Flush, Off: -1, Len: math.MaxInt64}); err != nil {
			t.Error(err)
		}
	}
}
