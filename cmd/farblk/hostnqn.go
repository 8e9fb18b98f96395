package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"farblk/host"
	"farblk/host/nvme"
)

func genHostNQNCommand() *cli.Command {
	return &cli.Command{
		Name:  "gen-hostnqn",
		Usage: "make a new host NQN",
		Description: "It is used once it is in /etc/nvme/hostnqn, and the UUID at its end in /etc/nvme/hostid. Until then connections use the one\n" +
			"that 'farblk show-hostnqn' shows.",
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			_, err := fmt.Fprintln(c.App.Writer, nvme.HostNQN(host.RandomUUID()))
			return err
		},
	}
}

func showHostNQNCommand() *cli.Command {
	return &cli.Command{
		Name:  "show-hostnqn",
		Usage: "show the host NQN that connections use",
		Flags: []cli.Flag{&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "show the host ID and where the identity comes from, too"}},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			id, err := hostIdentity("", "", etcNVMe)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.App.Writer, id.HostNQN)
			if c.Bool("verbose") {
				fmt.Fprintf(c.App.Writer, "host ID %s\nfrom %s\n", nvme.UUID(id.HostID), id.Source)
			}
			return nil
		},
	}
}
