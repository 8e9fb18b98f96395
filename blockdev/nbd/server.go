package nbd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Config is a server's. The zero value is usable.
type Config struct {
	// MaxConnections is how many clients may be connected; 64 if 0. One more takes the place of the client that has
	// negotiated for the longest time; if none negotiates, it is closed at once.
	MaxConnections int
	// HandshakeTimeout is how long a client has to negotiate; 10 s if 0.
	HandshakeTimeout time.Duration
	// StallTimeout is how long a client may take for sending a payload or taking a batch of replies, and with it
	// hold buffers, while others wait for one that long; 10 s if 0. While nobody waits it may take any time.
	StallTimeout time.Duration
	// CloseTimeout is how long Close waits for requests under way; 10 s if 0.
	CloseTimeout time.Duration
	// Logger gets connects, disconnects and protocol errors; nothing if nil.
	Logger *slog.Logger
}

// Server serves exports to NBD clients on any number of listeners and connections. Its methods may be called
// from any goroutine.
//
// Locks: mu, then a connection's mu, then the pool's.
type Server struct {
	cfg Config
	log *slog.Logger

	// spinning has room for the connections that may wait by polling at one time: the others, and the devices'
	// own goroutines, need processors as well.
	spinning chan struct{}

	mu        sync.Mutex
	exports   []*export // in the order they were added; the first is the default
	listeners map[net.Listener]struct{}
	socks     map[net.Conn]*conn // nil during the handshake
	strangers []net.Conn         // those of socks in their handshake, the oldest first
	closing   bool
	closed    chan struct{}  // closed when closing is set
	running   sync.WaitGroup // accept loops and connections
}

// NewServer makes a server without exports.
func NewServer(c Config) *Server {
	if c.MaxConnections <= 0 {
		c.MaxConnections = 64
	}
	if c.HandshakeTimeout <= 0 {
		c.HandshakeTimeout = 10 * time.Second
	}
	if c.StallTimeout <= 0 {
		c.StallTimeout = 10 * time.Second
	}
	if c.CloseTimeout <= 0 {
		c.CloseTimeout = 10 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return &Server{
		cfg: c, log: c.Logger,
		spinning:  make(chan struct{}, spinners()),
		closed:    make(chan struct{}),
		listeners: make(map[net.Listener]struct{}),
		socks:     make(map[net.Conn]*conn),
	}
}

// Add offers one more export. The one added first is also the default export, whose name is empty, unless
// another has that name. It fails if the name is taken, or too long.
func (s *Server) Add(e Export) error {
	if len(e.Name) > maxNameLength || len(e.Description) > maxNameLength {
		return fmt.Errorf("nbd: the name or description of an export is longer than %d bytes", maxNameLength)
	}
	x := newExport(e)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		x.unwatch()
		return net.ErrClosed
	}
	if slices.ContainsFunc(s.exports, func(o *export) bool { return o.Name == e.Name }) {
		x.unwatch()
		return fmt.Errorf("nbd: there is an export %q already", e.Name)
	}
	s.exports = append(s.exports, x)
	return nil
}

// Remove takes an export back, ends its connections, and waits until the device is free of them: at most
// CloseTimeout, then it is an error and requests may still be under way.
func (s *Server) Remove(name string) error {
	s.mu.Lock()
	i := slices.IndexFunc(s.exports, func(o *export) bool { return o.Name == name })
	if i < 0 {
		s.mu.Unlock()
		return fmt.Errorf("nbd: there is no export %q", name)
	}
	e := s.exports[i]
	s.exports = slices.Delete(s.exports, i, i+1)
	var all []*conn
	for _, c := range s.socks {
		if c != nil && c.export == e {
			all = append(all, c)
		}
	}
	s.mu.Unlock()
	e.unwatch()
	timeout := time.After(s.cfg.CloseTimeout)
	for _, c := range all {
		c.stop()
	}
	for _, c := range all {
		select {
		case <-c.ended:
		case <-timeout:
			return fmt.Errorf("nbd: requests on export %q are still under way after %v", name, s.cfg.CloseTimeout)
		}
	}
	return nil
}

func (s *Server) lookup(name string) *export {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.exports {
		if e.Name == name {
			return e
		}
	}
	if name == "" && len(s.exports) > 0 {
		return s.exports[0]
	}
	return nil
}

func (s *Server) list() []*export {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.exports)
}

// Serve accepts clients until the listener or the server is closed, which gives net.ErrClosed. The server
// closes the listener.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.listeners[l] = struct{}{}
	s.running.Add(1)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
		s.running.Done()
	}()
	for pause := time.Duration(0); ; {
		sock, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return net.ErrClosed
			}
			// out of descriptors, or the client left before it was accepted: try again, not in a hurry
			if pause = min(max(2*pause, 5*time.Millisecond), time.Second); pause == time.Second {
				s.log.Warn("nbd: cannot accept clients", "err", err)
			}
			select {
			case <-s.closed:
				return net.ErrClosed
			case <-time.After(pause):
			}
			continue
		}
		pause = 0
		if !s.admit(sock) {
			continue
		}
		go s.serve(sock)
	}
}

