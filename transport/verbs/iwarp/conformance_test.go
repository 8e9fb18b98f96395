package iwarp_test

import (
	"net/netip"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/verbstest"
)

func TestConformance(t *testing.T) {
	for name, c := range map[string]struct {
		ip string
		o  iwarp.Options
	}{
		"IPv4":         {ip: "127.0.0.1"},
		"IPv6, no CRC": {ip: "::1", o: iwarp.Options{DisableCRC: true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			verbstest.Run(t, func(*testing.T) verbs.Provider { return iwarp.New(c.o) }, verbstest.Options{
				Listen: verbs.Addr{IP: netip.MustParseAddr(c.ip)}, Terminates: true,
			})
		})
	}
}

func BenchmarkConformance(b *testing.B) {
	verbstest.Benchmark(b, func(testing.TB) verbs.Provider { return iwarp.New(iwarp.Options{}) },
		verbstest.Options{Listen: verbs.Addr{IP: netip.MustParseAddr("127.0.0.1")}})
}
