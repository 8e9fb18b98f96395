package iwarp

import (
	"container/list"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp/internal/mpa"
)

const defaultBacklog = 256

// listener accepts TCP connections, reads their MPA requests and queues them for Accept. A peer that is slow or
// silent holds up no other: each has its own goroutine, for HandshakeTimeout at most, and when backlog connections
// are waiting the one that has kept us waiting longest is dropped for the next.
type listener struct {
	p     *Provider
	tcp   *net.TCPListener
	ready chan *conn
	done  chan struct{}
	wait  sync.WaitGroup
	once  sync.Once
	limit int

	mu      sync.Mutex
	open    int       // connections not yet returned by Accept
	reading list.List // *net.TCPConn whose request is not complete, oldest first; nil when dropped for a newer
	closed  bool
}

// Listen opens the TCP port.
func (p *Provider) Listen(ctx context.Context, addr verbs.Addr, backlog int) (verbs.Listener, error) {
	if addr.Family != verbs.FamilyIP {
		return nil, verbs.ErrNoDevice
	}
	where := net.JoinHostPort("", strconv.Itoa(int(addr.Port)))
	if addr.IP.IsValid() {
		where = netip.AddrPortFrom(addr.IP, addr.Port).String()
	}
	lc := net.ListenConfig{KeepAlive: -1}
	lc.SetMultipathTCP(false) // Go's default; such a socket forgets the zone of its address
	l, err := lc.Listen(ctx, "tcp", where)
	if err != nil {
		return nil, socketError(err)
	}
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	s := &listener{p: p, tcp: l.(*net.TCPListener), ready: make(chan *conn), done: make(chan struct{}), limit: backlog}
	s.wait.Go(s.run)
	return s, nil
}

func (s *listener) Addr() verbs.Addr { return addrOf(s.tcp.Addr()) }

// run accepts until Close.
func (s *listener) run() {
	for {
		tcp, err := s.tcp.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors or memory: go on when there may be some again.
			s.p.log.Warn("accepting iWARP connections", "addr", s.Addr(), "error", err)
			select {
			case <-s.done:
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		s.mu.Lock()
		if s.open >= s.limit {
			oldest := s.reading.Front()
			if oldest == nil {
				s.mu.Unlock()
				tcp.Close()
				continue
			}
			s.reading.Remove(oldest).(*net.TCPConn).Close()
			oldest.Value = nil
			s.open--
		}
		if s.closed {
			s.mu.Unlock()
			tcp.Close()
			return
		}
		s.open++
		e := s.reading.PushBack(tcp)
		s.wait.Go(func() { s.greet(tcp, e) })
		s.mu.Unlock()
	}
}

// greet reads one request and hands the connection to Accept.
func (s *listener) greet(tcp *net.TCPConn, e *list.Element) {
	request, err := s.readRequest(tcp)
	s.mu.Lock()
	dropped := e.Value == nil
	s.reading.Remove(e)
	s.mu.Unlock()
	if dropped {
		return
	}
	defer func() {
		s.mu.Lock()
		s.open--
		s.mu.Unlock()
	}()
	if err != nil {
		s.p.log.Debug("no MPA request", "remote", tcp.RemoteAddr(), "error", err)
		tcp.Close()
		return
	}
	if err := mpa.CheckRequest(request); err != nil {
		s.p.log.Debug("MPA request refused", "remote", tcp.RemoteAddr(), "error", err)
		if frame, err := mpa.Refuse(request, nil).Append(nil); err == nil {
			_, _ = tcp.Write(frame)
		}
		refuse(tcp)
		return
	}
	c := newConn(s.p)
	c.tcp, c.request = tcp, request
	c.local, c.remote = addrOf(tcp.LocalAddr()), addrOf(tcp.RemoteAddr())
	select {
	case s.ready <- c:
	case <-s.done:
		c.Close()
	}
}

func (s *listener) readRequest(tcp *net.TCPConn) (mpa.Frame, error) {
	if err := configure(tcp); err != nil {
		return mpa.Frame{}, err
	}
	if err := tcp.SetDeadline(time.Now().Add(s.p.opt.HandshakeTimeout)); err != nil {
		return mpa.Frame{}, err
	}
	b := make([]byte, mpa.HeaderSize, mpa.HeaderSize+mpa.MaxPrivate)
	if _, err := io.ReadFull(tcp, b); err != nil {
		return mpa.Frame{}, err
	}
	n, err := mpa.Length(b, mpa.Request)
	if err != nil {
		return mpa.Frame{}, err
	}
	b = b[:n]
	if _, err := io.ReadFull(tcp, b[mpa.HeaderSize:]); err != nil {
		return mpa.Frame{}, err
	}
	f, err := mpa.Parse(b, mpa.Request)
	if err != nil {
		return mpa.Frame{}, err
	}
	return f, tcp.SetDeadline(time.Time{})
}

// Accept waits for the next request.
func (s *listener) Accept(ctx context.Context) (verbs.Conn, error) {
	select {
	case <-s.done:
		return nil, verbs.ErrClosed
	default:
	}
	select {
	case c := <-s.ready:
		return c, nil
	case <-s.done:
		return nil, verbs.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close ends the listener and the connections that Accept has not returned.
func (s *listener) Close() error {
	s.once.Do(func() {
		close(s.done)
		s.tcp.Close()
		s.mu.Lock()
		s.closed = true
		for e := s.reading.Front(); e != nil; e = e.Next() {
			e.Value.(*net.TCPConn).Close()
		}
		s.mu.Unlock()
	})
	s.wait.Wait()
	return nil
}
