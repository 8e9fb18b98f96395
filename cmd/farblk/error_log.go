package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"farblk/host/nvme"
)

func errorLogCommand() *cli.Command {
	return deviceCommand("error-log", "show a controller's error log, newest first", []cli.Flag{text("log-entries", "e", "64", "`NUMBER` of entries at most")}, showErrorLog)
}

func showErrorLog(c *cli.Context, d *device) error {
	want := 64
	if err := numberOption(c, "log-entries", 1, 256, &want); err != nil {
		return err
	}
	id, err := d.controller()
	if err != nil {
		return err
	}
	want = min(want, int(id.ELPE)+1, d.most()/64)
	b, err := d.log(nvme.LogError, nvme.AllNamespaces, want*64)
	if err != nil {
		return err
	}
	entries := nvme.ParseErrorLog(b)
	if d.asJSON {
		list := []map[string]any{}
		for _, e := range entries {
			list = append(list, objectOf(errorFields(e)))
		}
		return printJSON(c.App.Writer, map[string]any{"errors": list})
	}
	fmt.Fprintf(c.App.Writer, "Error Log Entries for %s: %d\n", d.Name, len(entries))
	for i, e := range entries {
		fmt.Fprintf(c.App.Writer, "Entry[%d]\n", i)
		if err := printFields(c.App.Writer, errorFields(e), false); err != nil {
			return err
		}
	}
	return nil
}

// errorFields has nvme-cli's names.
func errorFields(e nvme.ErrorLogEntry) []field {
	return []field{
		{"error_count", e.ErrorCount},
		{"sqid", e.SQID},
		{"cmdid", e.CID},
		{"status_field", e.StatusField >> 1},
		{"status", e.Status().String()},
		{"phase_tag", e.StatusField & 1},
		{"parm_error_location", e.ParameterError},
		{"lba", e.LBA},
		{"nsid", e.NSID},
		{"vs", e.VendorLog},
		{"trtype", e.TransportType},
		{"cs", e.CommandSpecific},
		{"trtype_spec_info", e.TransportSpecific},
	}
}
