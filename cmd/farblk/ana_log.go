package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"farblk/host"
	"farblk/host/nvme"
)

func anaLogCommand() *cli.Command {
	return deviceCommand("ana-log", "show how well a controller reaches its namespaces (asymmetric namespace access)", nil, showANALog)
}

func showANALog(c *cli.Context, d *device) error {
	id, err := d.controller()
	if err != nil {
		return err
	}
	if !id.SupportsANA() {
		return fmt.Errorf("%s does not report asymmetric namespace access", d.Name)
	}
	log, missing, err := d.anaLog()
	if err != nil {
		return err
	}
	if missing > 0 {
		fmt.Fprintf(c.App.ErrWriter, "farblk ana-log: %s more could not be read: the controller gives only the beginning of its log\n", countOf(missing, "group"))
	}
	if d.asJSON {
		groups := []map[string]any{}
		for _, g := range log.Groups {
			groups = append(groups, map[string]any{
				"grpid": g.ID, "nnsids": len(g.NSIDs), "chgcnt": g.ChangeCount, "state": g.State.String(), "NSIDS": append([]uint32{}, g.NSIDs...),
			})
		}
		return printJSON(c.App.Writer, map[string]any{"chgcnt": log.ChangeCount, "ngrps": len(log.Groups), "ANA groups": groups})
	}
	fmt.Fprintf(c.App.Writer, "Asymmetric Namespace Access Log for %s: change count %d, %s\n", d.Name, log.ChangeCount, countOf(len(log.Groups), "group"))
	for _, g := range log.Groups {
		fmt.Fprintf(c.App.Writer, "group %d: %s, change count %d, namespaces %v\n", g.ID, g.State, g.ChangeCount, g.NSIDs)
	}
	return nil
}

// anaLog reads the log, with each group's namespaces; missing is how many groups could not be read.
func (d *device) anaLog() (log nvme.ANALog, missing int, err error) {
	return host.ReadANALog(d.most(), func(off uint64, buf []byte) error {
		var cmd nvme.Command
		cmd.FillGetLogPage(nvme.LogANA, nvme.AllNamespaces, off, uint32(len(buf)), true)
		b, err := d.admin(&cmd, len(buf))
		copy(buf, b)
		return err
	})
}
