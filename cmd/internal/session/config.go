// Package session is one connection's process: it holds the controller and the exports of its namespaces.
//
// A session owns a folder in the state directory:
//
//	config.json   what it was started with (Config)
//	exports.json  what it has put into the system, so that a left-over can be removed after a crash
//	log           what it has logged, at most MaxLog bytes and as much again in log.old
//	socket        control socket: HTTP and JSON, for the owner alone
//	lock          locked (flock) as long as the process lives
//
// A folder whose lock is free belongs to a process that died; Sweep removes it and what its exports left. Beside the
// folders, crashes.json has the subsystems to which sessions that are gone may still write, and until when, and crash-*.log
// are the logs of those that died.
//
// When a controller is given up for lost (the controller loss timeout has passed, or the target refuses it for
// good), its exports stay and fail every request with EIO, and the session shows the state "dead", until it is
// disconnected: a device that vanished under its users would be worse. A disconnect without force ends nothing that
// is in use or not finished. SIGTERM and SIGINT end it by force then, which the log says: whoever sends them will kill next.
package session

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"farblk/host"
	"farblk/host/nvme"
	"farblk/transport"
)

// Config is everything that a session needs to know. Durations are nanoseconds in JSON; 0 is the host's default.
type Config struct {
	Name      string    `json:"name"` // "farblk0", given by Create
	Subsystem string    `json:"subsystem"`
	HostNQN   string    `json:"hostnqn"`
	HostID    nvme.UUID `json:"hostid"`

	Remote    netip.Addr `json:"traddr"`
	Port      uint16     `json:"trsvcid"`
	GID       bool       `json:"gid,omitempty"` // Remote is an InfiniBand GID
	Local     netip.Addr `json:"host_traddr,omitzero"`
	Interface string     `json:"host_iface,omitempty"`
	TOS       *uint8     `json:"tos,omitempty"`

	Provider      string `json:"provider"`                  // "verbs" or "iwarp"
	DisableCRC    bool   `json:"disable_crc,omitempty"`     // software iWARP
	KeyPerCommand bool   `json:"key_per_command,omitempty"` // see transport/rdma
	// Notes say what was chosen and why, for people.
	Notes []string `json:"notes,omitempty"`

	NrIOQueues     int           `json:"nr_io_queues,omitempty"`
	QueueSize      int           `json:"queue_size,omitempty"`
	PoolSize       int           `json:"pool_size,omitempty"` // bytes
	KeepAlive      time.Duration `json:"keep_alive_tmo,omitempty"`
	ReconnectDelay time.Duration `json:"reconnect_delay,omitempty"`
	CtrlLoss       time.Duration `json:"ctrl_loss_tmo,omitempty"` // negative: for ever
	FastIOFail     time.Duration `json:"fast_io_fail_tmo,omitempty"`
	IOTimeout      time.Duration `json:"io_timeout,omitempty"`
	ConnectTimeout time.Duration `json:"connect_timeout,omitempty"`
	DisableSQFlow  bool          `json:"disable_sqflow,omitempty"`

	Exports []ExportSpec `json:"exports"`

	// TakeOver and HoldWrites are Create's: what a dead session of this connection has left in use, and for how
	// long what earlier sessions had sent to this subsystem may still be executed.
	TakeOver   []Leftover    `json:"take_over,omitempty"`
	HoldWrites time.Duration `json:"hold_writes,omitempty"`
	// Grace is the connected session's own: how long its controller may go on with what it sent once it has died, by
	// what the controller has granted. 0 as long as nothing was sent.
	Grace time.Duration `json:"grace,omitempty"`
}

// Address is where the controller is, for the transport.
func (c *Config) Address() transport.Address {
	a := transport.Address{Remote: c.Remote, Port: c.Port, GID: c.GID, Local: c.Local, LocalDevice: c.Interface}
	if c.TOS != nil {
		a.TOS, a.TOSSet = *c.TOS, true
	}
	return a
}

// Host is what the host needs to know.
func (c *Config) Host(d transport.Dialer, log *slog.Logger) host.Config {
	return host.Config{
		Dialer: d, Address: c.Address(), SubsysNQN: c.Subsystem, HostNQN: c.HostNQN, HostID: c.HostID,
		NrIOQueues: c.NrIOQueues, QueueSize: c.QueueSize, PoolSize: c.PoolSize,
		KeepAlive: c.KeepAlive, ReconnectDelay: c.ReconnectDelay, CtrlLossTimeout: c.CtrlLoss,
		FastIOFail: c.FastIOFail, IOTimeout: c.IOTimeout, ConnectTimeout: c.ConnectTimeout,
		DisableSQFlow: c.DisableSQFlow, HoldWrites: c.HoldWrites, Logger: log,
	}
}

// grace is how long a controller may go on with what this session sent once it has died: as that controller has it, or
// at least as it was asked for.
func (c *Config) grace() time.Duration {
	if c.Grace > 0 {
		return c.Grace
	}
	if c.KeepAlive == 0 {
		return host.GraceTime(defaultKeepAlive)
	}
	return host.GraceTime(max(c.KeepAlive, 0))
}

