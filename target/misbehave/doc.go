// Package misbehave makes any NVMe over RDMA target misbehave as a script says,
// to test hosts. It stands between the target and its verbs provider, as a
// decorator of verbs.Listener, and knows nothing of the target behind it.
//
// A script has one rule a line; "#" begins a comment.
//
//	on cm qid=2 reject 6            # no resources for I/O queue 2
//	on connect delay 2s             # slow answer to every Connect command
//	on read nth=3 delay 100ms and corrupt
//	on write nth=1 hold 2s          # the first write is carried out late
//	on keepalive nth=2.. ignore     # from the second on
//	on identify cns=0 swap-nguid
//	on log log=0x70 records 1099511627776
//	after 10 close                  # the 10th command of all ends its queue
//
// # Events
//
// "cm" is a connection request. Commands: connect, disconnect, property-get,
// property-set; identify, log, get-features, set-features, aer, keepalive,
// abort; read, write, flush, dsm, write-zeroes. Groups of commands: any, admin
// and io, the latter two without the Fabrics commands. "on connect ... reject"
// is taken as "on cm". "after N" is "on any nth=N".
//
// # Filters
//
//	qid=N qid=A-B      queue ID
//	nsid=N nsid=A-B    namespace ID
//	lba=N lba=A-B      first logical block of read, write and write-zeroes
//	cns=N log=N feature=N
//	nth=N nth=N..      the Nth that passes the other filters; from the Nth on
//	every=N            each Nth of those
//	times=N            at most N times
//
// Counts run over all connections of the script, from the rule's beginning.
//
// # Actions
//
// On a connection request:
//
//	reject N           with NVMe/RDMA reason N
//	delay D            accept after D
//	ignore             never answer
//	close              close it without an answer
//
// On a command, before the target sees it:
//
//	hold D             the target gets it after D
//	ignore             the target never gets it
//	close              the connection is closed instead
//	blackhole          the queue sends and receives nothing from here on
//
// On its data and response:
//
//	delay D            both leave after D
//	reorder [N]        both leave after N later responses of the queue, or 1
//	drop               the data leaves, the response does not
//	duplicate          the response leaves twice
//	status N [dnr]     status type and code, such as 0x281
//	result N           dword 0
//	cid N              command ID
//	unknown-cid        an ID that is not the command's
//	stale-cid          the ID of the response before
//	sqhd N             submission queue head
//	invalidate         the response invalidates the command's key
//	corrupt            one bit of the data is flipped
//	short              the second half of the data is missing
//	overrun [N]        N bytes, or 4096, follow the data in the host's memory
//	bad-key            the data goes to a key that is not the command's
//	patch OFF=HEX      bytes of the data are replaced
//	swap-nguid         NGUID and UUID in Identify data become others
//	records N          the discovery log's number of entries
//
// Several actions are joined by "and". Rules are looked at in order, and all
// that match apply. Numbers are decimal or 0x; durations as in Go.
package misbehave
