package nvme

import "encoding/binary"

// CommandSize is the size in bytes of every submission queue entry.
const CommandSize = 64

// Command is a view of one submission queue entry (Base 3.3.3.1, and 3.3.3.2 for
// Fabrics commands):
//
//	 0  opcode           1  flags: FUSE 1:0, PSDT 7:6
//	 2  command ID       4  namespace ID (Fabrics: byte 4 is the command type)
//	 8  CDW2, CDW3      16  metadata pointer
//	24  SGL descriptor  40  CDW10 to CDW15
//
// The Fill methods write the whole entry in place: every byte that the command
// does not use becomes zero, PSDT says SGL as fabrics demand, and the SGL
// becomes a keyed descriptor of length 0. The command ID and the SGL are the
// transport's to set afterwards. No method allocates.
type Command [CommandSize]byte

// flagsSGL is PSDT 01b: the data pointer is an SGL, metadata is a plain address.
const flagsSGL = 0x40

func (c *Command) fill(op Opcode, nsid uint32) {
	*c = Command{0: byte(op), 1: flagsSGL, 39: byte(SGLKeyed)}
	c.SetNSID(nsid)
}

// Opcode returns byte 0.
func (c *Command) Opcode() Opcode { return Opcode(c[0]) }

// SetOpcode sets byte 0.
func (c *Command) SetOpcode(o Opcode) { c[0] = byte(o) }

// Flags returns byte 1.
func (c *Command) Flags() uint8 { return c[1] }

// SetFlags sets byte 1.
func (c *Command) SetFlags(f uint8) { c[1] = f }

// PSDT returns the two bits that say what the data pointer is; 1 on fabrics.
func (c *Command) PSDT() uint8 { return c[1] >> 6 }

// Fused returns the fused operation bits; 0 is a normal command.
func (c *Command) Fused() uint8 { return c[1] & 3 }

// CID returns the command ID.
func (c *Command) CID() uint16 { return binary.LittleEndian.Uint16(c[2:]) }

// SetCID sets the command ID.
func (c *Command) SetCID(id uint16) { binary.LittleEndian.PutUint16(c[2:], id) }

// NSID returns the namespace ID.
func (c *Command) NSID() uint32 { return binary.LittleEndian.Uint32(c[4:]) }

// SetNSID sets the namespace ID.
func (c *Command) SetNSID(id uint32) { binary.LittleEndian.PutUint32(c[4:], id) }

// FabricsType returns byte 4 of a Fabrics command.
func (c *Command) FabricsType() FabricsType { return FabricsType(c[4]) }

// DW returns command dword n, 0 to 15.
func (c *Command) DW(n int) uint32 { return binary.LittleEndian.Uint32(c[4*n:]) }

// SetDW sets command dword n, 0 to 15.
func (c *Command) SetDW(n int, v uint32) { binary.LittleEndian.PutUint32(c[4*n:], v) }

func (c *Command) u64(off int) uint64       { return binary.LittleEndian.Uint64(c[off:]) }
func (c *Command) setU64(off int, v uint64) { binary.LittleEndian.PutUint64(c[off:], v) }
func (c *Command) u16(off int) uint16       { return binary.LittleEndian.Uint16(c[off:]) }
func (c *Command) setU16(off int, v uint16) { binary.LittleEndian.PutUint16(c[off:], v) }

// SGL returns the command's one SGL descriptor.
func (c *Command) SGL() SGL { return parseSGL(c[24:40]) }

// SetSGL writes the command's SGL descriptor.
func (c *Command) SetSGL(s SGL) { s.put(c[24:40]) }
