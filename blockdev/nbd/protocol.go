// Package nbd gives block devices to NBD clients (qemu, nbdcopy, fio and others) over Unix and TCP sockets, and
// to this machine's kernel as /dev/nbdN.
//
// The server speaks the fixed newstyle negotiation with simple and structured replies, as in the NBD project's
// doc/proto.md ("proto.md" in this package). All integers on the wire are big-endian.
package nbd

import "encoding/binary"

// Magic numbers of the negotiation and the transmission phase (proto.md, "Protocol phases").
const (
	magicServer     = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption     = 0x49484156454f5054 // "IHAVEOPT"
	magicReply      = 0x0003e889045565a9 // of a reply to an option
	magicRequest    = 0x25609513
	magicSimple     = 0x67446698
	magicStructured = 0x668e33ef
)

// Handshake flags of the server and of the client: the same bits.
const (
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1
)

// Options a client can send.
const (
	optExportName      = 1
	optAbort           = 2
	optList            = 3
	optStartTLS        = 5
	optInfo            = 6
	optGo              = 7
	optStructuredReply = 8
	optListMetaContext = 9
	optSetMetaContext  = 10
)

// Types of the replies to an option.
const (
	repAck         = 1
	repServer      = 2
	repInfo        = 3
	repMetaContext = 4
	repErrUnsup    = 1<<31 | 1
	repErrPolicy   = 1<<31 | 2
	repErrInvalid  = 1<<31 | 3
	repErrUnknown  = 1<<31 | 6
	repErrShutdown = 1<<31 | 7
	repErrTooBig   = 1<<31 | 9
)

// Kinds of information in an answer of type repInfo.
const (
	infoExport      = 0
	infoName        = 1
	infoDescription = 2
	infoBlockSize   = 3
)

// Transmission flags of an export.
const (
	transHasFlags     = 1 << 0
	transReadOnly     = 1 << 1
	transFlush        = 1 << 2
	transFUA          = 1 << 3
	transTrim         = 1 << 5
	transWriteZeroes  = 1 << 6
	transDF           = 1 << 7
	transCanMultiConn = 1 << 8
	transCache        = 1 << 10
	transFastZero     = 1 << 11
)

// Commands.
const (
	cmdRead        = 0
	cmdWrite       = 1
	cmdDisc        = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdCache       = 5
	cmdWriteZeroes = 6
	cmdBlockStatus = 7
)

// Flags of commands.
const (
	cmdFlagFUA      = 1 << 0
	cmdFlagNoHole   = 1 << 1
	cmdFlagDF       = 1 << 2
	cmdFlagReqOne   = 1 << 3
	cmdFlagFastZero = 1 << 4
)

// Structured replies: the flag of the last chunk of a reply, and the types of chunk.
const (
	chunkDone        = 1 << 0
	chunkOffsetData  = 1
	chunkBlockStatus = 5
	chunkError       = 1<<15 | 1
	chunkErrorOffset = 1<<15 | 2
)

// Errors that may stand in a reply: Linux's numbers (proto.md, "Error values").
const (
	errnoPerm     = 1
	errnoIO       = 5
	errnoInval    = 22
	errnoNoSpace  = 28
	errnoNotSup   = 95
	errnoShutdown = 108
)

const (
	requestSize    = 28
	simpleSize     = 16
	structuredSize = 20

	maxPayload      = 32 << 20 // of one Read or Write: what a client may send without asking
	maxNameLength   = 4096     // of an export's name (proto.md, "String values")
	contextBase     = "base:allocation"
	contextBaseID   = 1
	queueDepthLimit = 256 // requests and parts of requests under way on one connection
)

// request is the header of a command (proto.md, "Request message"), 28 bytes: magic 0, flags 4, type 6,
// cookie 8, offset 16, length 24. Data follow a Write.
type request struct {
	flags, command uint16
	cookie, offset uint64
	length         uint32
}

// parseRequest reads the header at the start of b, which holds at least requestSize bytes. It is not ok when
// the magic number is wrong: then there is no telling where the next request begins.
func parseRequest(b []byte) (r request, ok bool) {
	_ = b[requestSize-1]
	return request{
		flags:   binary.BigEndian.Uint16(b[4:]),
		command: binary.BigEndian.Uint16(b[6:]),
		cookie:  binary.BigEndian.Uint64(b[8:]),
		offset:  binary.BigEndian.Uint64(b[16:]),
		length:  binary.BigEndian.Uint32(b[24:]),
	}, binary.BigEndian.Uint32(b) == magicRequest
}

func appendRequest(b []byte, r request) []byte {
	b = binary.BigEndian.AppendUint32(b, magicRequest)
	b = binary.BigEndian.AppendUint16(b, r.flags)
	b = binary.BigEndian.AppendUint16(b, r.command)
	b = binary.BigEndian.AppendUint64(b, r.cookie)
	b = binary.BigEndian.AppendUint64(b, r.offset)
	return binary.BigEndian.AppendUint32(b, r.length)
}

func appendSimple(b []byte, errno uint32, cookie uint64) []byte {
	b = binary.BigEndian.AppendUint32(b, magicSimple)
	b = binary.BigEndian.AppendUint32(b, errno)
	return binary.BigEndian.AppendUint64(b, cookie)
}

// appendChunk appends the header of a chunk of a structured reply, after which length bytes are to follow.
func appendChunk(b []byte, flags, kind uint16, cookie uint64, length int) []byte {
	b = binary.BigEndian.AppendUint32(b, magicStructured)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, kind)
	b = binary.BigEndian.AppendUint64(b, cookie)
	return binary.BigEndian.AppendUint32(b, uint32(length))
}
