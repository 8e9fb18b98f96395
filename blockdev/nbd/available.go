package nbd

import (
	"context"
	"os"
)

// Available tells whether Attach can work here, loading the kernel's module if need be: nil, ErrNotRoot or
// ErrNoModule.
func Available(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	return loadModule(ctx)
}

// Holders are those who use the device now; a short visit, such as a udev probe, counts as well.
func (a *Attachment) Holders() []Holder { return holders(a.Index, -1) }
