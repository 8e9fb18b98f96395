package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// DiscoverConfig describes a look at a discovery controller. Zero values mean Config's defaults.
type DiscoverConfig struct {
	Dialer  transport.Dialer
	Address transport.Address
	HostNQN string
	HostID  [16]byte
	// NQN of the discovery subsystem; empty is the well-known one.
	NQN string
	// FollowReferrals looks at the discovery controllers that this one refers to, too, as far as they are
	// reached by RDMA.
	FollowReferrals              bool
	ConnectTimeout, AdminTimeout time.Duration
	Logger                       *slog.Logger
}

// DiscoveryLog is what one discovery controller knows.
type DiscoveryLog struct {
	Address    transport.Address     // the controller's
	Depth      int                   // referrals on the way to it
	Generation uint64                // changes with the log
	Entries    []nvme.DiscoveryEntry // in the controller's order
	Err        error                 // why a referral could not be followed
}

// Bounds of what referrals can make us do.
const (
	maxReferralDepth = 8
	maxDiscoveries   = 64
	maxRereads       = 10 // of a log that changes while it is read
)

// Discover reads the discovery log of a controller and, if asked, of those that it refers to: each once,
// however they refer to each other. The first log is the controller's own. Errors: those of Connect, for the
// first controller only; those of others are in their logs.
func Discover(ctx context.Context, d DiscoverConfig) ([]DiscoveryLog, error) {
	if d.NQN == "" {
		d.NQN = nvme.DiscoveryNQN
	}
	cfg := Config{
		Dialer: d.Dialer, Address: d.Address, SubsysNQN: d.NQN, HostNQN: d.HostNQN, HostID: d.HostID,
		KeepAlive: -1, PoolSize: blockdev.MaxLease, ConnectTimeout: d.ConnectTimeout, AdminTimeout: d.AdminTimeout, Logger: d.Logger,
	}
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	pool, err := blockdev.NewPool(cfg.PoolSize)
	if err != nil {
		return nil, err
	}
	cmds := newAdminCommands(pool)
	defer func() { _ = pool.Close() }() // nothing is leased
	type place struct {
		addr  transport.Address
		nqn   string
		depth int
	}
	queue := []place{{cfg.Address, d.NQN, 0}}
	visited := map[string]bool{placeKey(cfg.Address): true}
	var logs []DiscoveryLog
	for i := 0; i < len(queue); i++ {
		p := queue[i]
		cfg := cfg
		cfg.Address, cfg.SubsysNQN = p.addr, p.nqn
		log := DiscoveryLog{Address: p.addr, Depth: p.depth}
		log.Generation, log.Entries, log.Err = discoverOne(ctx, &cfg, cmds)
		logs = append(logs, log)
		if log.Err != nil {
			if i == 0 || ctx.Err() != nil {
				return nil, log.Err
			}
			cfg.Logger.Warn("referral not followed", "address", p.addr.String(), "err", log.Err)
			continue
		}
		if !d.FollowReferrals || p.depth == maxReferralDepth {
			continue
		}
		for _, e := range log.Entries {
			if e.SubType != nvme.SubsystemReferral || e.TransportType != nvme.TransportRDMA {
				continue
			}
			addr, err := EntryAddress(e, d.Address)
			if err != nil {
				cfg.Logger.Warn("referral not followed", "err", err)
				continue
			}
			if key := placeKey(addr); !visited[key] && len(queue) < maxDiscoveries {
				visited[key] = true
				nqn := e.SubNQN
				if nvme.ValidateNQN(nqn) != nil {
					nqn = nvme.DiscoveryNQN
				}
				queue = append(queue, place{addr, nqn, p.depth + 1})
			}
		}
	}
	return logs, nil
}

func placeKey(a transport.Address) string {
	a.Remote = a.Remote.Unmap()
	return a.String()
}

