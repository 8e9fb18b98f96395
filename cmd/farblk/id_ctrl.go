package main

import (
	"github.com/urfave/cli/v2"
)

func idCtrlCommand() *cli.Command {
	return &cli.Command{
		Name:      "id-ctrl",
		Usage:     "show a controller's Identify data",
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
			fs := fieldsOf(id)
			states := id.PSD[:min(int(id.NPSS)+1, len(id.PSD))]
			last := &fs[len(fs)-1] // PSD: all 32 of it, mostly nothing
			last.name, last.value = "psds", states
			if d.asJSON {
				list := []map[string]any{}
				for _, p := range states {
					list = append(list, objectOf(fieldsOf(p)))
				}
				last.value = list
			}
			return printFields(c.App.Writer, fs, d.asJSON)
		},
	}
}
