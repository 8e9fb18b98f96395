package blockdev

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MemoryConfig describes a Memory. Only Size is needed.
type MemoryConfig struct {
	Size      int64 // bytes; sparse, may exceed the machine's memory
	BlockSize int   // 512 if 0
	Queues    int   // 1 if 0
	PoolSize  int   // bytes, 64 MiB if 0
	// Latency is how long each request takes. Below 0 requests complete inside Kick, on the caller's goroutine;
	// 0 and above on the device's own, or the poller's.
	Latency time.Duration
	// Null moves no data and keeps none: for measuring everything else.
	Null     bool
	ReadOnly bool
	// File keeps the content, so that it outlives the process; its size is set to Size. Nil keeps it in memory.
	File     *os.File
	ID, Name string
}

// Memory is a Device in this process's memory, for tests and benchmarks. Discarded blocks read as zeroes and
// give their memory back.
type Memory struct {
	cfg    MemoryConfig
	pool   *Pool
	queues []*memoryQueue
	counts [numOps]atomic.Int64
	fua    atomic.Int64

	info atomic.Pointer[Info]

	mu       sync.Mutex
	watchers map[int]func(Info)
	nextID   int
	closed   bool

	dataMu sync.RWMutex // held shared while data moves; exclusively to unmap
	data   []byte
}

// NewMemory makes a device of zeroes.
func NewMemory(c MemoryConfig) (*Memory, error) {
	if c.BlockSize == 0 {
		c.BlockSize = 512
	}
	if c.Queues <= 0 {
		c.Queues = 1
	}
	if c.PoolSize == 0 {
		c.PoolSize = 64 << 20
	}
	if c.BlockSize < 512 || c.BlockSize > 65536 || c.BlockSize&(c.BlockSize-1) != 0 {
		return nil, fmt.Errorf("memory device: block size %d is not a power of two from 512 to 65536", c.BlockSize)
	}
	if c.Size <= 0 || c.Size%int64(c.BlockSize) != 0 {
		return nil, fmt.Errorf("memory device: size %d is not a positive multiple of the block size %d", c.Size, c.BlockSize)
	}
	if c.Name == "" {
		c.Name = "memory"
	}
	if c.ID == "" {
		c.ID = c.Name
	}
	m := &Memory{cfg: c, watchers: make(map[int]func(Info))}
	var err error
	fd, flags := -1, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE
	if c.File != nil {
		if err := c.File.Truncate(c.Size); err != nil {
			return nil, fmt.Errorf("memory device: %w", err)
		}
		fd, flags = int(c.File.Fd()), unix.MAP_SHARED
	}
	if m.data, err = unix.Mmap(fd, 0, int(c.Size), unix.PROT_READ|unix.PROT_WRITE, flags); err != nil {
		return nil, fmt.Errorf("memory device of %d bytes: %w", c.Size, os.NewSyscallError("mmap", err))
	}
	if m.pool, err = NewPool(c.PoolSize); err != nil {
		_ = unix.Munmap(m.data)
		return nil, err
	}
	m.info.Store(&Info{
		Size: c.Size, BlockSize: c.BlockSize, OptimalIO: max(4096, c.BlockSize), MaxTransfer: 128 << 10,
		ReadOnly: c.ReadOnly, WriteCache: true, Discard: true, WriteZeroes: true, DiscardZeroes: true,
		ID: c.ID, Name: c.Name,
	})
	for range c.Queues {
		m.queues = append(m.queues, newMemoryQueue(m))
	}
	return m, nil
}

// Info is the geometry as it is now.
func (m *Memory) Info() Info { return *m.info.Load() }

// Watch calls f after each Resize.
func (m *Memory) Watch(f func(Info)) (cancel func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id := m.nextID
	m.nextID++
	m.watchers[id] = f
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.watchers, id)
	}
}

// Resize changes the size to at most what the device was made with. What was cut off keeps its content.
func (m *Memory) Resize(size int64) error {
	if size <= 0 || size > m.cfg.Size || size%int64(m.cfg.BlockSize) != 0 {
		return fmt.Errorf("memory device: cannot be resized to %d", size)
	}
	m.mu.Lock()
	info := *m.info.Load()
	info.Size = size
	m.info.Store(&info)
	call := make([]func(Info), 0, len(m.watchers))
	for _, f := range m.watchers {
		call = append(call, f)
	}
	m.mu.Unlock()
	for _, f := range call {
		f(info)
	}
	return nil
}

// Queues is how many queues there are.
func (m *Memory) Queues() int { return len(m.queues) }

// Queue gives queue i modulo their number.
func (m *Memory) Queue(i int) Queue { return m.queues[uint(i)%uint(len(m.queues))] }

// Pool is where buffers come from.
func (m *Memory) Pool() *Pool { return m.pool }

// Count is how many requests of a kind were carried out.
func (m *Memory) Count(op Op) int64 { return m.counts[op].Load() }

// FUACount is how many requests with the flag FUA were carried out.
func (m *Memory) FUACount() int64 { return m.fua.Load() }

// Close fails what waits, and frees the memory. Later requests end with ErrClosed.
func (m *Memory) Close() error {
	m.mu.Lock()
	already := m.closed
	m.closed = true
	m.mu.Unlock()
	if !already {
		for _, q := range m.queues {
			q.close()
		}
		m.dataMu.Lock()
		_ = unix.Munmap(m.data)
		m.data = nil
		m.dataMu.Unlock()
	}
	return m.pool.Close()
}

// perform carries r out, and sets its outcome.
func (m *Memory) perform(r *Request) {
	m.dataMu.RLock()
	defer m.dataMu.RUnlock()
	if m.data == nil {
		r.Err = ErrClosed
		return
	}
	r.Err = nil
	m.counts[r.Op].Add(1)
	if r.Flags&FUA != 0 {
		m.fua.Add(1)
	}
	if m.cfg.Null {
		return
	}
	switch r.Op {
	case Read:
		copy(r.Data, m.data[r.Off:])
	case Write:
		copy(m.data[r.Off:], r.Data)
	case Discard, WriteZeroes:
		m.zero(r.Off, r.Len)
	}
}

// zero gives whole pages back to the machine and clears the rest.
func (m *Memory) zero(off, n int64) {
	b := m.data[off : off+n]
	head := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) % PageSize)
	if head >= len(b) {
		clear(b)
		return
	}
	clear(b[:head])
	b = b[head:]
	whole := len(b) &^ (PageSize - 1)
	clear(b[whole:])
	if whole == 0 {
		return
	}
	advice := unix.MADV_DONTNEED
	if m.cfg.File != nil {
		advice = unix.MADV_REMOVE
	}
	if err := unix.Madvise(b[:whole], advice); err != nil { // as on a file system that cannot punch holes
		clear(b[:whole])
	}
}
