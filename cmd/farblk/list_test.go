package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"farblk/cmd/internal/session"
	"farblk/host"
	"farblk/transport"
)

// A namespace that is refused, because another one came in its place, does not look live.
func TestCaseH24ListRefused(t *testing.T) {
	s := session.Status{Name: "farblk0", State: "live", Namespaces: []session.NamespaceStatus{
		{Namespace: session.Namespace{NSID: 1, Size: 1 << 20, BlockSize: 512}},
		{Namespace: session.Namespace{NSID: 2, Size: 1 << 20, BlockSize: 512}, Error: "another one"},
		{Namespace: session.Namespace{NSID: 3}, ANA: "optimized"},
		{Namespace: session.Namespace{NSID: 4}, ANA: "inaccessible"},
	}}
	var out bytes.Buffer
	if err := listText(&out, []session.Status{s}, false); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`farblk0 +1 .* live .*\nfarblk0 +2 .* refused .*\n.*\n.*\nfarblk0n2: another one\nfarblk0n4: the controller cannot reach it \(ANA state inaccessible\)\n$`).Match(out.Bytes()) {
		t.Errorf("%s", &out)
	}
}

func TestListVerbose(t *testing.T) {
	all := []session.Status{
		{
			Name: "farblk0", PID: 77, State: "live", Device: "rxe0", ControllerID: 3, IOQueues: 1, QueueSize: 128, MaxTransfer: 1 << 20,
			Model: "Linux", Serial: "S\x1b", Firmware: "6.12",
			Counters: &host.Counters{
				Admin: transport.Counters{Commands: 30}, PoolSize: 64 << 20, PoolLeased: 4096, Resets: 1,
				Queues: []host.QueueCounters{{Completed: 123456, Splits: 5, Outstanding: 2, Transport: transport.Counters{Commands: 99, InCapsule: 7, BytesRead: 3 << 20}}},
			},
		},
		{Name: "farblk1", State: session.Unresponsive, Error: "no answer in time"},
	}
	var out bytes.Buffer
	if err := listText(&out, all, true); err != nil {
		t.Fatal(err)
	}
	_, got, _ := strings.Cut(out.String(), "\n\n")
	const want = `farblk0: process 77, provider  (rxe0), controller 3
farblk0: model "Linux", serial "S\x1b", firmware "6.12"
farblk0: 1 I/O queue of 128, at most 1 MiB a command; 4 KiB of 64 MiB for data in use; lost 1 time
  QUEUE  COMPLETED  UNDER WAY  WAITING  SPLIT  RETRIED  RESENT  SENT  IN CAPSULE   READ  WRITTEN  DOORBELLS  POLLS  WAKE-UPS
      1     123456          2        0      5        0       0    99           7  3 MiB      0 B          0      0         0
  admin          -          -        -      -        -       -    30           0    0 B      0 B          0      0         0
farblk1: no answer in time
`
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}
