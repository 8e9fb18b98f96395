package rdmacm

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"farblk/transport/verbs"
	"farblk/transport/verbs/verbstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fabricAddr is the address of an RDMA device, from FARBLK_VERBS_ADDR. Only a machine with a device can run these
// tests: scripts/vm/tests/05-verbs.sh makes one, sets the variable, and checks that none was skipped.
func fabricAddr(t testing.TB) verbs.Addr {
	s := os.Getenv("FARBLK_VERBS_ADDR")
	if s == "" {
		t.Skip("FARBLK_VERBS_ADDR is not set: no RDMA device to test with")
	}
	ip, err := netip.ParseAddr(s)
	if err != nil {
		t.Fatal(err)
	}
	return verbs.Addr{IP: ip}
}

// options tells the suite what kind of device has the address.
func options(t testing.TB) verbstest.Options {
	o := verbstest.Options{Listen: fabricAddr(t)}
	d := linkAt(t, o.Listen)
	o.Terminates = d.Link == verbs.LinkIWARP
	// siw: the kernel's connection manager drops a reject's data, and does not check the right to read.
	o.PlainReject = d.Link == verbs.LinkIWARP
	o.ReadsUnchecked = d.Link == verbs.LinkIWARP
	return o
}

func linkAt(t testing.TB, a verbs.Addr) verbs.Device {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a.Port = 1
	c, err := New(Options{}).Resolve(ctx, verbs.Route{Remote: a})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	return c.Device()
}

func TestConformance(t *testing.T) {
	verbstest.Run(t, func(*testing.T) verbs.Provider { return New(Options{}) }, options(t))
}

func BenchmarkPostAndPoll(b *testing.B) {
	verbstest.Benchmark(b, func(testing.TB) verbs.Provider { return New(Options{}) }, options(b))
}

func TestDevicesWithoutAny(t *testing.T) {
	if entries, err := os.ReadDir(sysDevices); err == nil && len(entries) > 0 {
		t.Skip("this machine has RDMA devices")
	}
	p := New(Options{})
	if _, err := p.Resolve(t.Context(), verbs.Route{Remote: addr(t, "10.0.0.1:4420")}); !errors.Is(err, verbs.ErrNoDevice) {
		t.Errorf("resolve: %v", err)
	}
	if _, err := p.Listen(t.Context(), addr(t, "127.0.0.1:0"), 0); !errors.Is(err, verbs.ErrNoDevice) {
		t.Errorf("listen: %v", err)
	}
	if p.Name() != "verbs" {
		t.Errorf("name is %q", p.Name())
	}
}

