package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
)

func disconnectCommand() *cli.Command {
	return &cli.Command{
		Name:      "disconnect",
		Usage:     "remove exports and end connections",
		ArgsUsage: "[NAME | DEVICE]",
		Description: "What to disconnect can be named by subsystem NQN (-n; all connections to it), or by connection (farblk0),\n" +
			"/dev/nbdN, exported file or folder, or socket. A device in use is left alone unless --force is given.",
		Flags: []cli.Flag{
			text("nqn", "n", "", "`NQN` of the subsystem"),
			text("device", "d", "", "`NAME` of a connection, or path of an exported device, file or socket"),
			&cli.BoolFlag{Name: "all", Usage: "every connection"},
			&cli.BoolFlag{Name: "force", Usage: "even if a device is in use: its users get I/O errors; kills a connection that does not answer"},
		},
		Action: disconnect,
	}
}

func disconnect(c *cli.Context) error {
	letGo()
	dir, err := openStateDir()
	if err != nil {
		return err
	}
	var wanted []string
	for _, w := range append([]string{c.String("nqn"), c.String("device")}, c.Args().Slice()...) {
		if w != "" {
			wanted = append(wanted, w)
		}
	}
	dir.Sweep()
	entries, err := dir.Scan()
	if err != nil {
		return err
	}
	var names []string
	switch {
	case c.Bool("all") && len(wanted) > 0:
		return usagef("--all and a name exclude each other")
	case c.Bool("all"):
		for _, e := range entries {
			names = append(names, e.Name)
		}
	case len(wanted) == 0:
		return usagef("say what to disconnect: -n NQN, -d DEVICE or --all")
	}
	for _, w := range wanted {
		known := false // without asking the session, which may not answer
		for _, e := range entries {
			if e.Name != w && e.Config.Subsystem != w {
				continue
			}
			known = true
			if !slices.Contains(names, e.Name) {
				names = append(names, e.Name)
			}
		}
		if known {
			continue
		}
		found, err := dir.Find(w)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("%s: no such connection, subsystem or device: see 'farblk list'", w)
		}
		for _, s := range found {
			if !slices.Contains(names, s.Name) {
				names = append(names, s.Name)
			}
		}
	}
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, n := range names {
		wg.Go(func() { errs[i] = dir.Disconnect(c.Context, n, c.Bool("force")) })
	}
	wg.Wait()
	failed := []error{}
	for i, n := range names {
		var busy *session.BusyError
		switch err := errs[i]; {
		case errors.As(err, &busy):
			failed = append(failed, fmt.Errorf("%s: %w: end that, or use --force", n, err))
		case err != nil:
			failed = append(failed, err)
		default:
			fmt.Fprintf(c.App.Writer, "%s disconnected\n", n)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	for _, err := range failed[1:] {
		report(c.App.ErrWriter, "farblk disconnect", err)
	}
	return failed[0]
}
