package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
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
// choice into c, and its reason among c's notes, and makes of a network interface (-f) what the provider needs.
func chooseProvider(ctx context.Context, c *session.Config) error {
	var devices []verbs.Device
	var err error
	if c.Provider != "iwarp" {
		devices, err = rdmacm.New(rdmacm.Options{}).Devices()
		for _, d := range devices {
			if c.Interface != "" && d.NetDevice == c.Interface {
				c.Interface = d.Name
				break
			}
		}
	}
	if c.Provider == "auto" {
		var why string
		switch {
		case err != nil && !errors.Is(err, verbs.ErrNoDevice):
			c.Provider, why = "iwarp", err.Error()
		case len(devices) == 0:
			c.Provider, why = "iwarp", "this machine has no RDMA device that can be used"
		default:
			if c.Provider, why, err = routed(ctx, c); err != nil {
				return err
			}
		}
		switch c.Provider {
		case "iwarp":
			why = "provider iwarp (software, over TCP): " + why
		default:
			why = "provider verbs: " + why
		}
		c.Notes = append(slices.Clone(c.Notes), why)
	}
	if c.Provider == "iwarp" && c.Interface != "" {
		return bindToInterface(c)
	}
	return nil
}

// routeTimeout is what Linux's host gives the connection manager to resolve an address.
const routeTimeout = 3 * time.Second

// routed asks the connection manager for the RDMA device that leads to c's address. An error is one that connecting
// would meet as well, after as long a wait.
func routed(ctx context.Context, c *session.Config) (provider, why string, err error) {
	ctx, cancel := context.WithTimeout(ctx, routeTimeout)
	defer cancel()
	a := c.Address()
	r := verbs.Route{
		Remote: verbs.Addr{IP: a.Remote, Port: a.Port}, Local: verbs.Addr{IP: a.Local},
		TOS: a.TOS, TOSSet: a.TOSSet, Device: a.LocalDevice,
	}
	if a.GID {
		r.Remote.Family, r.Local.Family = verbs.FamilyIB, verbs.FamilyIB
	}
	conn, err := rdmacm.New(rdmacm.Options{}).Resolve(ctx, r)
	switch {
	case err == nil:
		defer conn.Close()
		d := conn.Device()
		return "verbs", fmt.Sprintf("the RDMA device %s (%s) routes to %s", d.Name, d.Link, a.Remote), nil
	case errors.Is(err, verbs.ErrNoDevice) && !a.GID:
		return "iwarp", fmt.Sprintf("no RDMA device of this machine routes to %s", a.Remote), nil
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, verbs.ErrTimeout), errors.Is(err, verbs.ErrUnreachable):
		return "", "", &transport.ConnectError{
			Addr: a.String(), Class: transport.ErrUnreachable, Err: errors.New("no answer to address resolution"),
			Hint: "check the address, the cable and firewalls",
		}
	default: // a device is responsible, and its failure is the one to show
		return "verbs", fmt.Sprintf("an RDMA device is responsible for %s", a.Remote), nil
	}
}

// bindToInterface makes software iWARP use a network interface: it binds the interface's address.
func bindToInterface(c *session.Config) error {
	i, err := net.InterfaceByName(c.Interface)
	if err != nil {
		return fmt.Errorf("provider iwarp needs a network interface, and %q is none", c.Interface)
	}
	name := c.Interface
	c.Interface = ""
	if c.Local.IsValid() {
		return nil
	}
	all, err := i.Addrs()
	if err != nil {
		return fmt.Errorf("addresses of %s: %w", name, err)
	}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if err != nil || p.Addr().Unmap().Is4() != c.Remote.Is4() || p.Addr().IsLinkLocalUnicast() != c.Remote.IsLinkLocalUnicast() {
			continue
		}
		c.Local = p.Addr().Unmap()
		if c.Local.IsLinkLocalUnicast() && c.Local.Is6() {
			c.Local = c.Local.WithZone(name)
		}
		return nil
	}
	return fmt.Errorf("the interface %s has no address from which %s could be reached", name, c.Remote)
}
