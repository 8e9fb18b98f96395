package target_test

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"farblk/host/nvme"
	"farblk/target"
)

// edge returns a number such as an attacker would try.
func edge(r *rand.Rand) uint64 {
	edges := []uint64{
		0, 1, 2, 3, 7, 8, 63, 64, 511, 512, 1024, 4095, 4096, 8191, 8192, 1<<14 - 1, 1 << 14, math.MaxUint16, 1 << 20,
		1<<24 - 1, math.MaxInt32, 1 << 31, math.MaxUint32, 1 << 40, math.MaxInt64 - 511, math.MaxInt64, 1 << 63, math.MaxUint64 - 4095, math.MaxUint64,
	}
	if r.IntN(8) == 0 {
		return r.Uint64()
	}
	return edges[r.IntN(len(edges))]
}

// hostile makes up a command for a queue.
func hostile(r *rand.Rand, q *client) (cmd nvme.Command, inline []byte) {
	admin := []nvme.Opcode{
		nvme.AdminGetLogPage, nvme.AdminIdentify, nvme.AdminAbort, nvme.AdminSetFeatures, nvme.AdminGetFeatures,
		nvme.AdminAsyncEvent, nvme.AdminKeepAlive, nvme.OpcodeFabrics,
	}
	io := []nvme.Opcode{nvme.IOFlush, nvme.IOWrite, nvme.IORead, nvme.IOWriteZeroes, nvme.IODatasetManagement, nvme.OpcodeFabrics}
	ops := io
	if q.qid == 0 {
		ops = admin
	}
	for n := 4; n < 64; n += 4 {
		if r.IntN(2) == 0 {
			binary.LittleEndian.PutUint32(cmd[n:], uint32(edge(r)))
		}
	}
	cmd.SetOpcode(ops[r.IntN(len(ops))])
	cmd.SetFlags(0x40)
	if r.IntN(50) == 0 {
		cmd.SetOpcode(nvme.Opcode(r.Uint32()))
		cmd.SetFlags(uint8(r.Uint32()))
	}
	cmd.SetNSID([]uint32{0, 1, 1, 1, 2, 3, 1024, 1025, nvme.AllNamespaces}[r.IntN(9)])
	switch cmd.Opcode() {
	case nvme.OpcodeFabrics:
		cmd[4] = byte(r.IntN(9)) // the type
	case nvme.IOFlush, nvme.AdminAsyncEvent, nvme.AdminKeepAlive:
	default:
		if r.IntN(3) > 0 { // a range that is there
			binary.LittleEndian.PutUint64(cmd[40:], uint64(r.IntN(2048)))
			binary.LittleEndian.PutUint32(cmd[48:], uint32(r.IntN(64)))
		}
	}
	// The key is good, so that what is wrong is the target's to find, and the connection stays.
	_, sgl := q.data(0, 1<<20)
	switch r.IntN(4) {
	case 0:
		sgl = nvme.SGL{Type: nvme.SGLOffset, Address: edge(r) * uint64(r.IntN(2)), Length: uint32(edge(r))}
		inline = make([]byte, 512*r.IntN(17))
		if q.qid == 0 {
			inline = nil
		}
	case 1:
		sgl.Length = uint32(edge(r)) & (1<<24 - 1)
	case 2:
		sgl.Length = cmd.Blocks() * 512
	default:
		sgl.Type = nvme.SGLType(r.Uint32())
	}
	cmd.SetSGL(sgl)
	return cmd, inline
}

// TestHostileCommands sends commands made up of edges, several at once, on every kind of namespace, while namespaces come
// and go. The target must answer each or end the connection, and serve others all the while.
func TestHostileCommands(t *testing.T) {
	for name, store := range stores {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, target.Config{QueueDepth: 16}, store.wrap...)
			s := b.subsystem(store.config(t), store.config(t))
			good := connectHost(t, b.addr, subNQN, 1, 16, 0)
			r := rand.New(rand.NewPCG(1, 2))
			connections := 0
			for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); connections++ {
				h := connectHost(t, b.addr, subNQN, 1, 16, 0)
				q := []*client{h.admin, h.io[0]}[connections%2]
				for range 20 {
					var ids []uint16
					for range 6 {
						cmd, inline := hostile(r, q)
						if cmd.Opcode() != nvme.AdminAsyncEvent || q.qid != 0 {
							ids = append(ids, q.send(cmd, inline))
						} else {
							q.send(cmd, inline)
						}
					}
					var lost error
					for _, id := range ids {
						if _, lost = q.await(id); lost != nil {
							break
						}
					}
					if errors.Is(lost, errLost) {
						break
					} else if lost != nil {
						t.Fatal(lost)
					}
				}
				h.admin.close()
				h.io[0].close()
				if err := s.RemoveNamespace(2); err != nil {
					t.Fatal(err)
				}
				if _, err := s.AddNamespace(store.config(t)); err != nil {
					t.Fatal(err)
				}
				if _, err := good.io[0].read(1, 0, 4096); err != nil {
					t.Fatalf("another host: %v", err)
				}
			}
			t.Logf("%d connections", connections)
		})
	}
}
