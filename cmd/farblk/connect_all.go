package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/signal"
	"slices"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host"
	"farblk/host/nvme"
)

func connectAllCommand() *cli.Command {
	flags := append(append(addressFlags(), tuningFlags()...), exportFlags()...)
	return &cli.Command{
		Name:  "connect-all",
		Usage: "connect to every RDMA subsystem that a discovery service names",
		Description: "Subsystems that are connected already are left alone. Exports cannot be given a place here, because there can be several subsystems.\n" +
			"With -f or -w, both discovery and the connections use that interface or address.",
		Flags:  append(flags, outputFlag()),
		Action: connectAll,
	}
}

func connectAll(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	asJSON, err := wantJSON(c)
	if err != nil {
		return err
	}
	exports, notes, err := parseExports(c)
	if err != nil {
		return err
	}
	for _, e := range exports {
		if e.Where != "" {
			return usagef("export %s=%s: connect-all connects to several subsystems: give no place", e.Kind, e.Where)
		}
	}
	base, err := fabricConfig(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(c.Context, endSignals()...)
	defer stop()
	discovery := *base // whose provider is settled for its own address
	logs, err := runDiscovery(ctx, &discovery)
	if err != nil {
		return err
	}
	results, failed := []*session.Result{}, []error{}
	var entries []nvme.DiscoveryEntry
	for _, l := range logs {
		entries = append(entries, l.Entries...)
		if l.Err != nil {
			failed = append(failed, fmt.Errorf("referral to %s: %w", l.Address, l.Err))
		}
	}
	subsystems := slices.DeleteFunc(entries, func(e nvme.DiscoveryEntry) bool {
		return e.SubType != nvme.SubsystemNVM || e.TransportType != nvme.TransportRDMA
	})
	for _, e := range subsystems {
		cfg, err := configOf(base, e)
		var r *session.Result
		if err == nil {
			cfg.Exports, cfg.Notes = exports, notes
			r, err = startSession(ctx, cfg, c.Bool("duplicate-connect"))
		}
		var already *session.AlreadyConnectedError
		switch {
		case errors.As(err, &already):
			if !asJSON {
				fmt.Fprintf(c.App.Writer, "%s: already connected to %s at %s\n", already.Name, already.Config.Subsystem, already.Config.Address())
			}
		case err != nil:
			failed = append(failed, fmt.Errorf("%s at %s: %w", e.SubNQN, e.Address, err))
		default:
			results = append(results, r)
			if !asJSON {
				_ = printResult(c.App.Writer, r, false)
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	if asJSON {
		if err := json.NewEncoder(c.App.Writer).Encode(struct {
			Connections []*session.Result `json:"connections"`
		}{results}); err != nil {
			return err
		}
	}
	if len(subsystems) == 0 && !asJSON {
		fmt.Fprintf(c.App.Writer, "%s names no RDMA subsystem that this host may use: see 'farblk show-hostnqn'\n", discovery.Address())
	}
	for _, err := range failed[min(1, len(failed)):] {
		report(c.App.ErrWriter, "farblk connect-all", err)
	}
	if len(failed) > 0 {
		return failed[0]
	}
	return nil
}

// configOf is base with the target of a discovery log entry, whose texts come from the network.
func configOf(base *session.Config, e nvme.DiscoveryEntry) (*session.Config, error) {
	if err := nvme.ValidateNQN(e.SubNQN); err != nil {
		return nil, err
	}
	to, err := host.EntryAddress(e, base.Address())
	if err != nil {
		return nil, err
	}
	cfg := *base
	cfg.Name, cfg.Subsystem = "", e.SubNQN
	cfg.Remote, cfg.Port, cfg.GID, cfg.Local = to.Remote, to.Port, to.GID, to.Local
	return &cfg, nil
}
