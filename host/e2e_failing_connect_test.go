package host_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"farblk/host"
	"farblk/target"
	"farblk/transport"
)

// stepDialer calls reached after each step of a connect, with the queue of a command that is under way: dials, queues
// opened, commands.
type stepDialer struct {
	transport.Dialer
	reached func(q transport.Queue)
}

type stepAssociation struct {
	transport.Association
	d *stepDialer
}

type stepQueue struct {
	transport.Queue
	d *stepDialer
}

func (d *stepDialer) Dial(ctx context.Context, a transport.Address, mem []byte) (transport.Association, error) {
	f, err := d.Dialer.Dial(ctx, a, mem)
	d.reached(nil)
	return stepAssociation{f, d}, err
}

func (a stepAssociation) OpenQueue(ctx context.Context, p transport.QueueParams) (transport.Queue, error) {
	q, err := a.Association.OpenQueue(ctx, p)
	if err != nil {
		return nil, err
	}
	a.d.reached(q)
	return stepQueue{q, a.d}, nil
}

func (q stepQueue) Submit(r *transport.Request) error {
	err := q.Queue.Submit(r)
	q.d.reached(q.Queue)
	return err
}

// TestCaseH39EachStepFails with real queues and memory: what is freed too soon crashes.
func TestCaseH39EndToEnd(t *testing.T) {
	b := newBed(t, target.Config{}, target.NamespaceConfig{Size: 1 << 20})
	random := rand.New(rand.NewPCG(39, 0))
	errCut := errors.New("cut")
	failed := 0
	for round := range 150 {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		var at atomic.Int32
		var log bytes.Buffer
		step := 1 + random.Int32N(20)
		cfg := b.config()
		cfg.PoolSize, cfg.Logger = 1<<20, slog.New(slog.NewTextHandler(&log, nil))
		cfg.Dialer = &stepDialer{cfg.Dialer, func(q transport.Queue) {
			switch {
			case at.Add(1) != step:
			case round%3 == 0:
				cancel()
			case round%3 == 1 && q != nil:
				q.Fail(errCut)
			default:
				b.DropConnections()
			}
		}}
		c, err := host.Connect(ctx, cfg)
		if err == nil {
			err = c.Shutdown(context.Background())
		} else {
			failed++
		}
		if ctx.Err() == context.DeadlineExceeded || strings.Contains(log.String(), "buffers have not come back") {
			t.Fatalf("round %d, step %d: %v\n%s", round, step, err, &log)
		}
		cancel()
	}
	if failed < 100 {
		t.Error("only", failed, "of 150 failed")
	}
}
