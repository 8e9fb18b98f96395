package main

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host/nvme"
)

// adminLimit bounds a command that is passed to a connection.
const adminLimit = 5 * time.Second

// device is a connection that admin commands can be sent on.
type device struct {
	ctx context.Context
	dir *session.StateDir
	*session.Status
	nsid   uint32 // of the namespace that the operand named; 0 if it named the controller
	asJSON bool
}

// deviceCommand is a command that shows what a device says about itself: its operand is DEVICE.
func deviceCommand(name, usage string, flags []cli.Flag, show func(c *cli.Context, d *device) error) *cli.Command {
	return &cli.Command{
		Name: name, Usage: usage, ArgsUsage: "DEVICE", Flags: append(flags, outputFlag()),
		Action: func(c *cli.Context) error {
			asJSON, err := wantJSON(c)
			if err != nil {
				return err
			}
			dir, s, err := oneSession(c)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context, adminLimit)
			defer cancel()
			return show(c, &device{ctx: ctx, dir: dir, Status: s, asJSON: asJSON, nsid: s.NamespaceOf(c.Args().First())})
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
	case found[0].State == session.Unresponsive, found[0].State == session.Crashed:
		return nil, nil, errors.New(found[0].Name + ": " + found[0].Error)
	}
	return dir, &found[0], nil
}

// namespace is which one a command means: -n, the one that the operand names, or the only one.
func (d *device) namespace(c *cli.Context) (uint32, error) {
	if c.IsSet("namespace-id") {
		var n uint32
		err := numberOption(c, "namespace-id", 1, math.MaxUint32, &n)
		return n, err
	}
	if d.nsid != 0 {
		return d.nsid, nil
	}
	if len(d.Namespaces) == 1 {
		return d.Namespaces[0].NSID, nil
	}
	return 0, usagef("%s has %d namespaces: choose one with -n", d.Name, len(d.Namespaces))
}

func namespaceFlag() cli.Flag {
	return text("namespace-id", "n", "", "`NSID` of the namespace")
}

// identify reads one Identify structure.
func (d *device) identify(cns nvme.CNS, nsid uint32) ([]byte, error) {
	var cmd nvme.Command
	cmd.FillIdentify(cns, nsid, 0)
	return d.admin(&cmd, nvme.IdentifySize)
}

// log reads n bytes of a log page from the start; n is a multiple of 4. It does not clear pending events.
func (d *device) log(id nvme.LogID, nsid uint32, n int) ([]byte, error) {
	var cmd nvme.Command
	cmd.FillGetLogPage(id, nsid, 0, uint32(n), true)
	return d.admin(&cmd, n)
}

// most is how many bytes one command can bring.
func (d *device) most() int {
	if d.MaxTransfer > 0 {
		return int(min(d.MaxTransfer, session.MaxAdminData))
	}
	return session.MaxAdminData
}

func (d *device) admin(cmd *nvme.Command, n int) ([]byte, error) {
	q := session.AdminRequest{Opcode: cmd.Opcode(), NSID: cmd.NSID(), Length: n}
	for i := range q.CDW10 {
		q.CDW10[i] = cmd.DW(10 + i)
	}
	a, err := d.dir.Admin(d.ctx, d.Name, q)
	if err != nil {
		return nil, err
	}
	return a.Data, nil
}

// controller reads Identify Controller.
func (d *device) controller() (*nvme.IdentifyController, error) {
	b, err := d.identify(nvme.CNSController, 0)
	if err != nil {
		return nil, err
	}
	return nvme.ParseIdentifyController(b)
}
