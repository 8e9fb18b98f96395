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
