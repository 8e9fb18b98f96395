package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"farblk/blockdev"
	"farblk/host"
)

func benchCommand() *cli.Command {
	flags := append(addressFlags(), text("nqn", "n", "", "`NQN` of the subsystem"))
	flags = append(flags, tuningFlags()...)
	flags = append(flags,
		text("namespace-id", "", "the first", "`NSID` of the namespace"),
		text("rw", "", benchModes[0], "`MODE`: "+anyOf(benchModes)),
		text("bs", "", "4k", "`BYTES` of a request"),
		text("qd", "", "32", "`NUMBER` of requests under way on each queue"),
		text("queues", "", "1", "`NUMBER` of queues"),
		text("time", "", "10", "`SECONDS` to measure"),
		text("rwmixread", "", "50", "`PERCENT` of randrw that reads"),
		text("size", "", "all", "`BYTES` of the device to use"),
		&cli.BoolFlag{Name: "destroy-data", Usage: "needed for writing: what is on the namespace is lost"},
		outputFlag())
	return &cli.Command{
		Name:      "bench",
		Usage:     "measure a namespace",
		ArgsUsage: "[DEVICE]",
		Description: "With -a and -n it connects by itself and measures the connection alone, without an export.\n" +
			"With DEVICE, a connection or the path of a block device or file, it measures that through the kernel.",
		Flags:  flags,
		Action: bench,
	}
}

func bench(c *cli.Context) error {
	asJSON, err := wantJSON(c)
	if err != nil {
		return err
	}
	job, err := parseBench(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
	defer stop()
	var r *benchResult
	if c.NArg() > 0 {
		what, err := oneArg(c, "DEVICE")
		if err != nil {
			return err
		}
		for _, f := range append(addressFlags(), text("nqn", "", "", "")) {
			if c.IsSet(f.Names()[0]) {
				return usagef("--%s goes without DEVICE", f.Names()[0])
			}
		}
		path, err := devicePath(what)
		if err != nil {
			return err
		}
		if r, err = benchPath(path, job, ctx.Done()); err != nil {
			return err
		}
	} else {
		if !c.IsSet("traddr") && !c.IsSet("nqn") {
			return usagef("say what to measure: DEVICE, or -a ADDRESS and -n NQN")
		}
		if r, err = benchConnection(ctx, c, job); err != nil {
			return err
		}
	}
	if asJSON {
		return printJSON(c.App.Writer, r)
	}
	printBench(c.App.Writer, r)
	return nil
}

func parseBench(c *cli.Context) (*benchJob, error) {
	mode, err := wordOption(c, "rw", benchModes)
	if err != nil {
		return nil, err
	}
	j := &benchJob{Mode: mode, Block: 4096, Depth: 32, Queues: 1, Time: 10 * time.Second, Reads: 50}
	err = errors.Join(
		numberOption(c, "qd", 1, 4096, &j.Depth),
		numberOption(c, "queues", 1, 1024, &j.Queues),
		numberOption(c, "rwmixread", 0, 100, &j.Reads),
		sizeOption(c, "bs", 512, blockdev.MaxLease, &j.Block),
		secondsOption(c, "time", time.Millisecond, 24*time.Hour, &j.Time),
		sizeOption(c, "size", 512, math.MaxInt64, &j.Size),
	)
	if err != nil {
		return nil, firstOf(err)
	}
	if j.Block%512 != 0 {
		return nil, usagef("--bs %s is not a multiple of 512", c.String("bs"))
	}
	if j.writes() && !c.Bool("destroy-data") {
		return nil, usagef("--rw %s overwrites what is on the namespace: say --destroy-data if that is meant", j.Mode)
	}
	return j, nil
}

// fit limits the job to a device of that many bytes.
func (j *benchJob) fit(size int64, name string) error {
	if j.Size == 0 || j.Size > size {
		j.Size = size
	}
	j.Size -= j.Size % int64(j.Block)
	if j.Size == 0 {
		return fmt.Errorf("%s: smaller than one request of %d bytes", name, j.Block)
	}
	return nil
}

// devicePath is the path to measure: itself, or the first export with a path of a connection.
func devicePath(what string) (string, error) {
	if isDevice(what) {
		return what, nil
	}
	if st, err := os.Stat(what); err == nil && st.Mode()&fs.ModeSocket != 0 {
		return "", fmt.Errorf("%s is an NBD socket, which goes past the kernel: measure it with fio's nbd engine, or the connection with -a and -n", what)
	}
	dir, err := openStateDir()
	if err != nil {
		return "", err
	}
	found, err := dir.Find(what)
	if err != nil {
		return "", err
	}
	for _, s := range found {
		for _, n := range s.Namespaces {
			if id := s.NamespaceOf(what); id != 0 && id != n.NSID {
				continue
			}
			for _, e := range n.Exports {
				if isDevice(e.Path) {
					return e.Path, nil
				}
			}
		}
	}
	if len(found) > 0 {
		return "", fmt.Errorf("%s has no block device or file to measure: use -a and -n", what)
	}
	return "", fmt.Errorf("%s: no block device, file or connection", what)
}

// refuseOverwriting keeps a job that writes away from a subsystem that is connected: its devices may be in use.
func refuseOverwriting(nqn string, j *benchJob) error {
	if !j.writes() {
		return nil
	}
	dir, err := openStateDir()
	if err != nil {
		return nil // no place where a session could be
	}
	entries, err := dir.Scan()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Config.Subsystem == nqn {
			return fmt.Errorf("%s is connected as %s, and --rw %s would overwrite its devices behind their users: disconnect it first, or measure a device of it", nqn, e.Name, j.Mode)
		}
	}
	return nil
}

