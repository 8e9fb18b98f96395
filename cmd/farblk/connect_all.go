package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os/signal"

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
		Description: "Subsystems that are connected already are left alone; where that connection is dead, it is reported as a failure.\n" +
			"Of several paths to one, the first that works is taken, because nothing joins\n" +
			"the devices of several (-D takes them all). Exports cannot be given a place here, because there can be several subsystems.\n" +
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
	all := &allConnections{
		c: c, asJSON: asJSON, duplicate: c.Bool("duplicate-connect"), stateOf: stateOf,
		Connections: []*session.Result{}, Skipped: []skippedPath{},
	}
	var entries []nvme.DiscoveryEntry
	for _, l := range logs {
		entries = append(entries, l.Entries...)
		if l.Err != nil {
			all.failed = append(all.failed, fmt.Errorf("referral to %s: %w", l.Address, l.Err))
		}
	}
	subsystems := bySubsystem(entries)
	for _, paths := range subsystems {
		all.connect(paths, func(e nvme.DiscoveryEntry) (*session.Result, error) {
			cfg, err := configOf(base, e)
			if err != nil {
				return nil, err
			}
			cfg.Exports, cfg.Notes = exports, notes
			return startSession(ctx, cfg, all.duplicate)
		})
		if ctx.Err() != nil {
			break
		}
	}
	if len(subsystems) == 0 && !asJSON {
		fmt.Fprintf(c.App.Writer, "%s names no RDMA subsystem that this host may use: see 'farblk show-hostnqn'\n", discovery.Address())
	}
	return all.finish()
}

// bySubsystem puts together the paths to each RDMA subsystem, in the order of the discovery log.
func bySubsystem(entries []nvme.DiscoveryEntry) (all [][]nvme.DiscoveryEntry) {
	at := map[string]int{}
	for _, e := range entries {
		if e.SubType != nvme.SubsystemNVM || e.TransportType != nvme.TransportRDMA {
			continue
		}
		i, known := at[e.SubNQN]
		if !known {
			i = len(all)
			at[e.SubNQN] = i
			all = append(all, nil)
		}
		all[i] = append(all[i], e)
	}
	return all
}

// allConnections is what connect-all has achieved so far.
type allConnections struct {
	c         *cli.Context
	asJSON    bool
	duplicate bool    // connect on every path
	failed    []error // subsystems that there is no connection to
	stateOf   func(connection string) string

	Connections []*session.Result `json:"connections"`
	Skipped     []skippedPath     `json:"skipped"`
}

// skippedPath is a path that was not taken because a connection has the subsystem already.
type skippedPath struct {
	Subsystem  string `json:"subsystem"`
	Address    string `json:"address"`
	Connection string `json:"connection"`
}

// connect takes the first path to a subsystem that works, or, for duplicates, all of them.
func (a *allConnections) connect(paths []nvme.DiscoveryEntry, start func(nvme.DiscoveryEntry) (*session.Result, error)) {
	var failed []error
	has := "" // the connection that has the subsystem
	for _, e := range paths {
		if has != "" && !a.duplicate {
			a.skip(e, has)
			continue
		}
		r, err := start(e)
		var already *session.AlreadyConnectedError
		var second *session.SecondPathError
		switch {
		case errors.As(err, &already):
			has = already.Name
			a.say("%s: already connected to %s at %s\n", already.Name, already.Config.Subsystem, already.Config.Address())
			a.check(has)
		case errors.As(err, &second) && !second.Crashed:
			has = second.Name
			a.skip(e, has)
			a.check(has)
		case err != nil:
			failed = append(failed, fmt.Errorf("%s at %s: %w", e.SubNQN, e.Address, err))
		default:
			has = r.Name
			a.Connections = append(a.Connections, r)
			if !a.asJSON {
				_ = printResult(a.c.App.Writer, r, false)
			}
		}
	}
	if has == "" || a.duplicate {
		a.failed = append(a.failed, failed...)
		return
	}
	for _, err := range failed { // another path did it
		report(a.c.App.ErrWriter, "farblk connect-all", err)
	}
}

// check sees to it that a connection which has a subsystem already is of use.
func (a *allConnections) check(name string) {
	switch state := a.stateOf(name); state {
	case session.Unresponsive, session.Crashed, host.StateDead.String():
		a.failed = append(a.failed, fmt.Errorf("%s is %s: disconnect it", name, state))
	}
}

// stateOf is the state of a connection, "" if it has gone meanwhile.
func stateOf(name string) string {
	dir, err := openStateDir()
	if err != nil {
		return ""
	}
	all, _ := dir.List()
	for _, s := range all {
		if s.Name == name {
			return s.State
		}
	}
	return ""
}

func (a *allConnections) skip(e nvme.DiscoveryEntry, has string) {
	s := skippedPath{Subsystem: e.SubNQN, Address: printable(net.JoinHostPort(e.Address, e.ServiceID)), Connection: has}
	a.Skipped = append(a.Skipped, s)
	a.say("%s: has %s: its path %s is skipped\n", has, s.Subsystem, s.Address)
}

// say tells people.
func (a *allConnections) say(format string, args ...any) {
	if !a.asJSON {
		fmt.Fprintf(a.c.App.Writer, format, args...)
	}
}

// finish prints what is left to be said, and returns the first failure.
func (a *allConnections) finish() error {
	if a.asJSON {
		if err := json.NewEncoder(a.c.App.Writer).Encode(a); err != nil {
			return err
		}
	}
	for _, err := range a.failed[min(1, len(a.failed)):] {
		report(a.c.App.ErrWriter, "farblk connect-all", err)
	}
	if len(a.failed) > 0 {
		return a.failed[0]
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
