package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"farblk/blockdev"
	"farblk/blockdev/fuse"
	"farblk/cmd/internal/session"
	"farblk/host"
)

// fuseExport is a mount with a file for each namespace, or over one file.
type fuseExport struct {
	s      session.Surroundings
	where  string
	isFile bool // mounted over a file: one namespace only

	mu sync.Mutex
	m  *fuse.Mounted // nil until the first namespace comes
}

// newFUSE prepares the export; nothing is mounted yet.
func newFUSE(s session.Surroundings, where string) *fuseExport {
	e := &fuseExport{s: s, where: where}
	if where == "" {
		e.where = filepath.Join(s.Folder, session.FilesName)
	}
	st, err := os.Stat(e.where)
	e.isFile = err == nil && st.Mode().IsRegular()
	return e
}

func namespaceName(nsid uint32) string { return fmt.Sprintf("n%d", nsid) }

func (e *fuseExport) mounted() *fuse.Mounted {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.m
}

func (e *fuseExport) Add(ctx context.Context, n *host.Namespace) (session.Export, error) {
	name := namespaceName(n.NSID())
	m := e.mounted()
	switch {
	case m == nil:
		var err error
		m, err = fuse.Mount(ctx, fuse.Config{
			Path: e.where, Devices: map[string]blockdev.Device{name: n}, Logger: e.s.Log,
		})
		if err != nil {
			return session.Export{}, fmt.Errorf("export fuse: %w", err)
		}
		e.mu.Lock()
		e.m = m
		e.mu.Unlock()
		e.s.Record() // before anything else can go wrong
	case e.isFile:
		return session.Export{}, fmt.Errorf("export fuse: %s is a file and shows one namespace already: give a folder", e.where)
	default:
		if err := m.Add(name, n); err != nil {
			return session.Export{}, fmt.Errorf("export fuse: %w", err)
		}
	}
	return session.Export{Kind: session.KindFUSE, Path: m.File(name)}, nil
}

func (e *fuseExport) Has(*host.Namespace) bool { return e.mounted() != nil }

func (e *fuseExport) Remove(ctx context.Context, n *host.Namespace) error {
	if m := e.mounted(); m != nil {
		return m.Remove(ctx, namespaceName(n.NSID()))
	}
	return nil
}

func (e *fuseExport) InUse() error {
	m := e.mounted()
	if m == nil {
		return nil
	}
	if holders := m.Holders(); len(holders) > 0 {
		return &session.BusyError{Detail: (&fuse.BusyError{Path: m.Path(), Holders: holders}).Error()}
	}
	return nil
}

func (e *fuseExport) Leftovers() []session.Leftover {
	if m := e.mounted(); m != nil {
		return []session.Leftover{{Kind: session.KindFUSE, Path: m.Path()}}
	}
	return nil
}

func (e *fuseExport) Close(ctx context.Context, force bool) error {
	m := e.mounted()
	if m == nil {
		return nil
	}
	err := m.Unmount(ctx, force)
	var busy *fuse.BusyError
	if errors.As(err, &busy) {
		return &session.BusyError{Detail: busy.Error()}
	}
	if err != nil {
		return err
	}
	e.mu.Lock()
	e.m = nil
	e.mu.Unlock()
	return nil
}

// unmountStale takes a dead mount away; those who have a file of it open only get errors anyway. A folder of ours
// that was made for it goes, too, if it is empty.
func unmountStale(path string) error {
	err := fuse.RemoveStale(path, nil)
	if err == nil && filepath.Base(path) == session.FilesName {
		_ = unix.Rmdir(path)
	}
	if errors.Is(err, unix.EBUSY) {
		return nil // somebody who lives serves it
	}
	return err
}