// ServeConn serves one client, from the handshake on, and returns when it is done. The server closes sock, which
// must be a socket of the operating system.
func (s *Server) ServeConn(sock net.Conn) error {
	if !s.admit(sock) {
		return net.ErrClosed
	}
	return s.serve(sock)
}

// admit counts a socket in, or closes it.
func (s *Server) admit(sock net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		sock.Close()
		return false
	}
	if len(s.socks) >= s.cfg.MaxConnections {
		if len(s.strangers) == 0 {
			s.log.Warn("nbd: client refused: too many connections", "limit", s.cfg.MaxConnections)
			sock.Close()
			return false
		}
		oldest := s.strangers[0]
		s.log.Warn("nbd: client dropped in its handshake: too many connections", "client", oldest.RemoteAddr(), "limit", s.cfg.MaxConnections)
		s.leave(oldest)
		oldest.Close()
	}
	s.socks[sock] = nil
	s.strangers = append(s.strangers, sock)
	s.running.Add(1)
	return true
}

// keep says that a client is no stranger any more, and is not dropped to make room. It fails if it was already.
func (s *Server) keep(sock net.Conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.socks[sock]; !ok {
		return net.ErrClosed
	}
	s.known(sock)
	return nil
}

// known takes a socket from the strangers, if it is there. mu is held.
func (s *Server) known(sock net.Conn) {
	if i := slices.Index(s.strangers, sock); i >= 0 {
		s.strangers = slices.Delete(s.strangers, i, i+1)
	}
}

// leave takes a socket from the lists, if it is there still. mu is held.
func (s *Server) leave(sock net.Conn) {
	delete(s.socks, sock)
	s.known(sock)
}

// forget counts a socket out.
func (s *Server) forget(sock net.Conn) {
	s.mu.Lock()
	s.leave(sock)
	s.mu.Unlock()
	s.running.Done()
}

// serve runs an admitted connection to its end.
func (s *Server) serve(sock net.Conn) (err error) {
	defer func() {
		sock.Close()
		s.forget(sock)
	}()
	if tcp, ok := sock.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true)
		_ = tcp.SetKeepAlive(true)
	}
	_ = sock.SetDeadline(time.Now().Add(s.cfg.HandshakeTimeout))
	a, err := s.negotiate(sock)
	if err == nil {
		err = sock.SetDeadline(time.Time{})
	}
	if err != nil {
		if errors.Is(err, errGone) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		s.log.Warn("nbd: handshake failed", "client", sock.RemoteAddr(), "err", err)
		return fmt.Errorf("nbd: handshake: %w", err)
	}
	number := int(a.export.connections.Add(1) - 1)
	c, err := newConn(s, sock, a, number)
	if err != nil {
		return err
	}
	return s.transmit(c)
}

// transmit runs the transmission phase of c, which is registered so that Close and Remove find it.
func (s *Server) transmit(c *conn) error {
	s.mu.Lock()
	stop := s.closing || !slices.Contains(s.exports, c.export)
	s.socks[c.sock] = c
	s.known(c.sock)
	s.mu.Unlock()
	if stop {
		c.stop()
	}
	s.log.Debug("nbd: client connected", "export", c.export.Name)
	err := c.run()
	if err != nil {
		s.log.Warn("nbd: connection ended", "export", c.export.Name, "err", err)
	} else {
		s.log.Debug("nbd: client left", "export", c.export.Name)
	}
	return err
}

// Close stops accepting, ends all connections after the requests that were received, and waits: at most
// CloseTimeout, then it is an error and requests may still be under way. Nobody may submit to a device's pool
// on the server's behalf once it returned nil.
func (s *Server) Close() error {
	s.mu.Lock()
	first := !s.closing
	if first {
		s.closing = true
		close(s.closed)
	}
	for l := range s.listeners {
		l.Close()
	}
	for sock, c := range s.socks {
		if c == nil {
			sock.Close()
		} else {
			c.stop()
		}
	}
	exports := s.exports
	s.mu.Unlock()
	if first {
		for _, e := range exports {
			e.unwatch()
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.CloseTimeout)
	defer cancel()
	done := make(chan struct{})
	go func() { s.running.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("nbd: requests are still under way after %v", s.cfg.CloseTimeout)
	}
}

// rawConn gives access to the socket's descriptor.
func rawConn(sock net.Conn) (syscall.RawConn, error) {
	sc, ok := sock.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("nbd: a %T is not a socket", sock)
	}
	return sc.SyscallConn()
}
