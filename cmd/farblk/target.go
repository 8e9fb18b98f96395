package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host/nvme"
	"farblk/target"
	"farblk/transport/verbs"
	"farblk/transport/verbs/rdmacm"
)

func targetCommand() *cli.Command {
	return &cli.Command{
		Name:  "target",
		Usage: "offer memory or files as NVMe namespaces, for trying out and for tests",
		Description: "This target is for trying farblk out and for tests, not for data that matters: it has no authentication,\n" +
			"and what is in memory is gone when it ends (SIGTERM or SIGINT). With --control it takes commands on standard input:\n" +
			"add SIZE, resize NSID SIZE, remove NSID, read-only NSID, writable NSID, drop (all connections).",
		Flags: []cli.Flag{
			&cli.StringSliceFlag{Name: "listen", Usage: "`ADDRESS[:PORT]` to listen on, may be given again; port 4420 if not given, 0 is any free one"},
			text("nqn", "n", "", "`NQN` of the subsystem"),
			text("size", "", "256M", "`BYTES` of each namespace in memory, or of a new file"),
			&cli.StringSliceFlag{Name: "file", Usage: "`PATH` of a file or block device to offer as a namespace, may be given again"},
			text("block-size", "", "512", "`BYTES` of a block: 512 or 4096"),
			text("namespaces", "", "1", "`NUMBER` of namespaces in memory"),
			&cli.BoolFlag{Name: "read-only", Usage: "write protect the namespaces"},
			&cli.StringSliceFlag{Name: "allow-host", Usage: "host `NQN` that may connect, may be given again; without it any host may"},
			text("provider", "", "auto", "`NAME`: verbs (RDMA devices), iwarp (software, over TCP), or auto"),
			&cli.BoolFlag{Name: "disable-crc", Usage: "software iWARP: do not ask for CRC32C"},
			&cli.BoolFlag{Name: "control", Usage: "take commands on standard input"},
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "log connections to standard error"},
		},
		Action: runTarget,
	}
}

// targetConfig is the checked command line.
type targetConfig struct {
	listen     []netip.AddrPort
	subsystem  target.SubsystemConfig
	namespaces []target.NamespaceConfig
	blockSize  uint32
	provider   *session.Config // Provider and DisableCRC only
}

