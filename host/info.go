package host

import (
	"time"

	"farblk/host/nvme"
	"farblk/transport"
)

// Info describes a connection: plain data, of the newest association that was live.
type Info struct {
	SubsysNQN string `json:"subsystem"`
	HostNQN   string `json:"hostnqn"`
	HostID    string `json:"hostid"`
	Address   string `json:"address"`
	Provider  string `json:"provider"` // of RDMA
	Device    string `json:"device"`   // the local RDMA device
	State     State  `json:"state"`

	CNTLID      uint16        `json:"cntlid"`
	Model       string        `json:"model"`
	Serial      string        `json:"serial"`
	Firmware    string        `json:"firmware"`
	Version     string        `json:"version"`
	MaxTransfer int64         `json:"max_transfer"` // bytes in one command; MDTS
	InCapsule   int           `json:"in_capsule"`   // bytes of data that fit into a command capsule
	IOQueues    int           `json:"io_queues"`
	QueueSize   int           `json:"queue_size"` // entries
	KeepAlive   time.Duration `json:"keep_alive_ns"`
	Resets      uint64        `json:"resets"` // times the connection was lost

	Identify *nvme.IdentifyController `json:"-"` // not to be changed
}

// Info describes the connection as it is, or was last.
func (c *Controller) Info() Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := Info{
		SubsysNQN: c.cfg.SubsysNQN, HostNQN: c.cfg.HostNQN, HostID: nvme.UUID(c.cfg.HostID).String(),
		Address: c.cfg.Address.String(), State: c.state, Resets: c.resets,
	}
	if a := c.last; a != nil {
		i.Provider, i.Device = a.fabric.Provider(), a.fabric.Device()
		i.CNTLID, i.Model, i.Serial, i.Firmware = a.cntlid, a.id.MN, a.id.SN, a.id.FR
		i.Version, i.MaxTransfer, i.InCapsule = a.version.String(), a.limits.maxTransfer, a.limits.inCapsule
		i.IOQueues, i.QueueSize, i.KeepAlive, i.Identify = len(a.io), a.depth, a.kato, a.id
	}
	return i
}

// QueueCounters are the totals of an I/O queue over all associations.
type QueueCounters struct {
	Completed uint64 `json:"completed"` // commands, with whatever status
	Splits    uint64 `json:"splits"`    // additional commands because a request was too large for one
	Retried   uint64 `json:"retried"`   // commands to be sent again after a status that allows it
	Resent    uint64 `json:"resent"`    // commands to be sent again after the connection was lost
	// Outstanding commands are with the controller now; Waiting ones are to be sent again.
	Outstanding int `json:"outstanding"`
	Waiting     int `json:"waiting"`
	// Transport counts since the last connect.
	Transport transport.Counters `json:"transport"`
}

// Counters are the totals of a connection.
type Counters struct {
	Admin  transport.Counters `json:"admin"`
	Queues []QueueCounters    `json:"queues"`
	// PoolSize and PoolLeased are in bytes.
	PoolSize   int    `json:"pool_size"`
	PoolLeased int    `json:"pool_leased"`
	Resets     uint64 `json:"resets"`
}

// Counters are the totals as of now. I/O queue 1 is the first.
func (c *Controller) Counters() Counters {
	c.mu.Lock()
	a, queues, n := c.assoc, c.queues, Counters{PoolSize: c.pool.Size(), Resets: c.resets}
	c.mu.Unlock()
	n.PoolLeased = c.pool.Leased()
	if a != nil {
		n.Admin = a.admin.Counters()
	}
	n.Queues = make([]QueueCounters, len(queues))
	for i, q := range queues {
		q.mu.Lock()
		n.Queues[i] = q.counters
		n.Queues[i].Outstanding = q.inFlight
		for c := q.again; c != nil; c = c.next {
			n.Queues[i].Waiting++
		}
		q.mu.Unlock()
		if a != nil && i < len(a.io) {
			n.Queues[i].Transport = a.io[i].Counters()
		}
	}
	return n
}
