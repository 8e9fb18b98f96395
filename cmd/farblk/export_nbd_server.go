package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"

	"farblk/blockdev/nbd"
	"farblk/cmd/internal/session"
	"farblk/host"
)

// nbdServer is one socket on which each namespace is an NBD export "nN"; the lowest is the default export.
type nbdServer struct {
	s      session.Surroundings
	kind   string
	path   string // socket, or HOST:PORT
	server *nbd.Server
	served chan struct{}
	closed atomic.Bool
}

// newNBDServer listens. Clients can connect at once but find no export before there is one.
func newNBDServer(s session.Surroundings, spec session.ExportSpec) (*nbdServer, error) {
	e := &nbdServer{s: s, kind: spec.Kind, path: spec.Where, served: make(chan struct{})}
	var l net.Listener
	var err error
	switch spec.Kind {
	case session.KindNBDUnix:
		if e.path == "" {
			e.path = filepath.Join(s.Folder, session.SocketName)
		}
		l, err = nbd.ListenUnix(e.path)
	default:
		l, err = net.Listen("tcp", e.path)
		if err == nil {
			e.path = l.Addr().String() // with the port that was chosen
			if a, err := netip.ParseAddrPort(e.path); err != nil || !a.Addr().IsLoopback() {
				s.Note("nbd-tcp " + e.path + ": without TLS, whoever reaches this port reads and writes the namespaces")
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("export %s: %w", spec.Kind, plainListenError(err))
	}
	e.server = nbd.NewServer(nbd.Config{CloseTimeout: exportCloseLimit, Logger: s.Log})
	go func() {
		defer close(e.served)
		if err := e.server.Serve(l); !errors.Is(err, net.ErrClosed) {
			s.Log.Error("the NBD server has stopped accepting", "error", err)
		}
	}()
	return e, nil
}

// removeStaleSocket removes a socket that nobody listens on.
func removeStaleSocket(path string) {
	st, err := os.Lstat(path)
	if err != nil || st.Mode().Type() != os.ModeSocket {
		return
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return
	}
	_ = os.Remove(path)
}

// plainListenError leaves out what the user did not write.
func plainListenError(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Addr != nil {
		return fmt.Errorf("cannot listen on %s: %w", op.Addr, op.Err)
	}
	return err
}

func (e *nbdServer) Add(_ context.Context, n *host.Namespace) (session.Export, error) {
	name := namespaceName(n.NSID())
	if err := e.server.Add(nbd.Export{Name: name, Description: n.Info().Name, Device: n}); err != nil {
		return session.Export{}, fmt.Errorf("export %s: %w", e.kind, err)
	}
	x := session.Export{Kind: e.kind, Path: e.path}
	if e.kind == session.KindNBDUnix {
		x.URI = "nbd+unix:///" + name + "?socket=" + url.QueryEscape(e.path)
	} else {
		x.URI = "nbd://" + e.path + "/" + name
	}
	return x, nil
}

func (e *nbdServer) Has(*host.Namespace) bool { return !e.closed.Load() }

func (e *nbdServer) Remove(_ context.Context, n *host.Namespace) error {
	if err := e.server.Remove(namespaceName(n.NSID())); err != nil { // gone, but for its last requests
		e.s.Log.Warn("a removed namespace is still in use", "nsid", n.NSID(), "error", err)
	}
	return nil
}

func (e *nbdServer) InUse() error {
	clients := e.server.Clients()
	if len(clients) == 0 {
		return nil
	}
	return &session.BusyError{Detail: fmt.Sprintf("%s is in use by %s: %s", e.path, countOf(len(clients), "NBD client"), clients[0])}
}

func (e *nbdServer) Leftovers() []session.Leftover {
	if e.kind != session.KindNBDUnix || e.closed.Load() {
		return nil
	}
	return []session.Leftover{{Kind: e.kind, Path: e.path}}
}

// Close answers what clients have asked for; it does not flush: that is for them to ask for, and the controller makes
// durable what it has when it is shut down. It ends by exportCloseLimit.
func (e *nbdServer) Close(_ context.Context, force bool) error {
	if err := e.InUse(); err != nil && !force {
		return err
	}
	if err := e.server.Close(); err != nil {
		return err
	}
	<-e.served
	e.closed.Store(true)
	return nil
}
