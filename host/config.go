package host

import (
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"farblk/blockdev"
	"farblk/host/nvme"
	"farblk/transport"
)

// Config describes one connection to a controller. Zero values mean the defaults, which are those of Linux
// where users know them.
type Config struct {
	Dialer  transport.Dialer
	Address transport.Address
	// SubsysNQN is the subsystem, HostNQN and HostID who we are; see LoadIdentity.
	SubsysNQN string
	HostNQN   string
	HostID    [16]byte

	// NrIOQueues is how many I/O queues to ask for; 0 is one for each CPU, at most 4. Fewer may be granted.
	NrIOQueues int
	// QueueSize is the entries of an I/O queue, 16 to 1024; 0 is 128. The controller may allow fewer.
	QueueSize int
	// PoolSize is the memory for I/O data in bytes; 0 is 64 MiB.
	PoolSize int
	// DisableSQFlow asks for I/O queues without submission queue flow control.
	DisableSQFlow bool

	// KeepAlive is the keep-alive timeout (KATO), 5 s; negative is none. An outage is noticed within twice that.
	KeepAlive time.Duration
	// HoldWrites makes commands that write wait for this long at first: as long as a connection of a process
	// that died may still write; see GraceTime.
	HoldWrites time.Duration
	// ReconnectDelay is the time between attempts to reconnect, 10 s; the first comes after at most 1 s.
	ReconnectDelay time.Duration
	// CtrlLossTimeout is how long to try to reconnect before all fails for good, 10 min; negative is for ever.
	CtrlLossTimeout time.Duration
	// FastIOFail is how long requests wait for a reconnect before they fail; 0 is as long as attempts go on. Those to a
	// namespace that cannot be identified for now wait as long (0: CtrlLossTimeout).
	FastIOFail time.Duration
	// IOTimeout and AdminTimeout bound one command, 30 s and 60 s; then the connection counts as lost.
	IOTimeout, AdminTimeout time.Duration
	// ShutdownTimeout bounds the orderly part of a shutdown, 5 s.
	ShutdownTimeout time.Duration
	// ConnectTimeout bounds address resolution, each queue's connection and each Connect command, 4 s.
	ConnectTimeout time.Duration

	// Logger gets what happens to the connection, never single requests; nil is silent.
	Logger *slog.Logger
	// OnEvent is told of changes, one at a time. It must not block, nor call Shutdown.
	OnEvent func(Event)
}

// ConfigError is a Config that makes no sense.
type ConfigError struct{ Field, Detail string }

// Error names the field and what is wrong with it.
func (e *ConfigError) Error() string { return e.Field + ": " + e.Detail }

// Sizes of queues.
const (
	adminDepth   = 32 // what Linux's target accepts at most
	minQueueSize = 16
	maxQueueSize = 1024
	maxIOQueues  = 1024
)

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// complete fills in the defaults and checks the rest. Errors: *ConfigError.
func (c *Config) complete() error {
	orDefault(&c.NrIOQueues, min(runtime.NumCPU(), 4))
	orDefault(&c.QueueSize, 128)
	orDefault(&c.PoolSize, 64<<20)
	orDefault(&c.KeepAlive, 5*time.Second)
	orDefault(&c.ReconnectDelay, 10*time.Second)
	orDefault(&c.CtrlLossTimeout, 10*time.Minute)
	orDefault(&c.IOTimeout, 30*time.Second)
	orDefault(&c.AdminTimeout, time.Minute)
	orDefault(&c.ShutdownTimeout, 5*time.Second)
	orDefault(&c.ConnectTimeout, 4*time.Second)
	orDefault(&c.Address.Port, 4420)
	if !c.Address.GID {
		c.Address.Remote = c.Address.Remote.Unmap() // one spelling for one address
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.OnEvent == nil {
		c.OnEvent = func(Event) {}
	}
	if c.KeepAlive < 0 {
		c.KeepAlive = 0
	}
	bad := func(field, format string, a ...any) error { return &ConfigError{field, fmt.Sprintf(format, a...)} }
	switch {
	case c.Dialer == nil:
		return bad("transport", "none given")
	case !c.Address.Remote.IsValid():
		return bad("address", "none given")
	case c.NrIOQueues < 1 || c.NrIOQueues > maxIOQueues:
		return bad("I/O queues", "%d is not from 1 to %d", c.NrIOQueues, maxIOQueues)
	case c.QueueSize < minQueueSize || c.QueueSize > maxQueueSize:
		return bad("queue size", "%d is not from %d to %d", c.QueueSize, minQueueSize, maxQueueSize)
	case c.PoolSize < blockdev.MaxLease:
		return bad("pool size", "%d bytes is less than %d", c.PoolSize, blockdev.MaxLease)
	case c.HoldWrites < 0 || c.ReconnectDelay < 0 || c.FastIOFail < 0 || c.IOTimeout < 0 || c.AdminTimeout < 0 || c.ShutdownTimeout < 0 || c.ConnectTimeout < 0:
		return bad("timeout", "a negative one makes no sense")
	case c.KeepAlive > 0 && c.KeepAlive < time.Millisecond, c.KeepAlive.Milliseconds() > 1<<32-1:
		return bad("keep-alive timeout", "%v is not from 1 ms to 49 days", c.KeepAlive)
	}
	if err := nvme.ValidateNQN(c.SubsysNQN); err != nil {
		return &ConfigError{"subsystem", err.Error()}
	}
	return CheckIdentity(c.HostNQN, c.HostID)
}

// patience is how long requests wait for the controller, or for a namespace of it, before they fail; negative is for ever.
func (c *Config) patience() time.Duration {
	if c.FastIOFail > 0 {
		return c.FastIOFail
	}
	return c.CtrlLossTimeout
}

// EventKind says what an Event is about.
type EventKind uint8

// Kinds of events.
const (
	EventState            EventKind = iota // State is the new state
	EventNamespaceAdded                    // Namespace is new
	EventNamespaceRemoved                  // Namespace is gone from the controller; its requests fail
	EventNamespaceChanged                  // Namespace has another size, access or identity: see Info
	EventDiscoveryChanged                  // the discovery log has changed
)

// String is the kind in words.
func (k EventKind) String() string {
	switch k {
	case EventState:
		return "state"
	case EventNamespaceAdded:
		return "namespace added"
	case EventNamespaceRemoved:
		return "namespace removed"
	case EventNamespaceChanged:
		return "namespace changed"
	case EventDiscoveryChanged:
		return "discovery log changed"
	}
	return "unknown event"
}

// Event is something that happened to a connection.
type Event struct {
	Kind      EventKind
	State     State      // the controller's, at that moment
	Namespace *Namespace // nil unless the event is about one
	Err       error      // why, if there is a reason
}
