package nvme

// ConnectNoFlowControl is the bit of a Connect's attributes that asks to run
// without submission queue flow control (Base 6.3, CATTR bit 2).
const ConnectNoFlowControl = 1 << 2

// FillConnect fills a Fabrics Connect (Base 6.3):
//
//	4 type  24 SGL  40 record format  42 queue ID  44 SQSIZE  46 attributes  48 KATO
//
// depth is the queue's number of entries (at least 2); on the wire it is
// 0-based. kato is in milliseconds, 0 for none, and counts on the admin queue
// only. The data is a [ConnectData].
func (c *Command) FillConnect(qid, depth uint16, attributes uint8, kato uint32) {
	c.fillFabrics(FabricsConnect)
	c.setU16(42, qid)
	c.setU16(44, depth-1)
	c[46] = attributes
	c.SetDW(12, kato)
}

// ConnectFormat returns the record format of a Connect, 0 in every version.
func (c *Command) ConnectFormat() uint16 { return c.u16(40) }

// ConnectQueue returns the queue ID of a Connect.
func (c *Command) ConnectQueue() uint16 { return c.u16(42) }

// ConnectSQSize returns SQSIZE of a Connect, 0-based as on the wire.
func (c *Command) ConnectSQSize() uint16 { return c.u16(44) }

// ConnectAttributes returns CATTR of a Connect.
func (c *Command) ConnectAttributes() uint8 { return c[46] }

// ConnectKATO returns a Connect's keep-alive timeout in milliseconds.
func (c *Command) ConnectKATO() uint32 { return c.DW(12) }

// FillPropertyGet fills a Fabrics Property Get (Base 6.5). The value is the
// completion's [Completion.Result64].
func (c *Command) FillPropertyGet(p Property) {
	c.fillFabrics(FabricsPropertyGet)
	c[40] = p.attrib()
	c.SetDW(11, uint32(p))
}

// FillPropertySet fills a Fabrics Property Set (Base 6.6).
func (c *Command) FillPropertySet(p Property, value uint64) {
	c.fillFabrics(FabricsPropertySet)
	c[40] = p.attrib()
	c.SetDW(11, uint32(p))
	c.setU64(48, value)
}

// PropertyOffset returns which property a Property Get or Set names.
func (c *Command) PropertyOffset() Property { return Property(c.DW(11)) }

// PropertyWide says whether the command treats the property as 8 bytes long.
func (c *Command) PropertyWide() bool { return c[40]&7 == 1 }

// PropertyValue returns the value of a Property Set.
func (c *Command) PropertyValue() uint64 { return c.u64(48) }

// FillDisconnect fills a Fabrics Disconnect (Base 6.4) of the I/O queue that
// carries it.
func (c *Command) FillDisconnect() { c.fillFabrics(FabricsDisconnect) }

func (c *Command) fillFabrics(t FabricsType) {
	c.fill(OpcodeFabrics, 0)
	c[4] = byte(t)
}
