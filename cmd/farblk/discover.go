package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host"
	"farblk/host/nvme"
)

func discoverCommand() *cli.Command {
	return &cli.Command{
		Name:        "discover",
		Usage:       "show what a discovery service knows",
		Description: "Referrals to other discovery services are followed.",
		Flags:       append(addressFlags(), outputFlag()),
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			asJSON, err := wantJSON(c)
			if err != nil {
				return err
			}
			cfg, err := fabricConfig(c)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
			defer stop()
			logs, err := runDiscovery(ctx, cfg)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(c.App.Writer, discoveryObject(logs))
			}
			for i := range logs {
				discoveryText(c.App.Writer, &logs[i])
			}
			return nil
		},
	}
}

// discoveryLimit bounds a whole discovery, referrals included.
const discoveryLimit = 30 * time.Second

// runDiscovery reads the discovery log at c's address, and those that it refers to.
func runDiscovery(ctx context.Context, c *session.Config) ([]host.DiscoveryLog, error) {
	ctx, cancel := context.WithTimeout(ctx, discoveryLimit)
	defer cancel()
	if err := chooseProvider(ctx, c); err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	return host.Discover(ctx, host.DiscoverConfig{
		Dialer: openDialer(c, log), Address: c.Address(), HostNQN: c.HostNQN, HostID: c.HostID,
		FollowReferrals: true, ConnectTimeout: c.ConnectTimeout, Logger: log,
	})
}

// discoveryRecord has nvme-cli's names.
type discoveryRecord struct {
	TrType  string `json:"trtype"`
	AdrFam  string `json:"adrfam"`
	SubType string `json:"subtype"`
	TReq    string `json:"treq"`
	PortID  uint16 `json:"portid"`
	TrSvcID string `json:"trsvcid"`
	SubNQN  string `json:"subnqn"`
	TrAddr  string `json:"traddr"`
	EFlags  string `json:"eflags"`
	PrType  string `json:"rdma_prtype,omitempty"`
	QPType  string `json:"rdma_qptype,omitempty"`
	CMS     string `json:"rdma_cms,omitempty"`
	PKey    string `json:"rdma_pkey,omitempty"`
}

func recordOf(e nvme.DiscoveryEntry) discoveryRecord {
	r := discoveryRecord{
		TrType: e.TransportType.String(), AdrFam: e.AddressFamily.String(), SubType: e.SubType.String(),
		TReq: treqWords(e.Requirements), PortID: e.PortID, TrSvcID: e.ServiceID, SubNQN: e.SubNQN, TrAddr: e.Address,
		EFlags: eflagsWords(e.Flags),
	}
	if e.TransportType == nvme.TransportRDMA {
		r.PrType = word(e.RDMA.Provider, "", "not specified", "infiniband", "roce", "roce-v2", "iwarp")
		r.QPType = word(e.RDMA.QPType, "", "connected", "datagram")
		r.CMS = word(e.RDMA.CMS, "", "rdma-cm")
		r.PKey = fmt.Sprintf("0x%04x", e.RDMA.PKey)
	}
	return r
}

// word is the name of a number, and the number where it has none.
func word(n uint8, names ...string) string {
	if int(n) < len(names) && names[n] != "" {
		return names[n]
	}
	return fmt.Sprintf("unrecognized (%d)", n)
}

// treqWords is TREQ: bits 1:0 secure channel, bit 2 flow control can be off.
func treqWords(t uint8) string {
	s := word(t&3, "not specified", "required", "not required")
	if t&4 != 0 {
		s += ", sq flow control disable supported"
	}
	return s
}

// eflagsWords is EFLAGS: bit 0 duplicate returned information, 1 explicit persistent connections, 2 no CDC.
func eflagsWords(f uint16) string {
	s := ""
	for i, w := range []string{"duplicate discovery information", "explicit discovery connections", "no cdc connectivity"} {
		if f&(1<<i) != 0 {
			if s != "" {
				s += ", "
			}
			s += w
		}
	}
	if s == "" {
		return "none"
	}
	return s
}

// discoveryReport is one log, under nvme-cli's names; Referrals and Error are ours.
type discoveryReport struct {
	Device    string            `json:"device"` // the discovery controller's address
	GenCtr    uint64            `json:"genctr"`
	Records   []discoveryRecord `json:"records"`
	Error     string            `json:"error,omitempty"`
	Referrals []discoveryReport `json:"referrals,omitempty"` // the logs that this one led to
}

// discoveryObject is the first log, with the others as its referrals.
func discoveryObject(logs []host.DiscoveryLog) *discoveryReport {
	var reports []discoveryReport
	for _, l := range logs {
		r := discoveryReport{Device: l.Address.String(), GenCtr: l.Generation, Records: []discoveryRecord{}}
		for _, e := range l.Entries {
			r.Records = append(r.Records, recordOf(e))
		}
		if l.Err != nil {
			r.Error = l.Err.Error()
		}
		reports = append(reports, r)
	}
	first := reports[0]
	first.Referrals = reports[1:]
	return &first
}

func discoveryText(w io.Writer, log *host.DiscoveryLog) {
	if log.Depth > 0 {
		fmt.Fprintf(w, "\nReferral to %s", log.Address)
		if log.Err != nil {
			fmt.Fprintf(w, ": %s\n", printable(log.Err.Error()))
			return
		}
	}
	fmt.Fprintf(w, "\nDiscovery Log Number of Records %d, Generation counter %d\n", len(log.Entries), log.Generation)
	for i, e := range log.Entries {
		r := recordOf(e)
		fmt.Fprintf(w, "=====Discovery Log Entry %d======\n", i)
		fmt.Fprintf(w, "trtype:  %s\nadrfam:  %s\nsubtype: %s\ntreq:    %s\nportid:  %d\ntrsvcid: %s\nsubnqn:  %s\ntraddr:  %s\neflags:  %s\n",
			r.TrType, r.AdrFam, r.SubType, r.TReq, r.PortID, printable(r.TrSvcID), printable(r.SubNQN), printable(r.TrAddr), r.EFlags)
		if e.TransportType == nvme.TransportRDMA {
			fmt.Fprintf(w, "rdma_prtype: %s\nrdma_qptype: %s\nrdma_cms:    %s\nrdma_pkey: %s\n", r.PrType, r.QPType, r.CMS, r.PKey)
		}
	}
}
