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
			"/dev/nbdN, exported file or folder, or socket. Without --force a device in use is left alone, and so is one that has not\n" +
			"written everything after two seconds, for instance while the target is away: its connection goes on, and so does the writing.",
		Flags: []cli.Flag{
			text("nqn", "n", "", "`NQN` of the subsystem"),
			text("device", "d", "", "`NAME` of a connection, or path of an exported device, file or socket"),
			&cli.BoolFlag{Name: "all", Usage: "every connection"},
			&cli.BoolFlag{Name: "force", Usage: "even if a device is in use or has not written everything: its users get I/O errors; kills a connection that does not answer"},
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
	names, devices, gone, err := chosen(c, dir)
	if err != nil {
		return err
	}
	for _, n := range gone {
		fmt.Fprintf(c.App.Writer, "%s had died; what it left has been cleared away\n", n)
	}
	ended := make([]error, len(names))
	var wg sync.WaitGroup
	for i, n := range names {
		wg.Go(func() { ended[i] = dir.Disconnect(c.Context, n, c.Bool("force")) })
	}
	wg.Wait()
	var failed []error
	told := func(name string, err error) {
		var busy *session.BusyError
		var unfinished *session.UnfinishedError
		switch {
		case errors.As(err, &busy):
			failed = append(failed, fmt.Errorf("%s: %w: end that, or use --force", name, err))
		case errors.As(err, &unfinished):
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
		case err != nil:
			failed = append(failed, err)
		default:
			fmt.Fprintf(c.App.Writer, "%s disconnected\n", name)
		}
	}
	for i, n := range names {
		told(n, ended[i])
	}
	for _, d := range devices {
		told(d, detachStale(d, c.Bool("force")))
	}
	if len(failed) == 0 {
		return nil
	}
	for _, err := range failed[1:] {
		report(c.App.ErrWriter, "farblk disconnect", err)
	}
	return failed[0]
}

// chosen are the connections that the command line names, the kernel devices that dead sessions left and no folder
// tells of, and those dead sessions of which nothing is left now.
func chosen(c *cli.Context, dir *session.StateDir) (names, devices, gone []string, err error) {
	wanted := slices.DeleteFunc(append([]string{c.String("nqn"), c.String("device")}, c.Args().Slice()...), func(w string) bool { return w == "" })
	all := c.Bool("all")
	if all && len(wanted) > 0 {
		return nil, nil, nil, usagef("--all and a name exclude each other")
	} else if !all && len(wanted) == 0 {
		return nil, nil, nil, usagef("say what to disconnect: -n NQN, -d DEVICE or --all")
	}
	entries, err := dir.Scan()
	if err != nil {
		return nil, nil, nil, err
	}
	var dead []session.Status // before what they left is cleared away
	for _, e := range entries {
		if !e.Alive {
			dead = append(dead, e.Crashed())
		}
	}
	dir.Sweep()
	if entries, err = dir.Scan(); err != nil {
		return nil, nil, nil, err
	}
	for _, s := range dead {
		stays := slices.ContainsFunc(entries, func(e session.Entry) bool { return e.Name == s.Name })
		if !stays && (all || slices.ContainsFunc(wanted, s.IsCalled)) {
			gone = append(gone, s.Name)
		}
	}
	orphans := orphanedDevices(entries)
	if all {
		devices = orphans
	}
	choose := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, e := range entries { // without asking the session, which may not answer
		if all || slices.Contains(wanted, e.Name) || slices.Contains(wanted, e.Config.Subsystem) {
			choose(e.Name)
		}
	}
	for _, w := range wanted {
		if slices.ContainsFunc(entries, func(e session.Entry) bool { return e.Name == w || e.Config.Subsystem == w }) {
			continue
		}
		if slices.Contains(orphans, w) {
			devices = append(devices, w)
			continue
		}
		found, err := dir.Find(w)
		if err != nil {
			return nil, nil, nil, err
		}
		if len(found) == 0 && !slices.ContainsFunc(dead, func(s session.Status) bool { return slices.Contains(gone, s.Name) && s.IsCalled(w) }) {
			return nil, nil, nil, fmt.Errorf("%s: no such connection, subsystem or device: see 'farblk list'", w)
		}
		for _, s := range found {
			choose(s.Name)
		}
	}
	return names, devices, gone, nil
}
