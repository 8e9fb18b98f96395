package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"farblk/host/nvme"
)

func idNSCommand() *cli.Command {
	return deviceCommand("id-ns", "show a namespace's Identify data", []cli.Flag{namespaceFlag()}, showIDNS)
}

func showIDNS(c *cli.Context, d *device) error {
	nsid, err := d.namespace(c)
	if err != nil {
		return err
	}
	b, err := d.identify(nvme.CNSNamespace, nsid)
	if err != nil {
		return err
	}
	id, err := nvme.ParseIdentifyNamespace(b)
	if err != nil {
		return err
	}
	if id.NSZE == 0 {
		return fmt.Errorf("%s has no namespace %d: see 'farblk list'", d.Name, nsid)
	}
	fs := fieldsOf(id)
	formats := id.LBAF[:min(int(id.NLBAF)+1, len(id.LBAF))]
	last := &fs[len(fs)-1] // LBAF
	if d.asJSON {
		list := []map[string]any{}
		for _, f := range formats {
			list = append(list, map[string]any{"ms": f.MS, "ds": f.LBADS, "rp": f.RP})
		}
		last.name, last.value = "lbafs", list
		return printFields(c.App.Writer, fs, true)
	}
	fmt.Fprintf(c.App.Writer, "NVME Identify Namespace %d:\n", nsid)
	if err := printFields(c.App.Writer, fs[:len(fs)-1], false); err != nil {
		return err
	}
	for i, f := range formats {
		mark := ""
		if i == id.FormatIndex() {
			mark = " (in use)"
		}
		fmt.Fprintf(c.App.Writer, "lbaf %2d   : ms:%d lbads:%d rp:%d%s\n", i, f.MS, f.LBADS, f.RP, mark)
	}
	return nil
}
