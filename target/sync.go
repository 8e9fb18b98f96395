package target

import "farblk/host/nvme"

// Making data durable takes a disk milliseconds, in which a queue's other commands
// go on: commands that ask for it wait for a goroutine of the queue's, one at most,
// which syncs for all that have come meanwhile at once. A command then ends in
// any order with the others, as NVMe lets it.

// sync ends a command when the store of v is durable.
func (q *queue) sync(cmd *command, v *nsView) {
	if v.syncs {
		cmd.stores = append(cmd.stores, v.store)
	}
	q.syncStores(cmd)
}

// syncStores ends a command when all of its stores are durable. It has a work
// request reserved.
func (q *queue) syncStores(cmd *command) {
	if len(cmd.stores) == 0 {
		q.settle(cmd, nvme.StatusSuccess)
		return
	}
	q.unsynced = append(q.unsynced, cmd)
	if !q.syncing {
		q.syncing = true
		q.aside.Go(q.syncAside)
	}
}

// syncAside syncs until no command waits for it. What still waits when the queue
// has ended, nobody hears of.
func (q *queue) syncAside() {
	q.mu.Lock()
	defer q.mu.Unlock()
	results := make(map[backend]error)
	for len(q.unsynced) > 0 && q.dead == nil {
		batch := q.unsynced
		q.unsynced = nil
		clear(results)
		for _, cmd := range batch {
			for _, b := range cmd.stores {
				results[b] = nil
			}
		}
		q.mu.Unlock()
		for b := range results {
			results[b] = b.sync()
		}
		q.mu.Lock()
		if q.dead != nil {
			break
		}
		for _, cmd := range batch {
			var err error
			for _, b := range cmd.stores {
				if err == nil {
					err = results[b]
				}
			}
			q.settle(cmd, q.writeStatus(err))
		}
		if err := q.flush(); err != nil {
			q.log.Debug("sending a response failed", "err", err) // the queue's goroutine meets the same error
		}
	}
	q.syncing = false
}

// settle ends a command that changed data, or a Flush.
func (q *queue) settle(cmd *command, s nvme.StatusCode) {
	if s.OK() {
		switch q.capsule(cmd).Opcode() {
		case nvme.IOWrite:
			q.stats.writes.Add(1)
			q.stats.writeBytes.Add(uint64(cmd.size))
		case nvme.IOWriteZeroes:
			q.stats.zeroes.Add(1)
		}
	}
	q.respond(cmd, 0, s)
}
