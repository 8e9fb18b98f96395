package main

import (
	"context"
	"errors"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
)

func metricsCommand() *cli.Command {
	return &cli.Command{
		Name:      "metrics",
		Usage:     "print a connection's metrics in Prometheus' text format",
		ArgsUsage: "DEVICE",
		Action: func(c *cli.Context) error {
			dir, s, err := oneSession(c)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context, session.StatusTimeout)
			defer cancel()
			return dir.Metrics(ctx, s.Name, c.App.Writer)
		},
	}
}

// oneSession finds the connection that the command's operand names.
func oneSession(c *cli.Context) (dir *session.StateDir, s *session.Status, err error) {
	what, err := oneArg(c, "DEVICE")
	if err != nil {
		return nil, nil, err
	}
	if dir, err = openStateDir(); err != nil {
		return nil, nil, err
	}
	found, err := dir.Find(what)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case len(found) == 0:
		return nil, nil, errors.New(what + ": no such connection, subsystem or device: see 'farblk list'")
	case len(found) > 1:
		return nil, nil, errors.New(what + " names several connections: " + found[0].Name + ", " + found[1].Name)
	case found[0].State == session.Unresponsive:
		return nil, nil, errors.New(found[0].Name + ": " + found[0].Error)
	}
	return dir, &found[0], nil
}
