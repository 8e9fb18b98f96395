//go:build interop && cgo

package iwarp_test

import (
	"context"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/rdmacm"
	"farblk/transport/verbs/verbstest"
)

// mixed connects with one provider and listens with another.
type mixed struct {
	verbs.Provider
	passive verbs.Provider
}

func (m mixed) Listen(ctx context.Context, a verbs.Addr, backlog int) (verbs.Listener, error) {
	return m.passive.Listen(ctx, a, backlog)
}

// TestConformanceWithLinux runs the suite between this package and Linux's siw, both ways.
func TestConformanceWithLinux(t *testing.T) {
	o := verbstest.Options{
		Listen:     verbs.Addr{IP: addr(env(t, "FARBLK_SIW_ADDR"))},
		Terminates: true, PlainReject: true, ReadsUnchecked: true, PingPongs: 1000,
	}
	for name, opt := range map[string]iwarp.Options{"CRC": {}, "no CRC": {DisableCRC: true}, "small segments": {MaxSegment: 1456}} {
		t.Run(name, func(t *testing.T) {
			soft, linux := iwarp.New(opt), rdmacm.New(rdmacm.Options{})
			t.Run("connecting", func(t *testing.T) {
				verbstest.Run(t, func(*testing.T) verbs.Provider { return mixed{soft, linux} }, o)
			})
			t.Run("listening", func(t *testing.T) {
				verbstest.Run(t, func(*testing.T) verbs.Provider { return mixed{linux, soft} }, o)
			})
		})
	}
}
