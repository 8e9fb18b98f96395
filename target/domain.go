package target

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"farblk/transport/verbs"

	"golang.org/x/sys/unix"
)

// domain is the protection domain that all queues over one device share, with
// the registrations of the namespaces' memory.
type domain struct {
	pd verbs.PD
	// hardware says that the device itself fetches memory. It holds on to pages,
	// which must not be given back, and computes checksums of what it fetched.
	// Software computes them of memory that must then not change until it is sent.
	hardware bool
	// inPlace says that RDMA READs may fill the namespaces' memory itself. Over an iWARP
	// adapter that would let hosts write to all of it at any time.
	inPlace bool

	mu      sync.Mutex
	regions map[*extent]verbs.MR
}

type domainKey struct{ provider, device string }

// domain returns the domain of conn's device, making it at first.
func (t *Target) domain(conn verbs.Conn) (*domain, error) {
	key := domainKey{conn.Provider(), conn.Device().Name}
	t.domMu.Lock()
	defer t.domMu.Unlock()
	if d := t.domains[key]; d != nil {
		return d, nil
	}
	pd, err := conn.NewPD()
	if err != nil {
		return nil, err
	}
	d := &domain{pd: pd, hardware: key.provider != "iwarp", regions: make(map[*extent]verbs.MR)}
	d.inPlace = !d.hardware || conn.Device().Link != verbs.LinkIWARP
	t.domains[key] = d
	return d, nil
}

func (t *Target) domainList() []*domain {
	t.domMu.Lock()
	defer t.domMu.Unlock()
	return slices.Collect(maps.Values(t.domains))
}

// region returns the registration of e's memory in this domain.
func (d *domain) region(e *extent) (verbs.MR, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if mr := d.regions[e]; mr != nil {
		return mr, nil
	}
	access := verbs.Access(0)
	if d.inPlace {
		access = verbs.LocalWrite | verbs.ReadSink
	}
	if d.hardware {
		e.pin() // before the device takes the pages, and for ever: another may hold them
	}
	mr, err := d.pd.Register(e.mem, access)
	if err != nil {
		return nil, fmt.Errorf("memory of a namespace: %w", err)
	}
	d.regions[e] = mr
	return mr, nil
}

// forget deregisters e, which no queue uses any more.
func (d *domain) forget(e *extent) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	mr := d.regions[e]
	if mr == nil {
		return nil
	}
	delete(d.regions, e)
	return mr.Close()
}

func (d *domain) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, mr := range d.regions {
		errs = append(errs, mr.Close())
	}
	return errors.Join(append(errs, d.pd.Close())...)
}

// region is memory outside the Go heap with its registration.
type region struct {
	mem []byte
	mr  verbs.MR
}

// allocate maps and registers n bytes of zeros.
func (d *domain) allocate(n int, access verbs.Access) (region, error) {
	n = (n + pageSize - 1) &^ (pageSize - 1)
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return region{}, fmt.Errorf("mapping %d bytes: %w", n, err)
	}
	mr, err := d.pd.Register(mem, access)
	if err != nil {
		unix.Munmap(mem)
		return region{}, err
	}
	return region{mem, mr}, nil
}

func (r *region) free() {
	if r.mem == nil {
		return
	}
	r.mr.Close()
	unix.Munmap(r.mem)
	r.mem = nil
}
