// Package verbstest is the conformance suite of package verbs: what every provider must do, whatever the
// device under it. A provider's own test calls Run with an address where it can listen and connect to itself.
package verbstest

import (
	"testing"
	"time"

	"farblk/transport/verbs"
)

// Options describe the fabric under test where fabrics may differ.
type Options struct {
	// Listen is the address that the passive side binds and the active side connects to; its port is ignored.
	Listen verbs.Addr
	// Terminates says that a violation is told by a Terminate message (RFC 5040 section 4.8) and not by a
	// negative acknowledgement: a SEND or RDMA WRITE may have completed with success before, and other failures than
	// a remote access error are as good.
	Terminates bool
	// PlainReject says that the stack under test loses the private data of a reject, as Linux's siw does.
	PlainReject bool
	// ReadsUnchecked says that the stack under test lets a peer read any memory whose key it has, as Linux's siw does.
	ReadsUnchecked bool
	// PingPongs is how many round trips the wake-up test makes; 0 is 10,000.
	PingPongs int
}

// limit bounds every single wait of the suite. An emulated machine is slow; nothing waits for it to pass.
const limit = 20 * time.Second

// Run runs the whole suite, each test with a provider of its own.
func Run(t *testing.T, newProvider func(*testing.T) verbs.Provider, o Options) {
	t.Helper()
	o.Listen.Port = 0
	if o.PingPongs == 0 {
		o.PingPongs = 10_000
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T, verbs.Provider, Options)
	}{
		{"Devices", testDevices},
		{"PrivateDataBothWays", testPrivateData},
		{"RejectWithPrivateData", testReject},
		{"NobodyListens", testNobodyListens},
		{"CaseH22ConnectDeadline", testConnectDeadline},
		{"ResolveCancelled", testResolveCancelled},
		{"CloseDuringConnect", testCloseDuringConnect},
		{"QueuePairCloseDuringConnect", testQPCloseDuringConnect},
		{"ListenerCloseInterruptsAccept", testListenerClose},
		{"ListenerAcceptDeadline", testAcceptDeadline},
		{"AcceptAfterPeerLeft", testAcceptAfterPeerLeft},
		{"ListenTwice", testListenTwice},
		{"ListenElsewhere", testListenElsewhere},
		{"CaseH10SourceAddressShared", testSourceAddressShared},
		{"SharedPD", testSharedPD},
		{"Disconnect", testDisconnect},
		{"PeerCloses", testPeerCloses},
		{"CloseTwice", testCloseTwice},

		{"SendSizesInOrder", testSendSizes},
		{"CaseH26Gather", testGather},
		{"WriteSizesAndOffsets", testWrite},
		{"ReadSizesAndOffsets", testRead},
		{"WriteThenSend", testWriteThenSend},
		{"ReadThenFencedSend", testReadThenFencedSend},
		{"CaseH04ExactlyIRDReads", testReadsAtOnce},
		{"CaseH29LateReceive", testLateReceive},
		{"UnsignaledSends", testUnsignaled},
		{"CompletionsInOrder", testCompletionsInOrder},
		{"Windows", testWindows},

		{"Violations", testViolations},
		{"ForeignDomain", testForeignDomain},
		{"MessageTooLong", testMessageTooLong},
		{"WrongLocalKey", testWrongLocalKey},

		{"FlushExactlyOnce", testFlush},
		{"PostAfterDisconnect", testPostAfterDisconnect},
		{"QueueFull", testQueueFull},
		{"NoLostWakeups", testPingPong},
		{"CloseInterruptsWait", testCloseInterruptsWait},
		{"CloseUnderLoad", testCloseUnderLoad},
		{"ConcurrentPosters", testConcurrentPosters},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, newProvider(t), o) })
	}
}
