package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"farblk/transport"
)

// resolveTimeout bounds the resolution of a name.
const resolveTimeout = 3 * time.Second

// parseAddress reads -a: an IPv4 or IPv6 address (with zone, perhaps in brackets), a host name, or with gid an
// InfiniBand GID. Two spellings of one address give the same value.
func parseAddress(ctx context.Context, s string, gid bool) (netip.Addr, error) {
	text := s
	if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		text = text[1 : len(text)-1]
	}
	addr, err := netip.ParseAddr(text)
	if err != nil {
		if gid {
			return addr, usagef("address %q is not an InfiniBand GID such as fe80::5054:ff:fe12:3456", s)
		}
		if addr, err = lookUp(ctx, s); err != nil {
			return addr, err
		}
	}
	addr = addr.Unmap()
	switch {
	case addr.IsUnspecified():
		return addr, usagef("address %q names no machine", s)
	case addr.IsMulticast():
		return addr, usagef("address %q is a multicast address", s)
	case gid:
		if !addr.Is6() || addr.Zone() != "" {
			return addr, usagef("address %q is not an InfiniBand GID such as fe80::5054:ff:fe12:3456", s)
		}
		return addr, nil
	case addr.Zone() != "":
		if _, err := net.InterfaceByName(addr.Zone()); err != nil {
			return addr, fmt.Errorf("address %q: this machine has no network interface %q", s, addr.Zone())
		}
	}
	return addr, nil
}

// lookUp resolves a host name, IPv4 first.
func lookUp(ctx context.Context, name string) (netip.Addr, error) {
	if !isHostName(name) {
		hint := ""
		if h, p, err := net.SplitHostPort(name); err == nil && h != "" && p != "" {
			hint = fmt.Sprintf(": give the port with -s %s", p)
		}
		return netip.Addr{}, usagef("address %q is neither an IP address nor a host name%s", name, hint)
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	var dns *net.DNSError
	switch {
	case errors.As(err, &dns) && dns.IsNotFound:
		return netip.Addr{}, fmt.Errorf("cannot resolve %q: no such host", name)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return netip.Addr{}, fmt.Errorf("cannot resolve %q: the name service did not answer within %v", name, resolveTimeout)
	case errors.As(err, &dns):
		return netip.Addr{}, fmt.Errorf("cannot resolve %q: %s", name, dns.Err)
	case err != nil:
		return netip.Addr{}, fmt.Errorf("cannot resolve %q: %w", name, err)
	}
	for _, a := range all {
		if a.Unmap().Is4() {
			return a.Unmap(), nil
		}
	}
	return all[0], nil
}

// isHostName accepts RFC 1123 names, and underscores, which exist. A name of digits and dots only is a mistyped
// address.
func isHostName(s string) bool {
	s = strings.TrimSuffix(s, ".")
	if s == "" || len(s) > 253 || strings.Trim(s, "0123456789.") == "" {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, r := range label {
			if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_') {
				return false
			}
		}
	}
	return true
}

// parsePort reads -s.
func parsePort(s string) (uint16, error) {
	n, err := parseNumber(s, 1, 65535)
	if err != nil {
		return 0, usagef("port %v", err)
	}
	return uint16(n), nil
}

// parseLocal reads -w, an address of this machine of the same kind as remote.
func parseLocal(s string, remote netip.Addr) (netip.Addr, error) {
	addr, err := netip.ParseAddr(strings.Trim(s, "[]"))
	if err != nil {
		return addr, usagef("host address %q is not an IP address", s)
	}
	addr = addr.Unmap()
	if addr.Is4() != remote.Is4() {
		return addr, usagef("host address %s and address %s are not of one kind", addr, remote)
	}
	return addr, nil
}

// needZone refuses a link-local IPv6 address that does not say on which link; -f says it, too.
func needZone(a *transport.Address) error {
	if a.GID || !a.Remote.Is6() || !a.Remote.IsLinkLocalUnicast() || a.Remote.Zone() != "" {
		return nil
	}
	if _, err := net.InterfaceByName(a.LocalDevice); err == nil {
		a.Remote = a.Remote.WithZone(a.LocalDevice)
		return nil
	}
	return usagef("address %s is link-local: say on which link, as %s%%eth0", a.Remote, a.Remote)
}
