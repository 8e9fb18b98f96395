package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host"
	"farblk/host/nvme"
	"farblk/transport"
)

func listCommand() *cli.Command {
	return &cli.Command{
		Name:  "list",
		Usage: "show the connected namespaces",
		Description: "Never waits for a connection that is in trouble: its state is shown instead.\n" +
			"With -v, the counters from SENT on begin anew with each connect, the others with the connection.",
		Flags: []cli.Flag{
			outputFlag(),
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "show the connections and their counters, too"},
		},
		Action: func(c *cli.Context) error {
			all, asJSON, err := listed(c)
			if err != nil {
				return err
			}
			if asJSON {
				return listJSON(c.App.Writer, all, c.Bool("verbose"))
			}
			return listText(c.App.Writer, all, c.Bool("verbose"))
		},
	}
}

// listed is what list and list-subsys start from.
func listed(c *cli.Context) (all []session.Status, asJSON bool, err error) {
	if err := noArgs(c); err != nil {
		return nil, false, err
	}
	if asJSON, err = wantJSON(c); err != nil {
		return nil, false, err
	}
	dir, err := openStateDir()
	if err != nil {
		return nil, false, err
	}
	all, err = dir.List()
	return all, asJSON, err
}

// listDevice is one namespace: nvme-cli's fields, then ours.
type listDevice struct {
	NameSpace    uint32 `json:"NameSpace"`
	DevicePath   string `json:"DevicePath"` // of the first export
	Firmware     string `json:"Firmware"`
	ModelNumber  string `json:"ModelNumber"`
	SerialNumber string `json:"SerialNumber"`
	UsedBytes    int64  `json:"UsedBytes"`
	MaximumLBA   int64  `json:"MaximumLBA"` // blocks, as nvme-cli has it
	PhysicalSize int64  `json:"PhysicalSize"`
	SectorSize   int    `json:"SectorSize"`

	Name         string           `json:"Name"` // of the connection
	SubsystemNQN string           `json:"SubsystemNQN"`
	Transport    string           `json:"Transport"`
	Provider     string           `json:"Provider"`
	Address      string           `json:"Address"`
	State        string           `json:"State"`
	Error        string           `json:"Error,omitempty"`
	ANAState     string           `json:"ANAState,omitempty"`
	ReadOnly     bool             `json:"ReadOnly"`
	EUI64        string           `json:"EUI64,omitempty"`
	NGUID        string           `json:"NGUID,omitempty"`
	UUID         string           `json:"UUID,omitempty"`
	Exports      []session.Export `json:"Exports"`
}

// refused is shown as the state of a namespace that takes no I/O, because another one has come in its place.
const refused = "refused"

// devicesOf is a line for each namespace, or one with NameSpace 0 for a connection that has none to show.
func devicesOf(s session.Status) []listDevice {
	base := listDevice{
		Firmware: s.Firmware, ModelNumber: s.Model, SerialNumber: s.Serial,
		Name: s.Name, SubsystemNQN: s.Config.Subsystem, Transport: "rdma", Provider: s.Config.Provider,
		Address: s.Address, State: s.State, Error: s.Error, Exports: []session.Export{},
	}
	if len(s.Namespaces) == 0 {
		return []listDevice{base}
	}
	var ds []listDevice
	for _, n := range s.Namespaces {
		d := base
		d.NameSpace, d.UsedBytes, d.PhysicalSize, d.SectorSize = n.NSID, n.Used, n.Size, n.BlockSize
		if n.BlockSize > 0 {
			d.MaximumLBA = n.Size / int64(n.BlockSize)
		}
		d.ANAState = n.ANA
		d.ReadOnly, d.EUI64, d.NGUID, d.UUID = n.ReadOnly, n.EUI64, n.NGUID, n.UUID
		if n.Error != "" && d.State == host.StateLive.String() {
			d.State, d.Error = refused, n.Error
		}
		d.Exports = n.Exports
		if len(n.Exports) > 0 {
			d.DevicePath = n.Exports[0].Path
		}
		ds = append(ds, d)
	}
	return ds
}

