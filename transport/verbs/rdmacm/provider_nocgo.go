//go:build !cgo || !linux

package rdmacm

import (
	"context"
	"fmt"

	"farblk/transport/verbs"
)

var errNoCgo = fmt.Errorf("%w: built without cgo: RDMA devices cannot be used; use --provider iwarp", verbs.ErrNoDevice)

// Devices says that this build cannot use any.
func (*Provider) Devices() ([]verbs.Device, error) { return nil, errNoCgo }

// Resolve says that this build cannot use any device.
func (*Provider) Resolve(context.Context, verbs.Route) (verbs.Conn, error) { return nil, errNoCgo }

// Listen says that this build cannot use any device.
func (*Provider) Listen(context.Context, verbs.Addr, int) (verbs.Listener, error) {
	return nil, errNoCgo
}