func parseTarget(c *cli.Context) (*targetConfig, error) {
	t := &targetConfig{blockSize: 512, provider: &session.Config{DisableCRC: c.Bool("disable-crc")}}
	nqn, err := checkNQN(c)
	if err != nil {
		return nil, err
	}
	t.subsystem = target.SubsystemConfig{NQN: nqn, Hosts: c.StringSlice("allow-host")}
	for _, h := range t.subsystem.Hosts {
		if err := nvme.ValidateNQN(h); err != nil {
			return nil, usagef("--allow-host: %v", err)
		}
	}
	if t.provider.Provider, err = wordOption(c, "provider", providers); err != nil {
		return nil, err
	}
	listen := c.StringSlice("listen")
	if len(listen) == 0 {
		return nil, usagef("say where to listen (--listen)")
	}
	for _, l := range listen {
		a, err := netip.ParseAddrPort(l)
		if err != nil {
			ip, err := netip.ParseAddr(strings.Trim(l, "[]"))
			if err != nil {
				return nil, usagef("--listen %q is not ADDRESS[:PORT]", l)
			}
			a = netip.AddrPortFrom(ip, 4420)
		}
		t.listen = append(t.listen, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
	}
	switch b := c.String("block-size"); b {
	case "", "512":
	case "4096", "4k", "4K":
		t.blockSize = 4096
	default:
		return nil, usagef("--block-size %q: 512 or 4096", b)
	}
	return t, t.parseNamespaces(c)
}

func (t *targetConfig) parseNamespaces(c *cli.Context) error {
	count := 1
	if err := numberOption(c, "namespaces", 0, 1024, &count); err != nil {
		return err
	}
	ns := target.NamespaceConfig{BlockSize: t.blockSize, ReadOnly: c.Bool("read-only")}
	if c.IsSet("size") {
		n, err := t.parseNamespaceSize(c.String("size"))
		if err != nil {
			return usagef("--size %v", err)
		}
		ns.Size = n
	}
	files := c.StringSlice("file")
	if len(files) > 0 && c.IsSet("namespaces") {
		return usagef("--namespaces is for memory: give --file once for each")
	}
	const defaultSize = 256 << 20
	for i, f := range files {
		if f == "" {
			return usagef("--file is empty")
		}
		if slices.Contains(files[:i], f) {
			return usagef("--file %s is given twice", f)
		}
		ns := ns
		ns.File = f
		if _, err := os.Stat(f); errors.Is(err, os.ErrNotExist) && ns.Size == 0 && !ns.ReadOnly {
			ns.Size = defaultSize
		}
		t.namespaces = append(t.namespaces, ns)
	}
	if len(files) > 0 {
		return nil
	}
	if ns.Size == 0 {
		ns.Size = defaultSize
	}
	for range count {
		t.namespaces = append(t.namespaces, ns)
	}
	return nil
}

func (t *targetConfig) parseNamespaceSize(s string) (uint64, error) {
	n, err := parseSize(s)
	if err != nil {
		return 0, err
	}
	if n < int64(t.blockSize) || n%int64(t.blockSize) != 0 {
		return 0, fmt.Errorf("%s is not a multiple of the block size %d", s, t.blockSize)
	}
	return uint64(n), nil
}

func runTarget(c *cli.Context) (err error) {
	if err := noArgs(c); err != nil {
		return err
	}
	cfg, err := parseTarget(c)
	if err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	if c.Bool("verbose") {
		log = slog.New(slog.NewTextHandler(c.App.ErrWriter, nil))
	}
	ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
	defer stop()

	t, err := target.New(target.Config{Logger: log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	sub, err := t.AddSubsystem(cfg.subsystem)
	if err != nil {
		return err
	}
	for _, n := range cfg.namespaces {
		if _, err := sub.AddNamespace(n); err != nil {
			return err
		}
	}
	ended := make(chan error, len(cfg.listen))
	serving := 0
	defer func() {
		stop()
		for range serving {
			err = errors.Join(err, <-ended)
		}
	}()
	for _, a := range cfg.listen {
		l, provider, err := targetListen(ctx, cfg.provider, a, log)
		if err != nil {
			return err
		}
		serving++
		go func() { ended <- t.Serve(ctx, l) }()
		at := l.Addr()
		shown := at.IP
		if shown.IsUnspecified() {
			shown = netip.MustParseAddr("127.0.0.1")
		}
		fmt.Fprintf(c.App.Writer, "listening on %s (provider %s); connect with:\n  farblk connect -a %s -s %d -n %s", at, provider, shown, at.Port, sub.NQN())
		if provider == "iwarp" {
			fmt.Fprint(c.App.Writer, " --provider iwarp")
		}
		fmt.Fprintln(c.App.Writer)
	}
	_ = session.Notify("READY=1")
	if c.Bool("control") {
		go controlTarget(os.Stdin, c.App.Writer, t, sub, cfg)
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-ended:
		serving--
		return err
	}
}

// targetListen opens one listener; with provider auto an RDMA device where the address belongs to one.
func targetListen(ctx context.Context, c *session.Config, a netip.AddrPort, log *slog.Logger) (verbs.Listener, string, error) {
	addr := verbs.Addr{IP: a.Addr(), Port: a.Port()}
	try := func(provider string) (verbs.Listener, error) {
		p := *c
		p.Provider = provider
		l, err := openProvider(&p, log).Listen(ctx, addr, 0)
		if err != nil {
			return nil, fmt.Errorf("cannot listen on %s (provider %s): %w", addr, provider, err)
		}
		return l, nil
	}
	if c.Provider != "auto" {
		l, err := try(c.Provider)
		return l, c.Provider, err
	}
	if devices, err := rdmacm.New(rdmacm.Options{}).Devices(); err == nil && len(devices) > 0 && !a.Addr().IsLoopback() {
		l, err := try("verbs")
		if err == nil || !errors.Is(err, verbs.ErrNoDevice) && !errors.Is(err, verbs.ErrAddrNotAvailable) {
			return l, "verbs", err
		}
	}
	l, err := try("iwarp")
	return l, "iwarp", err
}

// controlTarget obeys lines from r until it ends.
func controlTarget(r io.Reader, w io.Writer, t *target.Target, sub *target.Subsystem, cfg *targetConfig) {
	for in, err := bufio.NewReader(r), error(nil); err == nil; {
		var line string // of any length: nonsense must not end it
		line, err = in.ReadString('\n')
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := obey(w, t, sub, cfg, words[0], words[1:]); err != nil {
			fmt.Fprintf(w, "error: %.40s: %v\n", words[0], err)
		}
	}
}

func obey(w io.Writer, t *target.Target, sub *target.Subsystem, cfg *targetConfig, verb string, args []string) error {
	want := map[string]int{"add": 1, "resize": 2, "remove": 1, "read-only": 1, "writable": 1, "drop": 0}
	n, known := want[verb]
	if !known {
		return errors.New("unknown command")
	}
	if len(args) != n {
		return fmt.Errorf("takes %d more words, not %d", n, len(args))
	}
	var nsid uint32
	if verb != "add" && n > 0 {
		v, err := parseNumber(args[0], 1, 1024)
		if err != nil {
			return err
		}
		nsid = uint32(v)
	}
	var size uint64
	if verb == "add" || verb == "resize" {
		var err error
		if size, err = cfg.parseNamespaceSize(args[n-1]); err != nil {
			return err
		}
	}
	var err error
	switch verb {
	case "add":
		nsid, err = sub.AddNamespace(target.NamespaceConfig{Size: size, BlockSize: cfg.blockSize})
	case "resize":
		err = sub.ResizeNamespace(nsid, size)
	case "remove":
		err = sub.RemoveNamespace(nsid)
	case "read-only", "writable":
		err = sub.SetReadOnly(nsid, verb == "read-only")
	case "drop":
		t.DropConnections()
	}
	if err == nil {
		fmt.Fprintf(w, "ok: %s %d\n", verb, nsid)
	}
	return err
}