// discoverOne reads one controller's log.
func discoverOne(ctx context.Context, cfg *Config, cmds *adminCommands) (uint64, []nvme.DiscoveryEntry, error) {
	a, err := openAdmin(ctx, cfg, cmds, true)
	if err != nil {
		return 0, nil, err
	}
	defer a.close()
	generation, entries, err := a.discoveryLog(ctx)
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_ = a.shutdown(ctx) // a courtesy
	}
	return generation, entries, err
}

// discoveryLog reads log page 70h (Base 5.16.1.23): the header, the entries, and the header again, until the
// generation is the same before and after.
func (a *association) discoveryLog(ctx context.Context) (uint64, []nvme.DiscoveryEntry, error) {
	header := func() (nvme.DiscoveryHeader, error) {
		buf := make([]byte, nvme.DiscoveryHeaderSize)
		if err := a.readLog(ctx, nvme.LogDiscovery, 0, 0, buf, false); err != nil {
			return nvme.DiscoveryHeader{}, fmt.Errorf("reading the discovery log: %w", err)
		}
		return nvme.ParseDiscoveryHeader(buf)
	}
	before, err := header()
	if err != nil {
		return 0, nil, err
	}
	for range maxRereads {
		entries, err := a.discoveryEntries(ctx, before.Records)
		if err != nil {
			return 0, nil, err
		}
		after, err := header()
		if err != nil {
			return 0, nil, err
		}
		if after == before {
			return before.Generation, entries, nil
		}
		before = after
	}
	return 0, nil, errors.New("the discovery log changes faster than it can be read")
}

func (a *association) discoveryEntries(ctx context.Context, n uint64) (entries []nvme.DiscoveryEntry, err error) {
	const chunk = adminSlotSize / nvme.DiscoveryEntrySize
	buf := make([]byte, chunk*nvme.DiscoveryEntrySize)
	for uint64(len(entries)) < n {
		part := buf[:min(chunk, n-uint64(len(entries)))*nvme.DiscoveryEntrySize]
		off := uint64(nvme.DiscoveryHeaderSize + len(entries)*nvme.DiscoveryEntrySize)
		if err := a.readLog(ctx, nvme.LogDiscovery, 0, off, part, true); err != nil {
			return nil, fmt.Errorf("reading the discovery log: %w", err)
		}
		for ; len(part) > 0; part = part[nvme.DiscoveryEntrySize:] {
			e, err := nvme.ParseDiscoveryEntry(part)
			if err != nil {
				return nil, err
			}
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// EntryAddress is where a discovery log entry points, going there the way that from goes: local address,
// device and type of service are taken over. Errors: an entry whose transport is not RDMA, or whose address
// or port makes no sense.
func EntryAddress(e nvme.DiscoveryEntry, from transport.Address) (transport.Address, error) {
	to := from
	if e.TransportType != nvme.TransportRDMA {
		return to, fmt.Errorf("discovery log entry for %s: its transport is %s, not rdma", e.SubNQN, e.TransportType)
	}
	addr, err := netip.ParseAddr(e.Address)
	if err != nil {
		return to, fmt.Errorf("discovery log entry for %s: %w", e.SubNQN, err)
	}
	port := uint64(4420)
	if e.ServiceID != "" {
		if port, err = strconv.ParseUint(e.ServiceID, 10, 16); err != nil || port == 0 {
			return to, fmt.Errorf("discovery log entry for %s: port %q is not a number from 1 to 65535", e.SubNQN, e.ServiceID)
		}
	}
	to.GID = e.AddressFamily == nvme.FamilyIB
	to.Remote, to.Port = addr, uint16(port)
	if !to.GID {
		to.Remote = addr.Unmap()
	}
	if to.Remote.Is6() && to.Remote.IsLinkLocalUnicast() && to.Remote.Zone() == "" {
		to.Remote = to.Remote.WithZone(from.Remote.Zone())
	}
	if to.Local.IsValid() && to.Local.Is4() != to.Remote.Is4() {
		to.Local = netip.Addr{}
	}
	return to, nil
}
