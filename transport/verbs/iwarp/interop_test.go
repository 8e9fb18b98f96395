//go:build interop

// Tests against Linux's own iWARP (siw), its NVMe target and its NVMe host, for a machine that has them:
//
//	FARBLK_NVMET_ADDR  address and port of a Linux NVMe target on siw
//	FARBLK_NVMET_NQN   its subsystem
//	FARBLK_SIW_ADDR    a local address that siw can connect to
//	FARBLK_CAPTURE     a folder for the bytes that went over the wire; see testdata/iwarp
package iwarp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"farblk/transport/verbs"
	"farblk/transport/verbs/iwarp"
)

func env(t *testing.T, name string) string {
	v := os.Getenv(name)
	if v == "" {
		t.Fatalf("%s is not set", name)
	}
	return v
}

// proxy relays TCP connections to a fixed address and records each. It stops with the test.
func proxy(t *testing.T, at, to, name string) netip.AddrPort {
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", to)
			if err != nil {
				t.Error(err)
				a.Close()
				return
			}
			r := &recorder{}
			var pair sync.WaitGroup
			pair.Go(func() { r.relay(a, b, '>') })
			pair.Go(func() { r.relay(b, a, '<') })
			n := fmt.Sprintf("%s-%d.txt", name, i)
			wg.Go(func() {
				pair.Wait()
				if dir := os.Getenv("FARBLK_CAPTURE"); dir != "" {
					if err := os.WriteFile(filepath.Join(dir, n), r.log.Bytes(), 0o644); err != nil {
						t.Error(err)
					}
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

type recorder struct {
	mu  sync.Mutex
	log bytes.Buffer
}

func (r *recorder) relay(from, to net.Conn, mark byte) {
	b := make([]byte, 1<<16)
	for {
		n, err := from.Read(b)
		if n > 0 {
			r.mu.Lock()
			fmt.Fprintf(&r.log, "%c %s\n", mark, hex.EncodeToString(b[:n]))
			r.mu.Unlock()
			if _, err := to.Write(b[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	to.(*net.TCPConn).CloseWrite()
}

// Layout of the ends' memory.
const (
	capsuleAt = 0
	replyAt   = 4096
	dataAt    = 8192
)

func capsule(b []byte, op byte, id uint16, e *end, length int) {
	clear(b[:64])
	b[0], b[1] = op, 0x40
	binary.LittleEndian.PutUint16(b[2:], id)
	if length > 0 {
		binary.LittleEndian.PutUint64(b[24:], e.mr.RemoteAddr(e.mem[dataAt:]))
		b[32], b[33], b[34] = byte(length), byte(length>>8), byte(length>>16)
		binary.LittleEndian.PutUint32(b[35:], e.mr.RKey())
	}
	b[39] = 0x40
}

// command sends the capsule and returns the response.
func (e *end) command(id uint16) []byte {
	e.t.Helper()
	e.recv(uint64(id)<<1, replyAt, 4096)
	e.post(e.send(uint64(id)<<1|1, verbs.OpSend, 0, capsuleAt, 64))
	for range 2 {
		if c := e.next(); c.Status != verbs.StatusOK {
			e.t.Fatalf("command %d: %v %v: %v", id, c.Op, c.Status, e.conn.Err())
		}
	}
	r := e.mem[replyAt : replyAt+16]
	if got := binary.LittleEndian.Uint16(r[12:]); got != id {
		e.t.Fatalf("response to command %d, sent %d", got, id)
	}
	if s := binary.LittleEndian.Uint16(r[14:]) >> 1; s != 0 {
		e.t.Fatalf("command %d: status %#x", id, s)
	}
	return r
}

func TestLinuxTarget(t *testing.T) {
	for name, o := range map[string]iwarp.Options{
		"crc": {}, "nocrc": {DisableCRC: true}, "mpa1": {MPARevision: 1}, "p2p": {PeerToPeer: true},
	} {
		t.Run(name, func(t *testing.T) {
			at := proxy(t, "127.0.0.1:0", env(t, "FARBLK_NVMET_ADDR"), "linux-target-"+name)
			ctx := testContext(t)
			c, err := iwarp.New(o).Resolve(ctx, verbs.Route{Remote: verbs.Addr{IP: at.Addr(), Port: at.Port()}})
			if err != nil {
				t.Fatal(err)
			}
			e := newEnd(t, c)
			private := make([]byte, 32)
			binary.LittleEndian.PutUint16(private[4:], 32) // hrqsize
			binary.LittleEndian.PutUint16(private[6:], 31) // hsqsize
			got, err := c.Connect(ctx, verbs.ConnParams{PrivateData: private, ResponderResources: 16})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("accept's private data: %x", got)
			if o.MPARevision == 1 {
				return // Linux then takes the host's IRD for 0, and cannot read the Connect data
			}

			data := e.mem[dataAt:]
			copy(data, "0123456789abcdef")
			binary.LittleEndian.PutUint16(data[16:], 0xffff)
			copy(data[256:], env(t, "FARBLK_NVMET_NQN"))
			copy(data[512:], "nqn.2014-08.org.nvmexpress:uuid:30313233-3435-3637-3839-616263646566")
			b := e.mem[capsuleAt:]
			capsule(b, 0x7f, 1, e, 1024)
			b[4] = 1
			binary.LittleEndian.PutUint16(b[44:], 31)
			e.command(1)

			capsule(b, 0x7f, 2, e, 0) // Property Set, CC
			b[4], b[44] = 0, 0x14
			binary.LittleEndian.PutUint64(b[48:], 0x460001)
			e.command(2)

			clear(data[:4096])
			capsule(b, 0x06, 3, e, 4096) // Identify Controller
			b[40] = 1
			e.command(3)
			if nqn := bytes.TrimRight(data[768:1024], "\x00"); string(nqn) != env(t, "FARBLK_NVMET_NQN") {
				t.Fatalf("subsystem %q", nqn)
			}
			if err := c.Disconnect(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestLinuxHost lets the kernel's host connect, and serves it as far as Identify.
func TestLinuxHost(t *testing.T) {
	for name, o := range map[string]iwarp.Options{"crc": {}, "nocrc": {DisableCRC: true}} {
		t.Run(name, func(t *testing.T) {
			ip := env(t, "FARBLK_SIW_ADDR")
			l := listen(t, iwarp.New(o), "127.0.0.1")
			at := proxy(t, ip+":0", l.Addr().String(), "linux-host-"+name)
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			var out bytes.Buffer
			cmd := exec.CommandContext(ctx, "nvme", "connect", "-t", "rdma", "-a", ip, "-s", fmt.Sprint(at.Port()), "-n", "nqn.test", "-i", "1")
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cmd.Wait(); t.Logf("nvme connect: %s", out.Bytes()) }()
			c, err := l.Accept(ctx)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("request's private data: %x, %+v", c.PrivateData(), c.PeerParams())
			e := newEnd(t, c)
			for i := range uint64(32) {
				e.recv(i, int(i)*4096, 4096)
			}
			private := []byte{0, 0, 32, 0, 31: 0}
			if err := c.Accept(ctx, verbs.ConnParams{PrivateData: private, InitiatorDepth: 16}); err != nil {
				t.Fatal(err)
			}
			const sendAt, bulkAt = 1 << 20, 2 << 20
			seen := map[string]bool{}
			for !seen["identify"] {
				m := e.next()
				if m.Status != verbs.StatusOK {
					t.Fatalf("%v %v: %v", m.Op, m.Status, c.Err())
				}
				if m.Op != verbs.OpRecv {
					continue
				}
				b := append([]byte(nil), e.mem[m.ID*4096:][:64]...)
				e.recv(m.ID, int(m.ID)*4096, 4096)
				remote := func(w *verbs.SendWR) *verbs.SendWR {
					w.RemoteAddr, w.RKey = binary.LittleEndian.Uint64(b[24:]), binary.LittleEndian.Uint32(b[35:])
					return w
				}
				reply := e.mem[sendAt:][:16]
				clear(reply)
				copy(reply[12:], b[2:4])
				answer := e.send(100, verbs.OpSend, 0, sendAt, 16)
				if b[39] == 0x4f {
					answer.Op, answer.RKey = verbs.OpSendInvalidate, binary.LittleEndian.Uint32(b[35:])
				}
				switch {
				case b[0] == 0x7f && b[4] == 1:
					e.post(remote(e.send(101, verbs.OpRDMARead, 0, bulkAt, 1024)))
					e.expect(101, verbs.StatusOK)
					if nqn := bytes.TrimRight(e.mem[bulkAt+256:][:256], "\x00"); string(nqn) != "nqn.test" {
						t.Fatalf("connect data for %q", nqn)
					}
					reply[0] = 1
					seen["connect"] = true
				case b[0] == 0x7f && b[4] == 4 && b[44] == 0: // CAP
					binary.LittleEndian.PutUint64(reply, 127|1<<16|1<<37|10<<24)
				case b[0] == 0x7f && b[4] == 4 && b[44] == 8: // VS
					binary.LittleEndian.PutUint64(reply, 0x10300)
				case b[0] == 0x7f && b[4] == 4: // CSTS
					reply[0] = 1
				case b[0] == 0x06:
					e.post(remote(e.send(102, verbs.OpRDMAWrite, 0, bulkAt, 4096)), answer)
					seen["identify"] = true
					continue
				}
				e.post(answer)
			}
			e.expect(102, verbs.StatusOK)
			<-c.Disconnected() // the host does not like what it identified
			t.Logf("ended: %v", c.Err())
		})
	}
}
