package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"farblk/cmd/internal/session"
	"farblk/transport"
	"farblk/transport/rdma"
	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
	"farblk/transport/verbs/rdmacm"
)

// openProvider gives the provider of that name, "verbs" or "iwarp".
func openProvider(c *session.Config, log *slog.Logger) verbs.Provider {
	if c.Provider == "iwarp" {
		return iwarp.New(iwarp.Options{DisableCRC: c.DisableCRC, Logger: log})
	}
	return rdmacm.New(rdmacm.Options{Logger: log})
}

// openDialer joins the provider and NVMe's binding to it.
func openDialer(c *session.Config, log *slog.Logger) transport.Dialer {
	return rdma.NewDialer(openProvider(c, log), rdma.Options{
		KeyPerCommand: c.KeyPerCommand, ResolveTimeout: c.ConnectTimeout, Logger: log,
	})
}

// chooseProvider settles "auto": the RDMA device that routes to the address, else software iWARP. It writes the
// choice and its reason into c.
func chooseProvider(ctx context.Context, c *session.Config) {
	if c.Provider != "auto" {
		return
	}
	choose := func(provider, note string) {
		c.Provider, c.Notes = provider, append(slices.Clone(c.Notes), note)
	}
	p := rdmacm.New(rdmacm.Options{})
	devices, err := p.Devices()
	if err != nil || len(devices) == 0 {
		why := "this machine has no RDMA device that can be used"
		if err != nil && !errors.Is(err, verbs.ErrNoDevice) {
			why = err.Error()
		}
		choose("iwarp", "provider iwarp (software, over TCP): "+why)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	a := c.Address()
	r := verbs.Route{
		Remote: verbs.Addr{IP: a.Remote, Port: a.Port}, Local: verbs.Addr{IP: a.Local},
		TOS: a.TOS, TOSSet: a.TOSSet, Device: a.LocalDevice,
	}
	if a.GID {
		r.Remote.Family, r.Local.Family = verbs.FamilyIB, verbs.FamilyIB
	}
	conn, err := p.Resolve(ctx, r)
	switch {
	case err == nil:
		d := conn.Device()
		choose("verbs", fmt.Sprintf("provider verbs: the RDMA device %s (%s) routes to %s", d.Name, d.Link, a.Remote))
		_ = conn.Close()
	case errors.Is(err, verbs.ErrNoDevice) && !a.GID:
		choose("iwarp", fmt.Sprintf("provider iwarp (software, over TCP): no RDMA device of this machine routes to %s", a.Remote))
	default: // a device is responsible: its failure is the one to show
		c.Provider = "verbs"
	}
}
