package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host/nvme"
)

// text is a flag whose value this program checks itself, so that one message serves for all.
func text(name, letter, value, usage string) *cli.StringFlag {
	f := &cli.StringFlag{Name: name, Usage: usage, DefaultText: value}
	if letter != "" {
		f.Aliases = []string{letter}
	}
	return f
}

// addressFlags say where to go, how, and as whom.
func addressFlags() []cli.Flag {
	return []cli.Flag{
		text("transport", "t", "rdma", "`NAME` of the transport; only rdma"),
		text("traddr", "a", "", "`ADDRESS` of the target: IPv4, IPv6 or host name"),
		text("trsvcid", "s", "4420", "`PORT` of the target"),
		text("adrfam", "", "", "`FAMILY` of the address: ipv4, ipv6, or ib for an InfiniBand GID"),
		text("host-traddr", "w", "", "`ADDRESS` of this machine to connect from"),
		text("host-iface", "f", "", "`NAME` of the RDMA device or network interface to use"),
		text("hostnqn", "q", "", "`NQN` of this host; default from /etc/nvme, else from the machine's UUID, else one that is kept for you"),
		text("hostid", "I", "", "`UUID` of this host; default as for the NQN"),
		text("provider", "", "auto", "`NAME`: verbs (RDMA devices), iwarp (software, over TCP), or auto"),
		text("tos", "T", "", "IP type of service, 0 to 255"),
		&cli.BoolFlag{Name: "disable-crc", Usage: "software iWARP: do not ask for CRC32C"},
		text("connect-timeout", "", "3", "`SECONDS` that each step of connecting may take"),
		&cli.StringFlag{Name: "dhchap-secret", Aliases: []string{"S"}, Hidden: true},
		&cli.StringFlag{Name: "dhchap-ctrl-secret", Aliases: []string{"C"}, Hidden: true},
	}
}

// tuningFlags are the parameters of an I/O connection.
func tuningFlags() []cli.Flag {
	return []cli.Flag{
		text("nr-io-queues", "i", "CPUs, at most 4", "`NUMBER` of I/O queues"),
		text("queue-size", "Q", "128", "`ENTRIES` of an I/O queue, 16 to 1024"),
		text("keep-alive-tmo", "k", "5", "keep-alive timeout in `SECONDS`; 0 is none"),
		text("reconnect-delay", "c", "10", "`SECONDS` between attempts to reconnect"),
		text("ctrl-loss-tmo", "l", "600", "`SECONDS` after which a lost controller is given up; 0 is at once, -1 is never"),
		&cli.StringFlag{
			Name: "fast_io_fail_tmo", Aliases: []string{"fast-io-fail-tmo", "F"}, DefaultText: "none",
			Usage: "`SECONDS` after which I/O fails while the controller is lost; 0 is at once, -1 is none",
		},
		text("io-timeout", "", "30", "`SECONDS` that one command may take"),
		text("pool-size", "", "64M", "`BYTES` of memory for data"),
		&cli.BoolFlag{Name: "key-per-command", Usage: "for a target that is not trusted: give it a key to memory for each command only"},
		&cli.BoolFlag{Name: "disable-sqflow", Aliases: []string{"d"}, Usage: "ask for queues without flow control"},
	}
}

// fabricConfig reads addressFlags and, where the command has them, tuningFlags. The port is 4420 when none is given. The
// provider is chosen later (see chooseProvider).
func fabricConfig(c *cli.Context) (*session.Config, error) {
	if t := c.String("transport"); t != "" && t != "rdma" {
		return nil, usagef("transport %q is not supported: only rdma is", t)
	}
	if c.IsSet("dhchap-secret") || c.IsSet("dhchap-ctrl-secret") {
		return nil, errors.New("in-band authentication (DH-HMAC-CHAP) is not supported")
	}
	provider, err := wordOption(c, "provider", providers)
	if err != nil {
		return nil, err
	}
	s := &session.Config{Port: 4420, Provider: provider, ConnectTimeout: 3 * time.Second}
	if err := tuning(c, s); err != nil {
		return nil, err
	}
	if c.IsSet("tos") {
		s.TOS = new(uint8)
		if err := numberOption(c, "tos", 0, 255, s.TOS); err != nil {
			return nil, err
		}
	}
	if p := c.String("trsvcid"); c.IsSet("trsvcid") {
		port, err := parsePort(p)
		if err != nil {
			return nil, err
		}
		s.Port = port
	}
	id, err := hostIdentity(c.String("hostnqn"), c.String("hostid"), etcNVMe)
	if err != nil {
		return nil, err
	}
	s.HostNQN, s.HostID = id.HostNQN, nvme.UUID(id.HostID)
	return s, address(c, s)
}