// DeadTimeout is how long each request to a kernel block device waits for the next session once this one has died,
// before it fails: as long as for a controller that is lost.
func (c *Config) DeadTimeout() time.Duration {
	switch {
	case c.CtrlLoss < 0:
		return longestDeadTimeout
	case c.CtrlLoss == 0:
		return defaultCtrlLoss
	}
	return min(max(c.CtrlLoss, time.Second), longestDeadTimeout)
}

// Defaults of the host, and the longest time that the kernel can wait.
const (
	defaultKeepAlive   = 5 * time.Second
	defaultCtrlLoss    = 10 * time.Minute
	longestDeadTimeout = 14 * 24 * time.Hour
)

// sameConnection tells whether two sessions are the same host's connection to the same port of the same
// subsystem, as Linux decides it.
func (c *Config) sameConnection(o *Config) bool {
	return c.Subsystem == o.Subsystem && c.HostNQN == o.HostNQN && c.HostID == o.HostID &&
		c.Remote == o.Remote && c.Port == o.Port && c.GID == o.GID && c.Local == o.Local
}

// sameOptions are the options that, beside -n, make a connection the same one.
func (c *Config) sameOptions() string {
	from := ""
	if c.Local.IsValid() {
		from = fmt.Sprintf(" -w %v", c.Local)
	}
	return fmt.Sprintf("-a %v -s %d%s -q %s -I %s", c.Remote, c.Port, from, c.HostNQN, c.HostID)
}

// Kinds of exports.
const (
	KindNBD     = "nbd"      // kernel block device
	KindNBDUnix = "nbd-unix" // NBD server on a unix socket
	KindNBDTCP  = "nbd-tcp"  // NBD server on a TCP port
	KindFUSE    = "fuse"     // files
	KindNone    = "none"
	KindUblk    = "ublk"
)

// ExportSpec asks for one export of every namespace. Where may be empty where there is a default.
type ExportSpec struct {
	Kind  string `json:"kind"`
	Where string `json:"where,omitempty"` // absolute path, or host:port for KindNBDTCP
}

// ParseExport reads KIND or KIND=WHERE and makes paths absolute.
func ParseExport(s string) (e ExportSpec, err error) {
	kind, where, given := strings.Cut(s, "=")
	e = ExportSpec{Kind: kind, Where: where}
	if given && where == "" {
		return e, fmt.Errorf("export %q: nothing follows the '='", s)
	}
	switch kind {
	case KindNBD:
		var n int
		if given {
			if _, err := fmt.Sscanf(where, "/dev/nbd%d", &n); err != nil || n < 0 || where != fmt.Sprintf("/dev/nbd%d", n) {
				return e, fmt.Errorf("export %q: %q is not a device /dev/nbdN", s, where)
			}
		}
		return e, nil
	case KindNBDUnix, KindFUSE:
		if given {
			e.Where, err = filepath.Abs(where)
		}
		if kind == KindNBDUnix && len(e.Where) > maxSocketPath {
			return e, fmt.Errorf("export %q: a socket's path can have %d bytes at most", s, maxSocketPath)
		}
		return e, err
	case KindNBDTCP:
		if !given {
			return e, fmt.Errorf("export %q: say where to listen, as nbd-tcp=127.0.0.1:10809", s)
		}
		host, port, err := net.SplitHostPort(where)
		if err != nil {
			return e, fmt.Errorf("export %q: %q is not HOST:PORT", s, where)
		}
		if _, err := net.LookupPort("tcp", port); err != nil {
			return e, fmt.Errorf("export %q: %q is not a port", s, port)
		}
		if _, err := netip.ParseAddr(host); err != nil && host != "localhost" && host != "" {
			return e, fmt.Errorf("export %q: %q is not an IP address", s, host)
		}
		return e, nil
	case KindNone:
		if given {
			return e, fmt.Errorf("export %q: none takes no place", s)
		}
		return e, nil
	case KindUblk:
		return e, fmt.Errorf("export %q: ublk is not yet supported: use nbd or fuse", s)
	default:
		return e, fmt.Errorf("unknown export %q: nbd[=/dev/nbdN], nbd-unix=PATH, nbd-tcp=HOST:PORT, fuse=DIR, fuse=FILE or none", s)
	}
}

// maxSocketPath is the longest path that fits into a sockaddr_un with its final zero.
const maxSocketPath = 107

// Export is something that gives a namespace to this machine.
type Export struct {
	Kind string `json:"kind"`
	Path string `json:"path"`          // device, file, socket, or HOST:PORT
	URI  string `json:"uri,omitempty"` // for NBD clients
}

// Namespace is a namespace and its exports.
type Namespace struct {
	NSID      uint32   `json:"nsid"`
	Size      int64    `json:"size"`       // bytes
	BlockSize int      `json:"block_size"` // bytes
	Exports   []Export `json:"exports"`
}

// Result is what a new connection has brought about.
type Result struct {
	Name       string      `json:"name"`
	Subsystem  string      `json:"subsystem"`
	Transport  string      `json:"transport"`
	Provider   string      `json:"provider"`
	Device     string      `json:"device"`
	Address    string      `json:"address"`
	Namespaces []Namespace `json:"namespaces"`
	// Notes are for people: choices made and what could not be had.
	Notes []string `json:"notes,omitempty"`
}
