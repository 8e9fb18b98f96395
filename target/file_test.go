package target

import (
	"os"
	"path/filepath"
	"testing"
)

// TestLostDataStaysLost: a Flush that comes after a failed one must not succeed, though the kernel would say so.
func TestLostDataStaysLost(t *testing.T) {
	b, _, err := openFile(filepath.Join(t.TempDir(), "disk"), 4096, false)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	if err := b.sync(); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe() // what cannot be synced
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	good := b.fd
	b.fd = int(w.Fd())
	first := b.sync()
	b.fd = good
	if err := b.sync(); first == nil || err != first {
		t.Errorf("first %v, then %v", first, err)
	}
}
