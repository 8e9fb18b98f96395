package nvme

import "encoding/binary"

// CompletionSize is the size in bytes of every completion queue entry.
const CompletionSize = 16

// Completion is a view of one completion queue entry (Base 3.3.3.2):
//
//	0 result (4, or 8 for Property Get)  8 SQ head  10 SQ ID  12 command ID  14 status
//
// The status field's bit 0 is the phase tag, which fabrics do not use.
type Completion [CompletionSize]byte

// Fill writes the whole completion.
func (c *Completion) Fill(result uint64, sqhd, sqid, cid uint16, s StatusCode) {
	c.SetResult64(result)
	c.SetSQHD(sqhd)
	c.SetSQID(sqid)
	c.SetCID(cid)
	c.SetStatus(s)
}

// Result returns dword 0.
func (c *Completion) Result() uint32 { return binary.LittleEndian.Uint32(c[0:]) }

// Result64 returns dwords 0 and 1, as Property Get uses them.
func (c *Completion) Result64() uint64 { return binary.LittleEndian.Uint64(c[0:]) }

// SetResult64 sets dwords 0 and 1.
func (c *Completion) SetResult64(v uint64) { binary.LittleEndian.PutUint64(c[0:], v) }

// SQHD returns the submission queue head pointer.
func (c *Completion) SQHD() uint16 { return binary.LittleEndian.Uint16(c[8:]) }

// SetSQHD sets the submission queue head pointer.
func (c *Completion) SetSQHD(v uint16) { binary.LittleEndian.PutUint16(c[8:], v) }

// SQID returns the submission queue ID; reserved on fabrics.
func (c *Completion) SQID() uint16 { return binary.LittleEndian.Uint16(c[10:]) }

// SetSQID sets the submission queue ID.
func (c *Completion) SetSQID(v uint16) { binary.LittleEndian.PutUint16(c[10:], v) }

// CID returns the command ID.
func (c *Completion) CID() uint16 { return binary.LittleEndian.Uint16(c[12:]) }

// SetCID sets the command ID.
func (c *Completion) SetCID(v uint16) { binary.LittleEndian.PutUint16(c[12:], v) }

// Status returns the status field without the phase tag.
func (c *Completion) Status() StatusCode {
	return StatusCode(binary.LittleEndian.Uint16(c[14:]) >> 1)
}

// SetStatus sets the status field; the phase tag becomes 0.
func (c *Completion) SetStatus(s StatusCode) {
	binary.LittleEndian.PutUint16(c[14:], uint16(s)<<1)
}
