package nbd

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"farblk/blockdev"
)

// BenchmarkServer has one connection keep depth requests under way, on a device that does nothing at all.
func BenchmarkServer(b *testing.B) {
	for _, c := range []struct {
		name    string
		command uint16
		size    uint32
		depth   int
	}{
		{"read 4k", cmdRead, 4096, 1},
		{"read 4k", cmdRead, 4096, 32},
		{"write 4k", cmdWrite, 4096, 32},
		{"read 128k", cmdRead, 128 << 10, 8},
		{"write 128k", cmdWrite, 128 << 10, 8},
	} {
		b.Run(fmt.Sprintf("%s depth %d", c.name, c.depth), func(b *testing.B) {
			d := memory(b, blockdev.MemoryConfig{Size: 1 << 30, Null: true, Latency: -1})
			_, path := serve(b, Config{}, Export{Name: "n1", Device: d})
			cl := dial(b, path)
			cl.open("n1", false)
			sendSize, receiveSize := requestSize, simpleSize
			if c.command == cmdWrite {
				sendSize += int(c.size)
			} else {
				receiveSize += int(c.size)
			}
			out, in := make([]byte, 0, c.depth*sendSize), make([]byte, c.depth*receiveSize)
			for i := range c.depth {
				out = append(appendRequest(out, request{command: c.command, offset: uint64(i) * uint64(c.size), length: c.size}), make([]byte, sendSize-requestSize)...)
			}
			if err := cl.sock.SetDeadline(time.Time{}); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			b.ResetTimer()
			go sendRounds(cl.sock, out, c.depth, b.N)
			for left := b.N; left > 0; left -= c.depth {
				if _, err := io.ReadFull(cl.sock, in[:min(left, c.depth)*receiveSize]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// sendRounds sends n requests, which lie one after the other in batch, as fast as the server takes them.
func sendRounds(sock net.Conn, batch []byte, depth, n int) {
	one := len(batch) / depth
	for ; n > 0; n -= depth {
		if _, err := sock.Write(batch[:min(n, depth)*one]); err != nil {
			return
		}
	}
}