// address reads where to go; last, because it may have to ask the name service.
func address(c *cli.Context, s *session.Config) error {
	family := c.String("adrfam")
	switch family {
	case "", "ipv4", "ipv6":
	case "ib":
		s.GID = true
	default:
		return usagef("unknown address family %q: ipv4, ipv6 or ib", family)
	}
	if c.String("traddr") == "" {
		return usagef("no address given (-a)")
	}
	var err error
	if s.Remote, err = parseAddress(c.Context, c.String("traddr"), s.GID); err != nil {
		return err
	}
	if family == "ipv4" && !s.Remote.Is4() || family == "ipv6" && !s.Remote.Is6() {
		return usagef("address %s is not %s", s.Remote, family)
	}
	if w := c.String("host-traddr"); w != "" {
		if s.Local, err = parseLocal(w, s.Remote); err != nil {
			return err
		}
	}
	if f := c.String("host-iface"); f != "" {
		if !interfaceExists(f) {
			return fmt.Errorf("this machine has no RDMA device or network interface %q", f)
		}
		s.Interface = f
	}
	a := s.Address()
	err = needZone(&a)
	s.Remote = a.Remote
	return err
}

// interfaceExists looks for a network interface or an RDMA device.
func interfaceExists(name string) bool {
	if _, err := net.InterfaceByName(name); err == nil {
		return true
	}
	if filepath.Base(name) != name {
		return false
	}
	_, err := os.Stat(filepath.Join("/sys/class/infiniband", name))
	return err == nil
}

// tuning reads tuningFlags; a flag that the command lacks is not set.
func tuning(c *cli.Context, s *session.Config) error {
	s.DisableSQFlow, s.KeyPerCommand, s.DisableCRC = c.Bool("disable-sqflow"), c.Bool("key-per-command"), c.Bool("disable-crc")
	const day, year = 24 * time.Hour, 365 * 24 * time.Hour
	err := errors.Join(
		numberOption(c, "nr-io-queues", 1, 1024, &s.NrIOQueues),
		numberOption(c, "queue-size", 16, 1024, &s.QueueSize),
		secondsOption(c, "keep-alive-tmo", 0, (1<<32-1)*time.Millisecond, &s.KeepAlive), // KATO has 32 bits
		secondsOption(c, "reconnect-delay", 10*time.Millisecond, day, &s.ReconnectDelay),
		secondsOption(c, "ctrl-loss-tmo", -time.Second, year, &s.CtrlLoss),
		secondsOption(c, "fast_io_fail_tmo", -time.Second, year, &s.FastIOFail),
		secondsOption(c, "io-timeout", time.Millisecond, day, &s.IOTimeout),
		secondsOption(c, "connect-timeout", time.Millisecond, time.Hour, &s.ConnectTimeout),
		sizeOption(c, "pool-size", 4<<20, 1<<40, &s.PoolSize),
	)
	if err != nil {
		return firstOf(err)
	}
	if c.IsSet("keep-alive-tmo") && s.KeepAlive == 0 {
		s.KeepAlive = -1 // the host's word for none
	}
	if c.IsSet("ctrl-loss-tmo") && s.CtrlLoss == 0 {
		s.CtrlLoss = 1 // give up at once
	}
	switch { // nvme-cli's words: to the host, 0 is none
	case s.FastIOFail < 0:
		s.FastIOFail = 0
	case c.IsSet("fast_io_fail_tmo") && s.FastIOFail == 0:
		s.FastIOFail = 1
	}
	return nil
}

// firstOf is the first of joined errors: one line is enough.
func firstOf(err error) error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()[0]
	}
	return err
}

// checkNQN reads -n.
func checkNQN(c *cli.Context) (string, error) {
	nqn := c.String("nqn")
	if nqn == "" {
		return "", usagef("no subsystem given (-n)")
	}
	if err := nvme.ValidateNQN(nqn); err != nil {
		return "", usagef("%v", err)
	}
	return nqn, nil
}

// outputFlag chooses between people and programs.
func outputFlag() cli.Flag {
	return text("output-format", "o", "text", "`FORMAT`: text or json")
}

// wantJSON reads outputFlag.
func wantJSON(c *cli.Context) (bool, error) {
	if c.String("output-format") == "normal" { // nvme-cli's word
		return false, nil
	}
	format, err := wordOption(c, "output-format", outputFormats)
	return format == "json", err
}
