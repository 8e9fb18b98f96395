package nbd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"farblk/blockdev"
)

// The tests of this file run other people's NBD clients against the server.

// program skips the test where a program is missing, unless the machine is to have it.
func program(t *testing.T, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		if os.Getenv("CI") == "true" || os.Getenv("FARBLK_REQUIRE_TOOLS") == "1" {
			t.Fatalf("%s is missing: run scripts/setup test", name)
		}
		t.Skipf("%s is missing", name)
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	program(t, name)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	return command(t, ctx, name, args...)
}

// sample makes a file of n bytes with content and holes.
func sample(t *testing.T, n int) string {
	t.Helper()
	b := make([]byte, n)
	for off := 0; off < n; off += 256 << 10 {
		fillRandom(b[off : off+min(8<<10, n-off)])
	}
	path := filepath.Join(t.TempDir(), "sample")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// uris serves d on a Unix and on a TCP socket.
func uris(t *testing.T, d blockdev.Device) map[string]string {
	t.Helper()
	s, path := serve(t, Config{}, Export{Name: "n1", Description: "one", Device: d})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		l.Close()
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Serve: %v", err)
		}
	})
	return map[string]string{"unix": "nbd+unix:///n1?socket=" + path, "tcp": "nbd://" + l.Addr().String() + "/n1"}
}

func TestNBDInfo(t *testing.T) {
	d := memory(t, blockdev.MemoryConfig{Size: 64 << 20, BlockSize: 4096})
	for _, uri := range uris(t, d) {
		var got struct {
			Protocol   string
			Structured bool
			Exports    []struct {
				Name       string `json:"export-name"`
				Size       int64  `json:"export-size"`
				Contexts   []string
				Minimum    int  `json:"block_size_minimum"`
				Maximum    int  `json:"block_size_maximum"`
				CanFUA     bool `json:"can_fua"`
				MultiConn  bool `json:"can_multi_conn"`
				IsReadOnly bool `json:"is_read_only"`
			}
		}
		if err := json.Unmarshal([]byte(run(t, "nbdinfo", "--json", uri)), &got); err != nil {
			t.Fatal(err)
		}
		if got.Protocol != "newstyle-fixed" || !got.Structured || len(got.Exports) != 1 {
			t.Fatalf("%+v", got)
		}
		if e := got.Exports[0]; e.Name != "n1" || e.Size != 64<<20 || e.Minimum != 4096 || e.Maximum != 8<<20 || !e.CanFUA ||
			!e.MultiConn || e.IsReadOnly || len(e.Contexts) != 1 || e.Contexts[0] != contextBase {
			t.Errorf("%+v", e)
		}
		for _, can := range []string{"flush", "fua", "trim", "zero", "fast-zero", "multi-conn", "df", "cache", "structured-reply"} {
			run(t, "nbdinfo", "--can", can, uri)
		}
		if m := run(t, "nbdinfo", "--map", uri); !strings.Contains(m, "67108864") || !strings.Contains(m, "data") {
			t.Errorf("map: %s", m)
		}
		if l := run(t, "nbdinfo", "--list", uri); !strings.Contains(l, `export="n1"`) {
			t.Errorf("list: %s", l)
		}
	}
}

func TestNBDCopy(t *testing.T) {
	const size = 40 << 20
	file := sample(t, size)
	for kind, uri := range uris(t, memory(t, blockdev.MemoryConfig{Size: size, Queues: 2, Latency: 10 * time.Microsecond})) {
		run(t, "nbdcopy", "--flush", "--connections=3", file, uri)
		back := filepath.Join(t.TempDir(), "back")
		run(t, "nbdcopy", "--request-size=1048576", uri, back)
		run(t, "cmp", file, back)
		t.Log(kind)
	}
}

