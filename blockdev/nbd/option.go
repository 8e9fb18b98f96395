package nbd

import "encoding/binary"

// cursor reads fields off the front of b; the first that is not there makes it bad for good.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n int) []byte {
	if c.bad || n < 0 || n > len(c.b) {
		c.bad = true
		return nil
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) uint16() uint16 {
	if b := c.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (c *cursor) uint32() uint32 {
	if b := c.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// text reads a 32-bit length and as many bytes.
func (c *cursor) text() string { return string(c.take(int(c.uint32()))) }

// done says whether all was there, and nothing more.
func (c *cursor) done() bool { return !c.bad && len(c.b) == 0 }

func appendText(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(s))), s...)
}

// infoRequest is the data of the options INFO and GO: the length of the name in 32 bits, the name, the number of
// requests in 16 bits, and 16 bits each.
type infoRequest struct {
	name  string
	kinds []uint16
}

func parseInfoRequest(b []byte) (r infoRequest, ok bool) {
	c := cursor{b: b}
	r.name = c.text()
	n := int(c.uint16())
	if c.bad || len(c.b) != 2*n {
		return infoRequest{}, false
	}
	for range n {
		r.kinds = append(r.kinds, c.uint16())
	}
	return r, c.done() && len(r.name) <= maxNameLength
}

func appendInfoRequest(b []byte, r infoRequest) []byte {
	b = appendText(b, r.name)
	b = binary.BigEndian.AppendUint16(b, uint16(len(r.kinds)))
	for _, k := range r.kinds {
		b = binary.BigEndian.AppendUint16(b, k)
	}
	return b
}

// metaRequest is the data of the options LIST_META_CONTEXT and SET_META_CONTEXT: the export's name with its
// length in 32 bits, the number of queries in 32 bits, and each query with its length in 32 bits.
type metaRequest struct {
	name    string
	queries []string
}

func parseMetaRequest(b []byte) (r metaRequest, ok bool) {
	c := cursor{b: b}
	r.name = c.text()
	n := c.uint32()
	if c.bad || int64(n)*4 > int64(len(c.b)) { // each takes four bytes at least
		return metaRequest{}, false
	}
	for range n {
		r.queries = append(r.queries, c.text())
	}
	return r, c.done() && len(r.name) <= maxNameLength
}

func appendMetaRequest(b []byte, r metaRequest) []byte {
	b = appendText(b, r.name)
	b = binary.BigEndian.AppendUint32(b, uint32(len(r.queries)))
	for _, q := range r.queries {
		b = appendText(b, q)
	}
	return b
}

// optionHeader is what stands before an option's data: magic 0, option 8, length 12.
type optionHeader struct{ option, length uint32 }

const optionHeaderSize = 16

func parseOptionHeader(b []byte) (h optionHeader, ok bool) {
	_ = b[optionHeaderSize-1]
	return optionHeader{binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])},
		binary.BigEndian.Uint64(b) == magicOption
}

func appendOption(b []byte, option uint32, data []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, magicOption)
	b = binary.BigEndian.AppendUint32(b, option)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}

func appendOptionReply(b []byte, option, kind uint32, data []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, magicReply)
	b = binary.BigEndian.AppendUint32(b, option)
	b = binary.BigEndian.AppendUint32(b, kind)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}
