package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"

	"farblk/blockdev"
)

// benchPath runs j on a block device or file through the kernel, with direct I/O: each request that is under way
// is a thread in pread or pwrite.
func benchPath(path string, j *benchJob, interrupted <-chan struct{}) (*benchResult, error) {
	flags := unix.O_DIRECT | unix.O_RDONLY
	if j.writes() {
		flags = unix.O_DIRECT | unix.O_RDWR
		if st, err := os.Stat(path); err == nil && st.Mode()&fs.ModeDevice != 0 {
			flags |= unix.O_EXCL // fails when it is mounted, or part of another device
		}
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		if errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("%s is mounted or part of another device, and --rw %s would overwrite it: unmount it first", path, j.Mode)
		}
		if errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("%s: cannot be opened for direct I/O: %w", path, err)
		}
		return nil, err
	}
	defer f.Close()
	size, err := f.Seek(0, 2)
	if err != nil {
		return nil, err
	}
	if err := j.fit(size, path); err != nil {
		return nil, err
	}
	n := j.Queues * j.Depth
	perThread := *j
	perThread.Queues = n
	pool, err := blockdev.NewPool(n * max(j.Block, blockdev.PageSize))
	if err != nil {
		return nil, err
	}
	workers := make([]*pathWorker, n)
	for i := range workers {
		total := j.Size / int64(j.Block)
		w := &benchWorker{job: &perThread, random: 0x9E3779B97F4A7C15 * uint64(i+1), blocks: total}
		if !j.random() {
			w.first = total * int64(i) / int64(n)
			w.blocks = max(total*int64(i+1)/int64(n)-w.first, 1)
		}
		w.latency = hdrhistogram.New(benchLowest, benchHighest, benchDigits)
		workers[i] = &pathWorker{benchWorker: w, fd: int(f.Fd()), buf: pool.TryLease(j.Block)}
		if workers[i].buf == nil {
			return nil, errors.New("too many requests of that size")
		}
	}
	defer func() {
		for _, w := range workers {
			pool.Release(w.buf)
		}
		_ = pool.Close()
	}()
	r, err := measure(j, interrupted, n, func(i int, epoch time.Time, stop *atomic.Bool) { workers[i].run(epoch, stop) },
		func(i int) (uint64, uint64, *hdrhistogram.Histogram, error) {
			w := workers[i]
			return w.reads, w.writes, w.latency, w.err
		})
	return r, err
}

// pathWorker is one thread of benchPath. It shares the choice of blocks and the counting with benchWorker.
type pathWorker struct {
	*benchWorker
	fd  int
	buf []byte
}

func (w *pathWorker) run(epoch time.Time, stop *atomic.Bool) {
	r := &benchRequest{}
	r.Data = w.buf
	for !stop.Load() {
		w.fill(r)
		r.start = time.Since(epoch)
		var n int
		if r.Op == blockdev.Write {
			n, r.Err = unix.Pwrite(w.fd, w.buf, r.Off)
		} else {
			n, r.Err = unix.Pread(w.fd, w.buf, r.Off)
		}
		if r.Err == nil && n != len(w.buf) {
			r.Err = fmt.Errorf("only %d bytes", n)
		}
		if !w.count(r, time.Since(epoch), stop) {
			return
		}
	}
}

// isDevice tells whether what names a block device or file, and not a connection.
func isDevice(what string) bool {
	st, err := os.Stat(what)
	return err == nil && (st.Mode().IsRegular() || st.Mode()&fs.ModeDevice != 0 && st.Mode()&fs.ModeCharDevice == 0)
}
