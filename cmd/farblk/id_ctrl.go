package main

import (
	"fmt"

	"github.com/urfave/cli/v2"
)

func idCtrlCommand() *cli.Command {
	return deviceCommand("id-ctrl", "show a controller's Identify data", nil, showIDCtrl)
}

func showIDCtrl(c *cli.Context, d *device) error {
	id, err := d.controller()
	if err != nil {
		return err
	}
	fs := fieldsOf(id)
	states := id.PSD[:min(int(id.NPSS)+1, len(id.PSD))]
	last := &fs[len(fs)-1] // PSD: all 32 of it, mostly nothing
	if d.asJSON {
		list := []map[string]any{}
		for _, p := range states {
			list = append(list, objectOf(fieldsOf(p)))
		}
		last.name, last.value = "psds", list
		return printFields(c.App.Writer, fs, true)
	}
	if err := printFields(c.App.Writer, fs[:len(fs)-1], false); err != nil {
		return err
	}
	for i, p := range states {
		fmt.Fprintf(c.App.Writer, "ps   %2d   :", i)
		for _, f := range fieldsOf(p) {
			fmt.Fprintf(c.App.Writer, " %s:%s", f.name, show(f))
		}
		fmt.Fprintln(c.App.Writer)
	}
	return nil
}
