// Package host is the NVMe over Fabrics host: it connects to a controller over any transport, keeps the
// connection alive, repairs it, and gives each namespace as a block device.
//
// Layers, from the top:
//
//   - Namespace is a blockdev.Device. It checks and splits requests.
//   - ioQueue owns the command records of one I/O queue. Requests that find no record wait in their own
//     memory. It outlives the association: while there is none, requests wait in it.
//   - association is one association with the controller: the fabric's queues, keep-alive, events. It is made
//     by the connect sequence (establish.go), used, closed, and never repaired.
//   - machine decides what follows from what: a pure state machine without I/O or clock.
//   - Controller runs the machine: it turns actions into work and the results into events.
//
// Data safety: a write that may have reached the controller on a lost association is not sent again before
// the controller must have given up that association (its keep-alive timer and quiesce time have passed), and
// until then no other write is sent either, because the old one could still overwrite it. A namespace whose
// identifiers changed across a reconnect gets no request at all. Controller.Grace and Controller.WritesMayLive carry
// this over to the next connection.
//
// What ends: a command that gets no completion in time ends the association and is sent again on the next, but the
// fifth time it fails, not counting when others before it made it late. What is wrong with one namespace concerns that
// one: its I/O waits, if it may be well again soon and as long as it would wait for the controller, then it fails, and it
// is looked at again until it is well. A controller that is dead fails every request at once, with the cause, until Shutdown.
//
// Sources: NVM Express Base 2.0 and 2.1, NVM Command Set 1.0, NVMe over Fabrics 1.1a.
package host
