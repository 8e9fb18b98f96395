package target

import "sync/atomic"

// Stats counts what hosts asked of a subsystem on I/O queues.
type Stats struct {
	Reads, Writes            uint64 // commands that succeeded
	ReadBytes, WriteBytes    uint64
	InCapsuleWrites          uint64 // of Writes
	FUAWrites                uint64 // of Writes
	Flushes                  uint64
	WriteZeroes, Deallocates uint64 // commands
	DeallocatedRanges        uint64
	Failures                 uint64 // commands that completed with an error
	Queues                   uint64 // I/O queues connected now
}

// counters are one queue's part. Only the queue adds.
type counters struct {
	reads, writes, readBytes, writeBytes   atomic.Uint64
	inCapsule, fua, flushes, zeroes, trims atomic.Uint64
	ranges, failures                       atomic.Uint64
}

func (c *counters) addTo(s *Stats) {
	s.Reads += c.reads.Load()
	s.Writes += c.writes.Load()
	s.ReadBytes += c.readBytes.Load()
	s.WriteBytes += c.writeBytes.Load()
	s.InCapsuleWrites += c.inCapsule.Load()
	s.FUAWrites += c.fua.Load()
	s.Flushes += c.flushes.Load()
	s.WriteZeroes += c.zeroes.Load()
	s.Deallocates += c.trims.Load()
	s.DeallocatedRanges += c.ranges.Load()
	s.Failures += c.failures.Load()
}

// Stats returns the counts since the subsystem was added.
func (s *Subsystem) Stats() Stats {
	queues := s.t.queueList(func(q *queue) bool { return q.subsystem.Load() == s && q.qid != 0 })
	s.mu.Lock()
	st := s.old
	s.mu.Unlock()
	for _, q := range queues {
		q.stats.addTo(&st)
		st.Queues++
	}
	return st
}
