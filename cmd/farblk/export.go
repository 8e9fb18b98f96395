package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"farblk/blockdev/nbd"
	"farblk/cmd/internal/session"
)

// exportCloseLimit bounds what an export waits for by itself when it is taken away.
const exportCloseLimit = 2 * time.Second

// newExporter opens one way to export; nil for none.
func newExporter(spec session.ExportSpec, s session.Surroundings) (session.Exporter, error) {
	switch spec.Kind {
	case session.KindNBD:
		return newNBDKernel(s, spec.Where), nil
	case session.KindNBDUnix, session.KindNBDTCP:
		return newNBDServer(s, spec)
	case session.KindFUSE:
		return newFUSE(s, spec.Where), nil
	default:
		return nil, nil
	}
}

// openStateDir is the state directory, which knows how to clear away what exports leave.
func openStateDir() (*session.StateDir, error) {
	path, err := session.DefaultPath()
	if err != nil {
		return nil, err
	}
	return &session.StateDir{Path: path, RemoveLeftover: removeLeftover, Crashed: func(name, log string) {
		fmt.Fprintf(os.Stderr, "farblk: %s did not end in an orderly way: its log is kept as %s\n", name, log)
	}}, nil
}

// removeLeftover clears away one thing that an export of a dead session has left.
func removeLeftover(l session.Leftover, force bool) error {
	switch l.Kind {
	case session.KindFUSE:
		return unmountStale(l.Path)
	case session.KindNBD:
		return detachStale(l.Path, force)
	case session.KindNBDUnix:
		removeStaleSocket(l.Path)
	}
	return nil
}

// defaultExport is how namespaces are exported when nothing is asked for: as kernel block devices where that is
// possible, else as files, and then why is why not.
func defaultExport(ctx context.Context) (e session.ExportSpec, why string) {
	if err := nbd.Available(ctx); err != nil {
		return session.ExportSpec{Kind: session.KindFUSE}, "exported as files because there can be no block devices: " + strings.TrimPrefix(err.Error(), "nbd: ")
	}
	return session.ExportSpec{Kind: session.KindNBD}, ""
}

// preflight refuses exports that cannot work here, before anything is connected.
func preflight(ctx context.Context, specs []session.ExportSpec) error {
	for _, e := range specs {
		if e.Kind != session.KindNBD {
			continue
		}
		if err := nbd.Available(ctx); err != nil {
			return fmt.Errorf("export nbd: %w", err)
		}
		if e.Where == "" {
			continue
		}
		sys := "/sys/block/nbd" + strconv.Itoa(nbdIndex(e.Where))
		if _, err := os.Stat(sys); err != nil {
			return fmt.Errorf("export nbd: there is no %s: load the module with a larger nbds_max, or give no number for any free device", e.Where)
		}
		pid, err := os.ReadFile(sys + "/pid")
		if err != nil { // nobody has connected it
			continue
		}
		stale, err := nbd.Stale("")
		if err == nil && slices.ContainsFunc(stale, func(d nbd.StaleDevice) bool { return d.Path == e.Where }) {
			continue // a dead session's, to be taken over or removed
		}
		return fmt.Errorf("export nbd: %s is busy: process %s has connected it: give no number for any free device", e.Where, strings.TrimSpace(string(pid)))
	}
	return nil
}
