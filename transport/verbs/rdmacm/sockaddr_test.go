package rdmacm

import (
	"encoding/hex"
	"errors"
	"net"
	"net/netip"
	"testing"

	"farblk/transport/verbs"
)

func addr(t *testing.T, s string) verbs.Addr {
	t.Helper()
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		t.Fatal(err)
	}
	return verbs.Addr{IP: a.Addr(), Port: a.Port()}
}

func TestSockaddrRoundTrip(t *testing.T) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	gid := addr(t, "[fe80::2:c903:1:2]:4420")
	gid.Family = verbs.FamilyIB
	for _, a := range []verbs.Addr{
		addr(t, "10.9.0.1:4420"), addr(t, "[2001:db8::1]:65535"), addr(t, "[fe80::1%"+lo.Name+"]:1"), addr(t, "0.0.0.0:0"), gid,
	} {
		s, err := encode(a)
		if err != nil {
			t.Errorf("%v: %v", a, err)
			continue
		}
		if got := decode(&s); got != a {
			t.Errorf("%v comes back as %v", a, got)
		}
	}
}

// The bytes are Linux's on a little-endian machine.
func TestSockaddrLayout(t *testing.T) {
	gid := addr(t, "[fe80::2]:4420")
	gid.Family = verbs.FamilyIB
	for _, c := range []struct {
		a    verbs.Addr
		want string
	}{
		{addr(t, "10.9.0.1:4420"), "0200" + "1144" + "0a090001" + "0000000000000000"},
		{addr(t, "[::ffff:10.9.0.1]:4420"), "0200" + "1144" + "0a090001"},
		{addr(t, "[fe80::2%7]:4420"), "0a00" + "1144" + "00000000" + "fe800000000000000000000000000002" + "07000000"},
		{
			gid, "1b00" + "ffff" + "00000000" + "fe800000000000000000000000000002" + "0000000001061144" +
				"ffffffffffffffff" + "0000000000000000",
		},
	} {
		s, err := encode(c.a)
		if got := hex.EncodeToString(s[:len(c.want)/2]); err != nil || got != c.want {
			t.Errorf("%v: %s, %v\nwant %s", c.a, got, err, c.want)
		}
	}
}

func TestSockaddrRefused(t *testing.T) {
	v4 := addr(t, "10.9.0.1:1")
	v4.Family = verbs.FamilyIB
	for _, a := range []verbs.Addr{{}, v4, addr(t, "[fe80::1%no-such-interface]:1")} {
		if _, err := encode(a); !errors.Is(err, verbs.ErrAddrNotAvailable) {
			t.Errorf("%v: %v", a, err)
		}
	}
}

func TestInterfaceOfGID(t *testing.T) {
	ifs := []net.Interface{
		{Name: "lo"},
		{Name: "eth0", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}},
		{Name: "eth1", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 2}},
	}
	if got := interfaceOfGID("0200:0000:0002:0000:0000:0000:0000:0000", ifs); got != "eth1" {
		t.Errorf("found %q", got)
	}
	for _, gid := range []string{"", "0200:0000:0003::", "10.0.0.1"} {
		if got := interfaceOfGID(gid, ifs); got != "" {
			t.Errorf("%q: found %q", gid, got)
		}
	}
}

func TestLinkOf(t *testing.T) {
	for _, c := range []struct {
		node, layer int
		want        verbs.Link
	}{{1, 1, verbs.LinkInfiniBand}, {1, 2, verbs.LinkRoCE}, {4, 2, verbs.LinkIWARP}, {1, 0, verbs.LinkUnknown}} {
		if got := linkOf(c.node, c.layer); got != c.want {
			t.Errorf("node type %d, link layer %d: %v, want %v", c.node, c.layer, got, c.want)
		}
	}
}
