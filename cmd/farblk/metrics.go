package main

import (
	"context"

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
