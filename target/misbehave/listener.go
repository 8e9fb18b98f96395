package misbehave

import (
	"context"
	"errors"
	"sync"
	"time"

	"farblk/host/nvme"
	"farblk/transport/verbs"
)

// Wrap returns a listener whose connections misbehave as the script says.
func Wrap(l verbs.Listener, s *Script) verbs.Listener { return &listener{l, s} }

type listener struct {
	verbs.Listener
	script *Script
}

// Accept returns the next connection that no rule turns down.
func (l *listener) Accept(ctx context.Context) (verbs.Conn, error) {
	for {
		inner, err := l.Listener.Accept(ctx)
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: inner, script: l.script, closed: make(chan struct{})}
		if req, err := nvme.ParseCMRequest(inner.PrivateData()); err == nil {
			c.qid = req.QID
		}
		if !c.turnedDown(l.script.request(c.qid)) {
			return c, nil
		}
	}
}

// conn is a connection whose queue pair misbehaves.
type conn struct {
	verbs.Conn
	script *Script
	qid    uint16
	qp     *qp
	delay  time.Duration
	ignore bool
	closed chan struct{}
	once   sync.Once
}

// turnedDown carries out the actions on a connection request.
func (c *conn) turnedDown(actions []action) bool {
	for _, a := range actions {
		switch a.verb {
		case "reject":
			_ = c.Conn.Reject(nvme.RejectReason(a.n).Append(nil)) // the peer may have gone
			c.Conn.Close()
			return true
		case "close":
			c.Conn.Close()
			return true
		case "delay":
			c.delay = a.d
		case "ignore":
			c.ignore = true
		}
	}
	return false
}

// Accept is the connection's, late or never.
func (c *conn) Accept(ctx context.Context, p verbs.ConnParams) error {
	var timeout <-chan time.Time
	if !c.ignore {
		t := time.NewTimer(c.delay)
		defer t.Stop()
		timeout = t.C
	}
	select {
	case <-timeout:
		return c.Conn.Accept(ctx, p)
	case <-ctx.Done():
		return ctx.Err()
	case <-c.closed:
		return verbs.ErrClosed
	}
}

// NewQP makes a queue pair with room for what the script adds.
func (c *conn) NewQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	if c.qp != nil {
		return nil, errors.New("a connection has one queue pair")
	}
	depth := cfg.SendDepth
	cfg.SendDepth = 2*depth + 64
	if m := c.Conn.Device().MaxQPDepth; m > 0 {
		cfg.SendDepth = min(cfg.SendDepth, m)
	}
	inner, err := c.Conn.NewQP(pd, cfg)
	if err != nil {
		return nil, err
	}
	c.qp = newQP(c, inner, pd)
	return c.qp, nil
}

// Close is the connection's; it also ends what the script still holds.
func (c *conn) Close() error {
	if c.qp != nil {
		c.qp.stop()
	}
	c.once.Do(func() { close(c.closed) })
	err := c.Conn.Close()
	if c.qp != nil {
		c.qp.free()
	}
	return err
}