// nvmetRequest connects to an NVMe/RDMA target, FARBLK_NVMET_ADDR, as an admin queue does (NVMe over RDMA
// transport specification, RDMA_CM_REQUEST): recfmt@0, qid@2, hrqsize@4, hsqsize@6, cntlid@8, little-endian.
func nvmetRequest(t *testing.T, recfmt uint16) ([]byte, error) {
	s := os.Getenv("FARBLK_NVMET_ADDR")
	if s == "" {
		t.Skip("FARBLK_NVMET_ADDR is not set: no NVMe target to test with")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	c, err := New(Options{}).Resolve(ctx, verbs.Route{Remote: addr(t, s), TOS: 0x20, TOSSet: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	pd, err := c.NewPD()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Close()
		if err := pd.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err = c.NewQP(pd, verbs.QPConfig{SendDepth: 32, RecvDepth: 32}); err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 32)
	binary.LittleEndian.PutUint16(data[0:], recfmt)
	binary.LittleEndian.PutUint16(data[4:], 32)
	binary.LittleEndian.PutUint16(data[6:], 31)
	return c.Connect(ctx, verbs.ConnParams{PrivateData: data, ResponderResources: 16, RetryCount: 7, RNRRetryCount: 7})
}

func TestLinuxTargetAccepts(t *testing.T) {
	reply, err := nvmetRequest(t, 0)
	if err != nil {
		t.Fatal(err)
	}
	// RDMA_CM_ACCEPT: recfmt@0, crqsize@2.
	if len(reply) < 4 || binary.LittleEndian.Uint16(reply[0:]) != 0 || binary.LittleEndian.Uint16(reply[2:]) == 0 {
		t.Errorf("accept carries % x", reply)
	}
}

func TestLinuxTargetRejects(t *testing.T) {
	_, err := nvmetRequest(t, 77)
	var r *verbs.RejectError
	if !errors.As(err, &r) || !r.Consumer {
		t.Fatalf("a request of record format 77: %v", err)
	}
	// RDMA_CM_REJECT: recfmt@0, sts@2; 2 is an invalid record format. siw loses it.
	if len(r.PrivateData) >= 4 {
		if sts := binary.LittleEndian.Uint16(r.PrivateData[2:]); sts != 2 {
			t.Errorf("reject carries status %d", sts)
		}
	} else if linkAt(t, addr(t, os.Getenv("FARBLK_NVMET_ADDR"))).Link != verbs.LinkIWARP {
		t.Errorf("reject carries % x", r.PrivateData)
	}
}

func TestUnreachable(t *testing.T) {
	a := fabricAddr(t)
	p := New(Options{})
	for _, c := range []struct {
		remote string
		is     []error
	}{
		{"203.0.113.9:4420", []error{verbs.ErrUnreachable, verbs.ErrNoDevice}}, // RFC 5737: no route, or one without RDMA
		{"127.0.0.1:4420", []error{verbs.ErrNoDevice}},                         // a network device without RDMA
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		conn, err := p.Resolve(ctx, verbs.Route{Remote: addr(t, c.remote)})
		cancel()
		if conn != nil {
			_ = conn.Close()
		}
		ok := false
		for _, is := range c.is {
			ok = ok || errors.Is(err, is)
		}
		if !ok {
			t.Errorf("%s: %v", c.remote, err)
		}
	}
	// A neighbour that does not exist, on the device's own network: nothing answers there.
	b := a.IP.As4()
	b[3] = 77
	remote := verbs.Addr{IP: netip.AddrFrom4(b), Port: 4420}
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := p.Resolve(ctx, verbs.Route{Remote: remote})
	if err == nil {
		pd, e := c.NewPD()
		if e != nil {
			t.Fatal(e)
		}
		q, e := c.NewQP(pd, verbs.QPConfig{SendDepth: 4, RecvDepth: 4})
		if e != nil {
			t.Fatal(e)
		}
		_, err = c.Connect(ctx, verbs.ConnParams{ResponderResources: 1, RetryCount: 7, RNRRetryCount: 7})
		for _, f := range []func() error{q.Close, c.Close, pd.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	}
	if err == nil {
		t.Errorf("connected to %v", remote)
	}
	if d := time.Since(start); d > 8*time.Second {
		t.Errorf("%v took %v to fail: %v", remote, d, err)
	}
}

// TestDeviceByName: the route is over the named device or not at all, by the name of its network device, too.
func TestDeviceByName(t *testing.T) {
	a := fabricAddr(t)
	d := linkAt(t, a)
	for name, ok := range map[string]bool{d.Name: true, d.NetDevice: true, "no-such": false, "lo": false} {
		if name == "" {
			t.Fatalf("a name of %+v is missing", d)
		}
		c, err := New(Options{}).Resolve(t.Context(), verbs.Route{Remote: verbs.Addr{IP: a.IP, Port: 1}, Device: name})
		if err == nil {
			_ = c.Close()
		}
		if (err == nil) != ok || !ok && !errors.Is(err, verbs.ErrNoDevice) {
			t.Errorf("resolve over %q: %v", name, err)
		}
	}
}

// TestRegister registers with a low limit on locked memory, in a process that the limit binds: root's right to exceed
// it is taken away before the process starts.
func TestRegister(t *testing.T) {
	a := fabricAddr(t)
	const limited, limit = "FARBLK_TEST_LIMITED", 256 << 10
	if os.Getenv(limited) == "" {
		type outcome struct {
			out []byte
			err error
		}
		done := make(chan outcome)
		go func() {
			runtime.LockOSThread() // and never unlock: the thread ends, with what it has given up
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, capIPCLock, 0, 0, 0); err != nil {
				done <- outcome{nil, err}
				return
			}
			cmd := exec.Command(os.Args[0], "-test.run=^TestRegister$")
			cmd.Env = append(os.Environ(), limited+"=1")
			out, err := cmd.CombinedOutput()
			done <- outcome{out, err}
		}()
		if o := <-done; o.err != nil {
			t.Errorf("%v:\n%s", o.err, o.out)
		}
		return
	}
	c, err := New(Options{}).Resolve(t.Context(), verbs.Route{Remote: verbs.Addr{IP: a.IP, Port: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	pd, err := c.NewPD()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := pd.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	var locked *verbs.MemlockError
	if _, err := pd.Register(b, verbs.LocalWrite); !errors.As(err, &locked) || locked.Need < 1<<20 || locked.Limit != limit {
		t.Errorf("1 MiB with a limit of %d KiB: %v", limit>>10, err)
	}
	if _, err := pd.Register(nil, verbs.LocalWrite); err == nil {
		t.Error("no bytes registered")
	}
	if _, err := pd.NewWindow(); !errors.Is(err, verbs.ErrUnsupported) {
		t.Errorf("window: %v", err)
	}
	mr, err := pd.Register(b[:limit/2], verbs.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if err := mr.Close(); err != nil {
		t.Error(err)
	}
}

// TestCaseH32NothingLeaks opens and closes connections and counts descriptors. An event that is not acknowledged would
// keep Close from ending.
func TestCaseH32NothingLeaks(t *testing.T) {
	a := fabricAddr(t)
	p := New(Options{})
	cycle := func() {
		l, err := p.Listen(t.Context(), a, 0)
		if err != nil {
			t.Fatal(err)
		}
		c, err := p.Resolve(t.Context(), verbs.Route{Remote: l.Addr()})
		if err != nil {
			t.Fatal(err)
		}
		pd, err := c.NewPD()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.NewQP(pd, verbs.QPConfig{SendDepth: 4, RecvDepth: 4}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.NewQP(pd, verbs.QPConfig{SendDepth: 4, RecvDepth: 4}); !errors.Is(err, errTwice) {
			t.Errorf("second queue pair: %v", err)
		}
		for _, f := range []func() error{c.Close, pd.Close, l.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	}
	cycle() // the libraries open the device once
	before := descriptors(t)
	for range 10 {
		cycle()
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
