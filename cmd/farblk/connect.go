package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
)

// sessionName is the hidden command that is a session's process.
const sessionName = "__session"

func exportFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "export", Usage: "`KIND[=WHERE]`, may be given again: nbd[=/dev/nbdN] (kernel block device), " +
			"nbd-unix[=PATH] or nbd-tcp=HOST:PORT (NBD server), fuse[=DIR] (a file for each namespace), fuse=FILE (mounted over an existing file), " +
			"none; without it a kernel block device where that is possible, else files"},
		&cli.BoolFlag{Name: "duplicate-connect", Aliases: []string{"D"}, Usage: "allow a second connection to a subsystem: each of its namespaces then has two devices that nothing joins, and writing through both destroys data"},
	}
}

func connectCommand() *cli.Command {
	flags := append(addressFlags(), text("nqn", "n", "", "`NQN` of the subsystem"))
	flags = append(append(flags, tuningFlags()...), exportFlags()...)
	flags = append(flags,
		&cli.BoolFlag{Name: "foreground", Usage: "stay, log to standard error, disconnect on SIGTERM; tells systemd when ready (Type=notify)"},
		outputFlag())
	return &cli.Command{
		Name:  "connect",
		Usage: "connect to a subsystem and export its namespaces",
		Description: "Returns when the devices can be used; a background process holds the connection until 'farblk disconnect'.\n" +
			"Example: farblk connect -a 192.0.2.1 -n nqn.2024-01.org.example:disk1 --export nbd",
		Flags:  flags,
		Action: connect,
	}
}

func connect(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	asJSON, err := wantJSON(c)
	if err != nil {
		return err
	}
	nqn, err := checkNQN(c)
	if err != nil {
		return err
	}
	exports, notes, err := parseExports(c)
	if err != nil {
		return err
	}
	cfg, err := fabricConfig(c)
	if err != nil {
		return err
	}
	cfg.Subsystem, cfg.Exports, cfg.Notes = nqn, exports, notes

	ctx, stop := signal.NotifyContext(c.Context, endSignals()...)
	defer stop()
	show := func(r *session.Result) error { return printResult(c.App.Writer, r, asJSON) }
	if c.Bool("foreground") {
		return runForeground(ctx, cfg, c.Bool("duplicate-connect"), show)
	}
	r, err := startSession(ctx, cfg, c.Bool("duplicate-connect"))
	if err != nil {
		return err
	}
	return show(r)
}

// parseExports reads --export; without one it is the default for this machine, and notes say why.
func parseExports(c *cli.Context) (specs []session.ExportSpec, notes []string, err error) {
	given := c.StringSlice("export")
	if len(given) == 0 {
		e, why := defaultExport(c.Context)
		if why != "" {
			notes = []string{why}
		}
		return []session.ExportSpec{e}, notes, nil
	}
	seen := map[session.ExportSpec]bool{}
	for _, g := range given {
		e, err := session.ParseExport(g)
		if err != nil {
			return nil, nil, usagef("%v", err)
		}
		if seen[e] {
			return nil, nil, usagef("export %q is given twice", g)
		}
		seen[e] = true
		specs = append(specs, e)
	}
	if len(specs) > 1 && seen[session.ExportSpec{Kind: session.KindNone}] {
		return nil, nil, usagef("export none excludes the others")
	}
	return specs, nil, nil
}

// startSession starts the connection in a process of its own and waits until it is ready.
func startSession(ctx context.Context, cfg *session.Config, duplicate bool) (*session.Result, error) {
	dir, err := openStateDir()
	if err != nil {
		return nil, err
	}
	if err := preflight(ctx, cfg.Exports); err != nil {
		return nil, err
	}
	if err := chooseProvider(ctx, cfg); err != nil {
		return nil, err
	}
	f, err := dir.Create(cfg, duplicate)
	if err != nil {
		return nil, err
	}
	return f.Start(ctx, sessionName)
}

// runForeground is the session in this process.
func runForeground(ctx context.Context, cfg *session.Config, duplicate bool, show func(*session.Result) error) error {
	session.BecomeFlusher()
	dir, err := openStateDir()
	if err != nil {
		return err
	}
	if err := preflight(ctx, cfg.Exports); err != nil {
		return err
	}
	if err := chooseProvider(ctx, cfg); err != nil {
		return err
	}
	f, err := dir.Create(cfg, duplicate)
	if err != nil {
		return err
	}
	if err := f.Own(); err != nil {
		f.Remove()
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	endInTime(ctx, log)
	err = session.Run(ctx, f, cfg, session.Options{
		Dialer: openDialer(cfg, log), Logger: log, NewExporter: newExporter,
		Ready: func(r *session.Result) error {
			if err := session.Notify("READY=1\nSTATUS=connected to " + cfg.Subsystem); err != nil {
				log.Warn("cannot tell the service manager", "error", err)
			}
			return show(r)
		},
	})
	_ = session.Notify("STOPPING=1")
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return err
}

// sessionCommand is the background process's side of startSession.
func sessionCommand() *cli.Command {
	return &cli.Command{
		Name: sessionName, Hidden: true,
		Action: func(c *cli.Context) error {
			path, err := oneArg(c, "folder")
			if err != nil {
				return err
			}
			f, cfg, report, err := session.Inherited(path)
			if err != nil {
				return err
			}
			log, err := f.OpenLog()
			if err != nil {
				_ = report.Failed(err)
				return err
			}
			signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
			ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
			defer stop()
			endInTime(ctx, log)
			err = session.Run(ctx, f, cfg, session.Options{Dialer: openDialer(cfg, log), Logger: log, NewExporter: newExporter, Ready: report.Ready})
			if err != nil {
				_ = report.Failed(err) // whoever waits shows it
			}
			return err
		},
	}
}

// endSignals are those that end a connection that is being made, or held in the foreground. A terminal that goes away
// is one, but for nohup.
func endSignals() []os.Signal {
	s := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		s = append(s, syscall.SIGHUP)
	}
	return s
}

// endInTime ends this process five seconds after ctx if it still runs then: something hangs, in the kernel perhaps,
// and whoever told it to end will not wait. What is left behind, the next farblk command clears away.
func endInTime(ctx context.Context, log *slog.Logger) {
	context.AfterFunc(ctx, func() {
		time.AfterFunc(5*time.Second, func() {
			log.Error("told to end, and still not ended: giving up")
			os.Exit(1)
		})
	})
}

// printResult shows a new connection.
func printResult(w io.Writer, r *session.Result, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(r)
	}
	fmt.Fprintf(w, "%s: connected to %s at %s (provider %s, device %s)\n", r.Name, r.Subsystem, r.Address, r.Provider, r.Device)
	for _, n := range r.Notes {
		fmt.Fprintf(w, "  %s\n", n)
	}
	if len(r.Namespaces) == 0 {
		fmt.Fprintln(w, "  the subsystem has no namespace for this host")
	}
	for _, n := range r.Namespaces {
		fmt.Fprintf(w, "  namespace %d: %s in blocks of %d bytes\n", n.NSID, formatSize(n.Size), n.BlockSize)
		for _, e := range n.Exports {
			where := e.Path
			if e.URI != "" {
				where = e.URI
			}
			fmt.Fprintf(w, "    %-8s %s\n", e.Kind, where)
		}
	}
	return nil
}