func TestQEMU(t *testing.T) {
	const size = 40 << 20
	file := sample(t, size)
	for _, block := range []int{512, 4096} {
		d := memory(t, blockdev.MemoryConfig{Size: size, BlockSize: block, Queues: 2})
		for _, uri := range uris(t, d) {
			run(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "16", file, uri)
			if out := run(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", file, uri); !strings.Contains(out, "identical") {
				t.Error(out)
			}
			if out := run(t, "qemu-img", "map", "--output=json", "-f", "raw", uri); !strings.Contains(out, `"length": 41943040`) {
				t.Error(out)
			}
			before := d.Count(blockdev.Flush)
			out := run(t, "qemu-io", "-f", "raw", "-t", "writeback", "-c", "write -P 0x5a 1M 9M", "-c", "write -z 2M 3M", "-c", "discard 6M 1M",
				"-c", "write -f -P 0x77 7000 100", "-c", "flush", "-c", "read -P 0x5a 1M 1M", "-c", "read -P 0 2M 3M", "-c", "read -P 0x77 7000 100", uri)
			if strings.Contains(out, "fail") || strings.Contains(out, "Pattern") {
				t.Error(out)
			}
			if d.Count(blockdev.Flush) == before {
				t.Error("flush did not reach the device")
			}
		}
	}
}

// TestCaseE12Trim discards as much as one command can say, and does not touch the block behind it.
func TestCaseE12Trim(t *testing.T) {
	const size = 10 << 40
	const most = 1<<32 - 4096
	d := memory(t, blockdev.MemoryConfig{Size: size, BlockSize: 4096})
	_, path := serve(t, Config{}, Export{Name: "n1", Device: d})
	c := dial(t, path)
	c.open("n1", false)
	mark := bytes.Repeat([]byte{7}, 4096)
	for _, off := range []uint64{size - most - 4096, size - 8192, size - 4096} {
		c.write(off, mark, 0)
	}
	for _, command := range []uint16{cmdTrim, cmdWriteZeroes} {
		if e := c.errno(request{command: command, offset: size - most - 4096, length: most}, nil); e != 0 {
			t.Errorf("command %d: error %d", command, e)
		}
	}
	if b := c.read(size-8192, 8192); !bytes.Equal(b[:4096], make([]byte, 4096)) || !bytes.Equal(b[4096:], mark) {
		t.Error("the end of the range is not where it should be")
	}
	run(t, "qemu-io", "-f", "raw", "-c", "write -P 1 10995116273664 4096", "-c", "discard 0 1G", "-c", "read -P 1 10995116273664 4096", "nbd+unix:///?socket="+path)
}

func TestFio(t *testing.T) {
	program(t, "fio")
	if out := run(t, "fio", "--enghelp"); !strings.Contains(out, "\tnbd") {
		t.Skip("fio has no nbd engine here")
	}
	for _, block := range []string{"512", "4096"} {
		size := blockdev.MemoryConfig{Size: 32 << 20, BlockSize: 512, Queues: 2, PoolSize: 4 << 20}
		if block == "4096" {
			size.BlockSize, size.Latency = 4096, 20*time.Microsecond
		}
		for _, uri := range uris(t, memory(t, size)) {
			run(t, "fio", "--name=v", "--ioengine=nbd", "--uri="+uri, "--rw=randwrite", "--bsrange="+block+"-1m", "--blockalign="+block, "--size=32m",
				"--iodepth=32", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--minimal", "--output=/dev/null")
		}
	}
}

// TestNBDKit puts nbdkit, with a filter that cuts requests, between qemu and the server.
func TestNBDKit(t *testing.T) {
	program(t, "nbdkit")
	const size = 16 << 20
	file := sample(t, size)
	uri := uris(t, memory(t, blockdev.MemoryConfig{Size: size}))["unix"]
	run(t, "nbdkit", "--filter=blocksize", "-U", "-", "nbd", "uri="+uri, "maxdata=65536", "--run", "nbdcopy --flush "+file+` "$uri" && nbdcopy "$uri" - | cmp - `+file)
}
