package host

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"farblk/host/nvme"
	"farblk/transport"
)

// fakeNetwork reaches several targets, by address.
type fakeNetwork map[string]*fakeTarget

func (n fakeNetwork) Dial(ctx context.Context, addr transport.Address, mem []byte) (transport.Association, error) {
	t := n[addr.String()]
	if t == nil {
		return nil, &transport.ConnectError{Addr: addr.String(), Class: transport.ErrRefused, Err: transport.ErrRefused}
	}
	return fakeDialer{t}.Dial(ctx, addr, mem)
}

func discoveryTarget(page []byte) *fakeTarget {
	t := newFakeTarget()
	t.id.CNTRLTYPE, t.id.SGLS, t.id.IOCCSZ, t.id.SQES, t.id.CQES = nvme.ControllerDiscovery, 0, 0, 0, 0
	t.id.SubNQN = nvme.DiscoveryNQN
	t.logs[nvme.LogDiscovery] = page
	return t
}

func entry(kind nvme.SubsystemType, addr, port, nqn string) nvme.DiscoveryEntry {
	return nvme.DiscoveryEntry{
		TransportType: nvme.TransportRDMA, AddressFamily: nvme.FamilyIPv4, SubType: kind,
		CNTLID: nvme.AnyController, ServiceID: port, SubNQN: nqn, Address: addr,
	}
}

func discoverConfig(d transport.Dialer) DiscoverConfig {
	return DiscoverConfig{
		Dialer: d, Address: transport.Address{Remote: netip.MustParseAddr("10.0.0.1"), Port: 4420},
		HostNQN: testNQN, HostID: testHostID, FollowReferrals: true,
	}
}

func TestCaseH17ReferralLoop(t *testing.T) {
	inTime(t, func(t *testing.T) {
		nvm := entry(nvme.SubsystemNVM, "10.0.0.3", "4420", subsysNQN)
		net := fakeNetwork{
			"10.0.0.1:4420": discoveryTarget(discoveryLog(7, 3, nvm, entry(nvme.SubsystemReferral, "10.0.0.2", "4420", nvme.DiscoveryNQN),
				entry(nvme.SubsystemReferral, "10.0.0.9", "4420", nvme.DiscoveryNQN))),
			"10.0.0.2:4420": discoveryTarget(discoveryLog(1, 2, entry(nvme.SubsystemReferral, "10.0.0.1", "4420", nvme.DiscoveryNQN),
				entry(nvme.SubsystemReferral, "::ffff:10.0.0.2", "4420", nvme.DiscoveryNQN))),
		}
		logs, err := Discover(bg, discoverConfig(net))
		if err != nil || len(logs) != 3 {
			t.Fatal(logs, err)
		}
		if logs[0].Generation != 7 || len(logs[0].Entries) != 3 || logs[0].Entries[0] != nvm {
			t.Errorf("%+v", logs[0])
		}
		if logs[1].Depth != 1 || len(logs[1].Entries) != 2 || logs[2].Err == nil {
			t.Errorf("%+v", logs[1:])
		}
		if kato := net["10.0.0.1:4420"].live().kato; kato != 0 {
			t.Error("keep-alive of", kato)
		}
		for a, ft := range net {
			if ft.dials != 1 {
				t.Error(a, "was asked", ft.dials, "times")
			}
		}
	})
}

// Referrals that go on and on, each to somewhere new, and ever more of them.
func TestCaseH17ReferralsWithoutEnd(t *testing.T) {
	for name, x := range map[string]struct{ referrals, want int }{"chain": {1, 1 + maxReferralDepth}, "tree": {40, maxDiscoveries}} {
		t.Run(name, func(t *testing.T) {
			inTime(t, func(t *testing.T) {
				asked := 0
				var dial dialFunc = func(ctx context.Context, addr transport.Address, mem []byte) (transport.Association, error) {
					var entries []nvme.DiscoveryEntry
					for range x.referrals {
						asked++
						entries = append(entries, entry(nvme.SubsystemReferral, fmt.Sprintf("10.1.%d.%d", asked/256, asked%256), "4420", nvme.DiscoveryNQN))
					}
					return fakeDialer{discoveryTarget(discoveryLog(1, uint64(len(entries)), entries...))}.Dial(ctx, addr, mem)
				}
				logs, err := Discover(bg, discoverConfig(dial))
				if err != nil || len(logs) != x.want {
					t.Error(len(logs), "controllers were asked,", err)
				}
			})
		})
	}
}

type dialFunc func(ctx context.Context, addr transport.Address, mem []byte) (transport.Association, error)

func (f dialFunc) Dial(ctx context.Context, addr transport.Address, mem []byte) (transport.Association, error) {
	return f(ctx, addr, mem)
}

func TestCaseH18HugeDiscoveryLog(t *testing.T) {
	inTime(t, func(t *testing.T) {
		net := fakeNetwork{"10.0.0.1:4420": discoveryTarget(discoveryLog(1, 1<<40))}
		_, err := Discover(bg, discoverConfig(net))
		if err == nil || !strings.Contains(err.Error(), "1099511627776") {
			t.Error(err)
		}
	})
}

func TestDiscoveryLogThatChanges(t *testing.T) {
	inTime(t, func(t *testing.T) {
		a, b := entry(nvme.SubsystemNVM, "10.0.0.3", "4420", "nqn.a"), entry(nvme.SubsystemNVM, "10.0.0.4", "4420", "nqn.b")
		ft := discoveryTarget(discoveryLog(1, 1, a))
		reads := 0
		ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
			cmd := (*nvme.Command)(&r.Command)
			if cmd.Opcode() == nvme.AdminGetLogPage {
				if reads++; reads == 2 { // between the header and the entries
					ft.change(func() { ft.logs[nvme.LogDiscovery] = discoveryLog(2, 2, a, b) })
				}
			}
			return false
		}
		logs, err := Discover(bg, discoverConfig(fakeNetwork{"10.0.0.1:4420": ft}))
		if err != nil || logs[0].Generation != 2 || len(logs[0].Entries) != 2 {
			t.Error(logs, err)
		}
	})
}

func TestEntryAddress(t *testing.T) {
	from := transport.Address{Remote: netip.MustParseAddr("fe80::1%eth0"), Port: 4420, LocalDevice: "mlx5_0"}
	for _, x := range []struct{ addr, port, want string }{
		{"10.0.0.1", "4421", "10.0.0.1:4421"},
		{"10.0.0.1", "", "10.0.0.1:4420"},
		{"fe80::2", "1", "[fe80::2%eth0]:1"},
		{"host.example", "4420", ""},
		{"10.0.0.1", "0", ""},
		{"10.0.0.1", "65536", ""},
	} {
		e := entry(nvme.SubsystemNVM, x.addr, x.port, subsysNQN)
		got, err := EntryAddress(e, from)
		if x.want == "" {
			if err == nil {
				t.Error(x, got)
			}
		} else if err != nil || got.String() != x.want || got.LocalDevice != "mlx5_0" {
			t.Error(x, got, err)
		}
	}
}
