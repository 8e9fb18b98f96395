package host

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/transport"
)

// failAt connects to a target with which, at that step, something goes wrong; steps are dials, queues opened and
// commands. It says whether the step came. Whatever happens, nothing may be left: goroutines are noticed by the
// bubble, buffers by the host's log, requests that are used again too soon by the fake and the race detector.
func failAt(t *testing.T, how string, step int, namespaces int) (came bool) {
	inTime(t, func(t *testing.T) {
		ft := newFakeTarget(slices.Repeat([]int{1 << 20}, namespaces)...)
		var log bytes.Buffer
		cfg := testConfig(ft)
		cfg.AdminTimeout, cfg.PoolSize = 3*time.Second, 1<<20
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		ctx, cancel := context.WithCancel(bg)
		defer cancel()
		var at atomic.Int32
		reached := func() bool { return int(at.Add(1)) == step }
		ft.onDial = func(context.Context) error {
			if reached() {
				return errCut
			}
			return nil
		}
		ft.onOpen = func(context.Context, transport.QueueParams) error {
			if reached() {
				return errCut
			}
			return nil
		}
		ft.intercept = func(q *fakeQueue, r *transport.Request) bool {
			if (*nvme.Command)(&r.Command).Opcode() == nvme.AdminKeepAlive || !reached() {
				return false
			}
			switch how {
			case "lost":
				q.Fail(errCut)
			case "error":
				answer(q, r, 0, nvme.StatusInternalError)
			case "late": // answered at the moment when it is given up
				q.performLater(r, cfg.AdminTimeout)
			case "cancel":
				cancel()
			} // and "silent" is for ever
			return true
		}
		c, err := Connect(ctx, cfg)
		if err == nil {
			if err := c.Shutdown(bg); err != nil {
				t.Error(err)
			}
		} else if how == "cancel" && ctx.Err() != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if s := log.String(); strings.Contains(s, "buffers have not come back") {
			t.Errorf("%s at step %d: %s", how, step, s)
		}
		came = int(at.Load()) >= step
	})
	return came
}

// A connect fails 1,000 times, at each step and then at any, in five ways.
func TestCaseH39EachStepFails(t *testing.T) {
	for i, how := range []string{"lost", "silent", "error", "late", "cancel"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			steps, random := 0, rand.New(rand.NewPCG(39, uint64(i)))
			for failAt(t, how, steps+1, 2) {
				if steps++; steps > 100 {
					t.Fatal("never connects")
				}
			}
			if steps < 15 {
				t.Error("only", steps, "steps")
			}
			for range 200 - steps {
				failAt(t, how, 1+random.IntN(steps), 2+random.IntN(2))
			}
		})
	}
}
