package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
)

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{
		"0": 0, "4096": 4096, "4k": 4096, "4K": 4096, "4KiB": 4096, "1G": 1 << 30, "3t": 3 << 40, "8191P": 8191 << 50,
		"": -1, "k": -1, "-1": -1, "+1": -1, "1.5G": -1, "12Q": -1, "1iB": -1, "8192P": -1, "99999999999999999999": -1, "1 G": -1,
	} {
		got, err := parseSize(s)
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q: %d, %v; want %d", s, got, err, want)
		}
	}
	for n, want := range map[int64]string{0: "0 B", 512: "512 B", 4096: "4 KiB", 1536: "1.5 KiB", 1 << 30: "1 GiB", 10 << 20: "10 MiB", 100 << 40: "100 TiB"} {
		if got := formatSize(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestParseSeconds(t *testing.T) {
	for s, want := range map[string]time.Duration{"10": 10 * time.Second, "0.5": 500 * time.Millisecond, "-1": -time.Second, "250ms": 250 * time.Millisecond} {
		if got, err := parseSeconds(s); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "x", "nan", "inf", "1e300", "1e999", "9999999h", "10 s"} {
		if got, err := parseSeconds(s); err == nil {
			t.Errorf("%q: %v", s, got)
		}
	}
}

// Two spellings of one address are one address.
func TestCaseH11AddressSpellings(t *testing.T) {
	for _, pair := range [][2]string{
		{"10.0.0.1", "::ffff:10.0.0.1"}, {"2001:db8::1", "2001:0DB8:0:0:0:0:0:1"}, {"::1", "[::1]"}, {"127.0.0.1", "localhost"},
	} {
		a, err := parseAddress(context.Background(), pair[0], false)
		if err != nil {
			t.Fatal(err)
		}
		b, err := parseAddress(context.Background(), pair[1], false)
		if err != nil {
			t.Fatal(err)
		}
		if a != b {
			t.Errorf("%s is %v, %s is %v", pair[0], a, pair[1], b)
		}
	}
}

// Without a port, the one that IANA gave NVMe over RDMA.
func TestCaseH02DefaultPort(t *testing.T) {
	for args, want := range map[string]uint16{"": 4420, "-s 4421": 4421} {
		var got *session.Config
		app := &cli.App{Flags: addressFlags(), Action: func(c *cli.Context) (err error) {
			got, err = fabricConfig(c)
			return err
		}}
		line := "farblk -a 192.0.2.1 -q nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555 " + args
		if err := app.Run(strings.Fields(line)); err != nil {
			t.Fatal(err)
		}
		if port := got.Address().Port; port != want {
			t.Errorf("%q: port %d, want %d", args, port, want)
		}
	}
}