// benchConnection makes a connection for the measurement alone.
func benchConnection(ctx context.Context, c *cli.Context, j *benchJob) (r *benchResult, err error) {
	nqn, err := checkNQN(c)
	if err != nil {
		return nil, err
	}
	cfg, err := fabricConfig(c)
	if err != nil {
		return nil, err
	}
	cfg.Subsystem = nqn
	if err := refuseOverwriting(nqn, j); err != nil {
		return nil, err
	}
	if cfg.NrIOQueues == 0 {
		cfg.NrIOQueues = j.Queues
	}
	if cfg.QueueSize == 0 { // one entry stays free
		cfg.QueueSize = min(max(128, 1<<bitsFor(j.Depth+1)), 1024)
	}
	if need := j.Queues * j.Depth * max(leaseSize(j.Block), blockdev.PageSize); cfg.PoolSize == 0 && need > 32<<20 {
		cfg.PoolSize = need + 32<<20
	}
	if err := chooseProvider(ctx, cfg); err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	h := cfg.Host(openDialer(cfg, log), log)
	ctrl, err := host.Connect(ctx, h)
	if err != nil {
		return nil, cfg.Explain(err)
	}
	defer func() {
		quick, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if e := ctrl.Shutdown(quick); e != nil && err == nil {
			err = fmt.Errorf("disconnect: %w", e)
		}
	}()
	all := ctrl.Namespaces()
	if len(all) == 0 {
		return nil, errors.New("the subsystem has no namespace for this host")
	}
	ns := all[0]
	if c.IsSet("namespace-id") {
		var want uint32
		if err := numberOption(c, "namespace-id", 1, math.MaxUint32, &want); err != nil {
			return nil, err
		}
		ns = nil
		for _, n := range all {
			if n.NSID() == want {
				ns = n
			}
		}
		if ns == nil {
			return nil, fmt.Errorf("the subsystem has no namespace %d for this host", want)
		}
	}
	info := ns.Info()
	if j.Block%info.BlockSize != 0 {
		return nil, fmt.Errorf("--bs %d is not a multiple of the namespace's blocks of %d bytes", j.Block, info.BlockSize)
	}
	if err := j.fit(info.Size, info.Name); err != nil {
		return nil, err
	}
	if granted := ctrl.Info().IOQueues; granted < j.Queues {
		return nil, fmt.Errorf("the target grants %s, not %d", countOf(granted, "I/O queue"), j.Queues)
	}
	for _, n := range cfg.Notes {
		fmt.Fprintln(c.App.ErrWriter, n)
	}
	return benchDevice(ns, j, ctx.Done())
}

// bitsFor is the least b with 1<<b >= n.
func bitsFor(n int) int {
	b := 0
	for 1<<b < n {
		b++
	}
	return b
}

// leaseSize is what a buffer of n bytes takes from the pool.
func leaseSize(n int) int { return 1 << bitsFor(n) }

func printBench(w io.Writer, r *benchResult) {
	fmt.Fprintf(w, "%s, %s requests, depth %d on %s, %.1f s\n", r.Mode, formatSize(int64(r.Block)), r.Depth, countOf(r.Queues, "queue"), r.Seconds)
	fmt.Fprintf(w, "  IOPS       %.0f (%s, %s)\n", r.IOPS, countOf(r.Reads, "read"), countOf(r.Writes, "write"))
	fmt.Fprintf(w, "  bandwidth  %s/s\n", formatSize(int64(r.Bandwidth)))
	fmt.Fprintf(w, "  latency    mean %.1f us, p50 %.1f, p99 %.1f, p99.9 %.1f, max %.1f\n",
		r.Latency.Mean, r.Latency.P50, r.Latency.P99, r.Latency.P999, r.Latency.Max)
	fmt.Fprintf(w, "  CPU        %.0f %% of one processor\n", r.CPU)
}
