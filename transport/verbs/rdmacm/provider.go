// Package rdmacm is the verbs provider for RDMA devices that the kernel knows: InfiniBand, RoCE and iWARP
// adapters, and the kernel's software devices rxe and siw. It stands on librdmacm and libibverbs and is the
// only package with cgo; built without cgo it lists no devices and says why.
//
// How it is made:
//   - Every connection and every listener has an event channel of its own, read by one goroutine that waits in
//     Go's poller. Events are copied and acknowledged in one call.
//   - Every queue pair has one completion queue and one completion channel, waited for in Go's poller.
//   - A chain of work requests is one call into C, and so is a batch of completions. Work requests are built
//     in C memory that lives as long as the queue pair, so nothing is allocated or pinned on the data path.
//   - The provider counts the work requests itself: it knows when a queue is full whatever the device rounds
//     its depth to, tells the operation of a failed completion, and flushes what a device forgets.
//
// ibv_fork_init is not called: registered memory is mapped apart from the heap, Go starts processes with
// CLONE_VM and CLONE_VFORK, which copy no pages, and kernels since 5.12 keep pinned pages with the parent.
package rdmacm

import (
	"log/slog"
)

// Options of the provider.
type Options struct {
	// Logger takes rare events of connections; nil discards them.
	Logger *slog.Logger
}

// Provider implements verbs.Provider for the machine's RDMA devices.
type Provider struct {
	log *slog.Logger
}

// New makes the provider. It opens nothing yet.
func New(o Options) *Provider {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Provider{log: o.Logger}
}

// Name is the provider's word for --provider.
func (*Provider) Name() string { return "verbs" }
