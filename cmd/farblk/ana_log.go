package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"farblk/host/nvme"
)

func anaLogCommand() *cli.Command {
	return &cli.Command{
		Name:      "ana-log",
		Usage:     "show how well a controller reaches its namespaces (asymmetric namespace access)",
		ArgsUsage: "DEVICE",
		Flags:     []cli.Flag{outputFlag()},
		Action: func(c *cli.Context) error {
			d, done, err := openDevice(c)
			if err != nil {
				return err
			}
			defer done()
			id, err := d.controller()
			if err != nil {
				return err
			}
			if !id.SupportsANA() {
				return fmt.Errorf("%s does not report asymmetric namespace access", d.Name)
			}
			// The most that a log without untrue counts can have.
			size := min(nvme.LogANAHeaderSize+uint64(id.NANAGRPID)*nvme.LogANAGroupSize+uint64(max(id.NN, id.MNAN))*4, 1<<20)
			b, err := d.log(nvme.LogANA, nvme.AllNamespaces, int(size&^3))
			if err != nil {
				return err
			}
			log, err := nvme.ParseANALog(b)
			if err != nil {
				return err
			}
			if d.asJSON {
				groups := []map[string]any{}
				for _, g := range log.Groups {
					groups = append(groups, map[string]any{
						"grpid": g.ID, "nnsids": len(g.NSIDs), "chgcnt": g.ChangeCount, "state": g.State.String(), "NSIDS": g.NSIDs,
					})
				}
				return printJSON(c.App.Writer, map[string]any{"chgcnt": log.ChangeCount, "ngrps": len(log.Groups), "ANA groups": groups})
			}
			fmt.Fprintf(c.App.Writer, "Asymmetric Namespace Access Log for %s: change count %d, %d groups\n", d.Name, log.ChangeCount, len(log.Groups))
			for _, g := range log.Groups {
				fmt.Fprintf(c.App.Writer, "group %d: %s, change count %d, namespaces %v\n", g.ID, g.State, g.ChangeCount, g.NSIDs)
			}
			return nil
		},
	}
}
