//go:build cgo && linux

package rdmacm

/*
#include "shim.h"
#cgo noescape farblk_next_event
#cgo nocallback farblk_next_event
*/
import "C"

import (
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// event is a connection event in Go's memory.
type event struct {
	kind    eventType
	status  int
	private []byte
	// What the event says of us: how many RDMA READs of the peer to serve at once, and how many to issue.
	responderResources, initiatorDepth uint8
	retryCount, rnrRetryCount          uint8
	id                                 *C.struct_rdma_cm_id // connect request: the new connection
}

// channel is an rdma_event_channel with the goroutine that reads it.
type channel struct {
	ch      *C.struct_rdma_event_channel
	fd      *pollFD
	reader  sync.WaitGroup
	ended   chan struct{} // closed by stop
	once    sync.Once
	buf     C.struct_farblk_event
	next    func() syscall.Errno // takes an event into buf
	outcome syscall.Errno
}

// pauseMost bounds the pause after failures one upon the other: what makes them may be there to stay, such as a lack
// of memory.
const pauseMost = time.Second

// openChannel opens the connection manager. It can fail for a missing module, device node or permission.
func openChannel() (*channel, error) {
	c := &channel{ended: make(chan struct{})}
	c.next = func() syscall.Errno { return syscall.Errno(-C.farblk_next_event(c.ch, &c.buf)) }
	if r := C.farblk_create_channel(&c.ch); r != 0 {
		return nil, openFailure(syscall.Errno(-r), sysDevices, cmNode)
	}
	var err error
	if c.fd, err = newPollFD(int(c.ch.fd), "rdma_cm"); err != nil {
		C.rdma_destroy_event_channel(c.ch)
		return nil, err
	}
	return c, nil
}

// read hands every event to handle, on one goroutine, until stop.
func (c *channel) read(handle func(event)) {
	c.reader.Add(1)
	go func() {
		defer c.reader.Done()
		get := func(uintptr) bool {
			c.outcome = c.next()
			return c.outcome != syscall.EAGAIN
		}
		pause := time.Duration(0)
		for {
			if err := c.fd.wait(get); err != nil {
				return
			}
			if c.outcome == syscall.EINTR {
				continue
			}
			if c.outcome != 0 {
				if c.outcome != syscall.ENOMEM {
					// The library could not digest the event (the device went away under it).
					handle(event{kind: connectError, status: -int(c.outcome)})
				}
				pause = min(2*pause+10*time.Millisecond, pauseMost)
				select {
				case <-c.ended:
				case <-time.After(pause):
				}
				continue
			}
			pause = 0
			b := &c.buf
			e := event{
				kind: eventType(b._type), status: int(b.status), id: b.id,
				responderResources: uint8(b.responder_resources), initiatorDepth: uint8(b.initiator_depth),
				retryCount: uint8(b.retry_count), rnrRetryCount: uint8(b.rnr_retry_count),
			}
			if b.private_len > 0 {
				e.private = C.GoBytes(unsafe.Pointer(&b.private_data[0]), C.int(b.private_len))
			}
			handle(e)
		}
	}()
}

// stop ends the goroutine, and returns when it has gone.
func (c *channel) stop() {
	c.once.Do(func() { close(c.ended) })
	c.fd.close()
	c.reader.Wait()
}

// destroy frees the channel; its identifiers must be gone, and the goroutine stopped.
func (c *channel) destroy() { C.rdma_destroy_event_channel(c.ch) }