// listJSON prints {"devices":[...]}, and with verbose {"connections":[...]} beside it.
func listJSON(w io.Writer, all []session.Status, verbose bool) error {
	out := struct {
		Devices     []listDevice     `json:"devices"`
		Connections []session.Status `json:"connections,omitempty"`
	}{Devices: []listDevice{}}
	for _, s := range all {
		out.Devices = append(out.Devices, devicesOf(s)...)
	}
	if verbose {
		out.Connections = all
	}
	return printJSON(w, out)
}

func listText(w io.Writer, all []session.Status, verbose bool) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tNSID\tSIZE\tBLOCK\tSTATE\tDEVICE\tADDRESS\tSUBSYSTEM")
	for _, s := range all {
		for _, d := range devicesOf(s) {
			nsid, size, block, where := "-", "-", "-", "-"
			if d.NameSpace != 0 {
				nsid, size, block = fmt.Sprint(d.NameSpace), formatSize(d.PhysicalSize), formatSize(int64(d.SectorSize))
			}
			var paths []string
			for _, e := range d.Exports {
				paths = append(paths, e.Path)
			}
			if len(paths) > 0 {
				where = strings.Join(paths, ",")
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", d.Name, nsid, size, block, d.State, where, d.Address, d.SubsystemNQN)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, s := range all {
		if s.Error != "" {
			fmt.Fprintf(w, "%s: %s\n", s.Name, printable(s.Error))
		}
		for _, d := range devicesOf(s) {
			switch {
			case d.State == refused:
				fmt.Fprintf(w, "%sn%d: %s\n", d.Name, d.NameSpace, printable(d.Error))
			case d.ANAState == nvme.ANAInaccessible.String(), d.ANAState == nvme.ANAChange.String(), d.ANAState == nvme.ANAPersistentLoss.String():
				fmt.Fprintf(w, "%sn%d: the controller cannot reach it (ANA state %s)\n", d.Name, d.NameSpace, d.ANAState)
			}
		}
		if verbose {
			if err := connectionText(w, &s); err != nil {
				return err
			}
		}
	}
	return nil
}

// connectionText says what there is to know of a connection, in lines that begin with its name, and its counters as a
// table.
func connectionText(w io.Writer, s *session.Status) error {
	if s.PID == 0 { // it did not say
		return nil
	}
	fmt.Fprintf(w, "\n%s: process %d, provider %s (%s), controller %d\n", s.Name, s.PID, s.Config.Provider, s.Device, s.ControllerID)
	fmt.Fprintf(w, "%s: model %q, serial %q, firmware %q\n", s.Name, s.Model, s.Serial, s.Firmware)
	fmt.Fprintf(w, "%s: %s of %d, at most %s a command", s.Name, countOf(s.IOQueues, "I/O queue"), s.QueueSize, formatSize(s.MaxTransfer))
	c := s.Counters
	if c == nil {
		fmt.Fprintln(w)
		return nil
	}
	fmt.Fprintf(w, "; %s of %s for data in use; lost %s\n", formatSize(int64(c.PoolLeased)), formatSize(int64(c.PoolSize)), countOf(c.Resets, "time"))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "QUEUE\tCOMPLETED\tUNDER WAY\tWAITING\tSPLIT\tRETRIED\tRESENT\tSENT\tIN CAPSULE\tREAD\tWRITTEN\tDOORBELLS\tPOLLS\tWAKE-UPS\t")
	row := func(f *transport.Counters, own ...any) {
		for _, v := range append(own, f.Commands, f.InCapsule, formatSize(int64(f.BytesRead)), formatSize(int64(f.BytesWrite)), f.Doorbells, f.Polls, f.Events) {
			fmt.Fprint(t, v, "\t")
		}
		fmt.Fprintln(t)
	}
	for i, q := range c.Queues {
		row(&q.Transport, i+1, q.Completed, q.Outstanding, q.Waiting, q.Splits, q.Retried, q.Resent)
	}
	row(&c.Admin, "admin", "-", "-", "-", "-", "-", "-")
	return t.Flush()
}

// printable makes text from the network fit for a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7F && r < 0xA0 || r == '\u2028' || r == '\u2029' || r == '\uFFFD' {
			return '?'
		}
		return r
	}, s)
}
