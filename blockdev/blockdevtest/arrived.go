package blockdevtest

import (
	"sync/atomic"

	"farblk/blockdev"
)

// Arrived is a view of d, and a channel that is closed when n requests of one kind were submitted to it. Closing the
// view closes d.
func Arrived(d blockdev.Device, op blockdev.Op, n int64) (blockdev.Device, <-chan struct{}) {
	var count atomic.Int64
	all := make(chan struct{})
	return blockdev.NewFaulty(d, func(r *blockdev.Request) blockdev.Fault {
		if r.Op == op && count.Add(1) == n {
			close(all)
		}
		return blockdev.Fault{}
	}), all
}
