package target

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"farblk/host/nvme"
)

// NamespaceConfig describes a namespace to be added.
type NamespaceConfig struct {
	// ID is the namespace ID, 1 to 1024; 0 takes the lowest free one.
	ID uint32
	// Size in bytes, a multiple of BlockSize; 0 with File takes the file's.
	Size uint64
	// BlockSize is 512 or 4096; 0 means 512.
	BlockSize uint32
	// File is the path of a file or block device; empty is memory. A file that
	// is not there is made, sparse.
	File string
	// ReadOnly makes the namespace write protected.
	ReadOnly bool
	// ANAGroup is 1 to 16; 0 means 1.
	ANAGroup uint32
	// Identity: what hosts know the namespace by again. What is not set is made up:
	// for memory anew each time, as its content is new, and for a file such that it
	// stays the same over restarts, for as long as it is the same file.
	UUID  nvme.UUID
	NGUID nvme.NGUID
	EUI64 nvme.EUI64
}

const (
	maxNSID   = 1024
	maxGroups = 16
)

// backend stores a namespace. Ranges are in bytes and were checked. Its methods
// are called from several queues at once.
type backend interface {
	readAt(p []byte, off uint64) error
	writeAt(p []byte, off uint64) error
	zero(off, n uint64) error
	sync() error // makes it durable, which may take long
	resize(old, size uint64) error
	close() error
}

// namespace is one namespace. All fields but the backend are guarded by
// Subsystem.mu; queues use the nsView that they made from it.
type namespace struct {
	id         uint32
	bytes      uint64
	blockShift uint8
	readOnly   bool
	group      uint32
	uuid       nvme.UUID
	nguid      nvme.NGUID
	eui64      nvme.EUI64
	store      backend
	lasting    []byte // what tells the store from others; nil: it is new each time
	refs       int    // queues that hold a view
	removed    bool   // close the backend when refs is 0
}

func (c *NamespaceConfig) check() error {
	if c.BlockSize == 0 {
		c.BlockSize = 512
	}
	if c.ANAGroup == 0 {
		c.ANAGroup = 1
	}
	switch {
	case c.BlockSize != 512 && c.BlockSize != 4096:
		return fmt.Errorf("block size %d is neither 512 nor 4096", c.BlockSize)
	case c.ID > maxNSID:
		return fmt.Errorf("namespace ID %d is above %d", c.ID, maxNSID)
	case c.ANAGroup > maxGroups:
		return fmt.Errorf("ANA group %d is above %d", c.ANAGroup, maxGroups)
	case c.Size%uint64(c.BlockSize) != 0:
		return fmt.Errorf("size %d is not a multiple of the block size %d", c.Size, c.BlockSize)
	case c.Size == 0 && c.File == "":
		return errors.New("a namespace in memory needs a size")
	case c.Size > 1<<62:
		return fmt.Errorf("size %d is above 4 EiB", c.Size)
	}
	return nil
}

func (c *NamespaceConfig) open() (*namespace, error) {
	n := &namespace{
		id: c.ID, bytes: c.Size, readOnly: c.ReadOnly, group: c.ANAGroup,
		blockShift: uint8(bits.TrailingZeros32(c.BlockSize)),
		uuid:       c.UUID, nguid: c.NGUID, eui64: c.EUI64,
	}
	if c.File == "" {
		m, err := newMemory(c.Size)
		if err != nil {
			return nil, err
		}
		n.store = m
		return n, nil
	}
	f, size, err := openFile(c.File, c.Size, c.ReadOnly)
	if err != nil {
		return nil, err
	}
	n.store, n.bytes = f, size&^(uint64(c.BlockSize)-1)
	if n.lasting, err = f.identity(c.File); err != nil {
		f.close()
		return nil, err
	}
	if n.bytes == 0 {
		f.close()
		return nil, fmt.Errorf("%s has no room for a block; give a size", c.File)
	}
	return n, nil
}

// identify fills in what the configuration left open. A host that finds another
// identity under an ID stops using it: a restarted target must not pass for the
// old one when its data is gone.
func (n *namespace) identify(nqn string) {
	var id [sha256.Size]byte
	version := byte(4) // of the UUID, RFC 9562: random
	if n.lasting == nil {
		_, _ = rand.Read(id[:]) // never fails
	} else {
		version = 8 // an application's own
		name := binary.LittleEndian.AppendUint32([]byte(nqn+"\x00"), n.id)
		id = sha256.Sum256(append(name, n.lasting...))
	}
	if n.uuid.IsZero() {
		copy(n.uuid[:], id[:16])
		n.uuid[6] = n.uuid[6]&0x0F | version<<4
		n.uuid[8] = n.uuid[8]&0x3F | 0x80 // RFC 9562's variant
	}
	if n.nguid.IsZero() {
		copy(n.nguid[:], id[16:])
	}
}

// blocks returns the size in logical blocks.
func (n *namespace) blocks() uint64 { return n.bytes >> n.blockShift }

// data is the Identify Namespace data structure.
func (n *namespace) data() *nvme.IdentifyNamespace {
	d := &nvme.IdentifyNamespace{
		NSZE: n.blocks(), NCAP: n.blocks(), NUSE: n.blocks(),
		NSFEAT: 1 << 4, NMIC: 1, DLFEAT: 1 | 1<<3,
		NVMCAP: nvme.Uint128{Lo: n.bytes}, ANAGRPID: n.group,
		NGUID: n.nguid, EUI64: n.eui64,
	}
	if n.readOnly {
		d.NSATTR = nvme.NSAttrWriteProtected
	}
	g := uint16(pageSize>>n.blockShift) - 1
	d.NPWG, d.NPWA, d.NPDG, d.NPDA = g, g, g, g
	d.LBAF[0].LBADS = n.blockShift
	return d
}
