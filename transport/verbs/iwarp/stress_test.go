package iwarp_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

// TestBothWaysAtOnce has both ends write random lengths to each other and read them back, many at a time and more than
// the sockets hold: every length must come back as it went, whatever was cut where.
func TestBothWaysAtOnce(t *testing.T) {
	const (
		slots  = 12
		size   = 128 << 10
		rounds = 200
	)
	for name, o := range map[string]iwarp.Options{"whole": {}, "cut": {MaxSegment: 1456}, "no CRC": {DisableCRC: true}} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, o, o)
			a.post(a.send(0, verbs.OpRDMAWrite, 0, 0, 0)) // from now on the responder may send
			a.expect(0, verbs.StatusOK)
			// Each end's memory: what it writes, what it reads back, what the peer writes.
			run := func(e, peer *end, seed uint64) error {
				random := rand.New(rand.NewPCG(seed, 1))
				var length [slots]int
				start := func(slot int) error {
					n := 1 + random.IntN(size)
					if random.IntN(3) == 0 {
						n = 1 + random.IntN(2000)
					}
					length[slot] = n
					fill(e.mem[slot*size:][:n], byte(random.Uint32()))
					w := e.send(uint64(slot), verbs.OpRDMAWrite, 0, slot*size, n)
					w.Flags = 0
					w.RKey, w.RemoteAddr = peer.mr.RKey(), peer.mr.RemoteAddr(peer.mem[2*slots*size+slot*size:])
					r := e.send(uint64(slot), verbs.OpRDMARead, 0, slots*size+slot*size, n)
					r.RKey, r.RemoteAddr = w.RKey, w.RemoteAddr
					_, err := e.qp.PostSend([]verbs.SendWR{*w, *r})
					return err
				}
				for slot := range slots {
					if err := start(slot); err != nil {
						return err
					}
				}
				o := owner{qp: e.qp, spins: 10}
				for done := 0; done < rounds; {
					cs, err := o.take()
					if err != nil {
						return err
					}
					for _, c := range cs {
						slot := int(c.ID)
						if c.Status != verbs.StatusOK || c.Bytes != length[slot] {
							return fmt.Errorf("%+v, want %d bytes: %w", c, length[slot], e.conn.Err())
						}
						if !bytes.Equal(e.mem[slot*size:][:c.Bytes], e.mem[slots*size+slot*size:][:c.Bytes]) {
							return errors.New("data differ")
						}
						if done++; done <= rounds-slots {
							if err := start(slot); err != nil {
								return err
							}
						}
					}
				}
				return nil
			}
			var wg sync.WaitGroup
			for i, side := range [][2]*end{{a, b}, {b, a}} {
				wg.Go(func() {
					if err := run(side[0], side[1], uint64(i)); err != nil {
						t.Error(err)
						side[0].conn.Disconnect()
					}
				})
			}
			wg.Wait()
		})
	}
}
