package main

import (
	"io"
	"testing"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host/nvme"
)

// A subsystem that a connection has already is well only if that connection can still be of use.
func TestConnectAllChecksWhatItSkips(t *testing.T) {
	for state, fails := range map[string]bool{
		"live": false, "connecting": false, "resetting": false, "reconnecting": false, "": false,
		"dead": true, session.Unresponsive: true, session.Crashed: true,
	} {
		for _, err := range []error{&session.AlreadyConnectedError{Name: "farblk3"}, &session.SecondPathError{Name: "farblk3"}} {
			a := &allConnections{
				c: cli.NewContext(&cli.App{Writer: io.Discard, ErrWriter: io.Discard}, nil, nil), stateOf: func(string) string { return state },
			}
			a.connect([]nvme.DiscoveryEntry{{}, {}}, func(nvme.DiscoveryEntry) (*session.Result, error) { return nil, err })
			if got := a.finish(); (got != nil) != fails || fails && got.Error() != "farblk3 is "+state+": disconnect it" {
				t.Errorf("%s: %v", state, got)
			}
		}
	}
}
