package nvme

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// golden reads a capture; testdata/nvme/README.md says where each is from.
func golden(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "testdata", "nvme", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sameAsNVMeCLI compares a struct's fields with nvme-cli's decoding, whose keys
// are the specification's names in lower case. It returns how many agree.
func sameAsNVMeCLI(t *testing.T, v any, jsonFile string) (matched int) {
	t.Helper()
	var want map[string]any
	if err := json.Unmarshal(golden(t, jsonFile), &want); err != nil {
		t.Fatal(err)
	}
	s := reflect.ValueOf(v).Elem()
	for i := range s.NumField() {
		name := strings.ToLower(s.Type().Field(i).Name)
		w, ok := want[name]
		if !ok {
			continue
		}
		f := s.Field(i)
		var got string
		switch {
		case f.Kind() == reflect.String:
			got = f.String()
		case f.CanUint():
			got = fmt.Sprint(f.Uint())
		case f.Type() == reflect.TypeFor[Uint128]():
			got = f.Interface().(Uint128).String()
		case name == "nguid", name == "eui64":
			got = fmt.Sprint(f.Interface())
		default:
			continue
		}
		if n, ok := w.(float64); ok {
			w = fmt.Sprint(uint64(n))
		}
		if w := strings.TrimRight(w.(string), " "); got != w {
			t.Errorf("%s: %q, nvme-cli says %q", name, got, w)
		}
		matched++
	}
	return matched
}

func TestGoldenIdentifyController(t *testing.T) {
	c, err := ParseIdentifyController(golden(t, "id-ctrl.bin"))
	if err != nil {
		t.Fatal(err)
	}
	if n := sameAsNVMeCLI(t, c, "id-ctrl.json"); n < 70 {
		t.Errorf("only %d fields compared", n)
	}
	if c.InCapsuleBytes() != 16384 || c.MaxTransfer(4096) != 0 || !c.SupportsSGL() || !c.SupportsANA() || !c.VolatileWriteCache() ||
		c.VER.String() != "1.3" || c.PSD[0].MP != 2500 {
		t.Errorf("%+v", c)
	}
}

func TestGoldenIdentifyNamespace(t *testing.T) {
	n, err := ParseIdentifyNamespace(golden(t, "id-ns.bin"))
	if err != nil {
		t.Fatal(err)
	}
	if got := sameAsNVMeCLI(t, n, "id-ns.json"); got < 30 {
		t.Errorf("only %d fields compared", got)
	}
	if b, ok := n.Bytes(); !ok || b != 32768*512 {
		t.Errorf("%d bytes", b)
	}
}

func TestGoldenNamespaceIDs(t *testing.T) {
	got, err := ParseNamespaceIDs(golden(t, "ns-descs.bin"))
	if err != nil {
		t.Fatal(err)
	}
	u, _ := ParseUUID("15085744-c299-4113-b82a-58b763046d6e")
	if diff := cmp.Diff(NamespaceIDs{UUID: u, HasCSI: true}, got); diff != "" {
		t.Error(diff)
	}
}

func TestGoldenANALog(t *testing.T) {
	got, err := ParseANALog(golden(t, "ana.bin"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(ANALog{Groups: []ANAGroup{{ID: 1, State: ANAOptimized, NSIDs: []uint32{1}}}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestGoldenDiscoveryLog(t *testing.T) {
	b := golden(t, "discover.bin")
	h, err := ParseDiscoveryHeader(b)
	if err != nil || h != (DiscoveryHeader{Generation: 2, Records: 2}) {
		t.Errorf("%+v, %v", h, err)
	}
	e, err := ParseDiscoveryEntry(b[DiscoveryHeaderSize:])
	if err != nil {
		t.Fatal(err)
	}
	want := DiscoveryEntry{
		TransportType: TransportTCP, AddressFamily: FamilyIPv4, SubType: SubsystemDiscovery,
		Requirements: 4, PortID: 1, CNTLID: AnyController, AdminSQSize: 32,
		ServiceID: "4420", SubNQN: DiscoveryNQN, Address: "10.9.2.1",
	}
	if diff := cmp.Diff(want, e); diff != "" {
		t.Error(diff)
	}
}
