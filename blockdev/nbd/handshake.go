package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
)

const (
	optionLimit = 64 << 10 // bytes of an option's data that are looked at
	skipLimit   = 1 << 20  // bytes of an option's data that are read over before the client is dropped
)

// errGone ends a negotiation that the client ended, as it may.
var errGone = errors.New("the client left")

// agreed is what a negotiation led to.
type agreed struct {
	export     *export
	structured bool
	allocation bool // base:allocation was selected
}

// negotiation is the state of one handshake.
type negotiation struct {
	srv        *Server
	sock       net.Conn
	noZeroes   bool
	structured bool
	metaFor    *export // base:allocation was selected for this one
	out        []byte
}

// negotiate runs the handshake (proto.md, "Newstyle negotiation"). The caller has set a deadline.
func (s *Server) negotiate(sock net.Conn) (agreed, error) {
	n := &negotiation{srv: s, sock: sock}
	b := binary.BigEndian.AppendUint64(nil, magicServer)
	b = binary.BigEndian.AppendUint64(b, magicOption)
	b = binary.BigEndian.AppendUint16(b, flagFixedNewstyle|flagNoZeroes)
	if _, err := sock.Write(b); err != nil {
		return agreed{}, err
	}
	var head [optionHeaderSize]byte
	if _, err := io.ReadFull(sock, head[:4]); err != nil {
		return agreed{}, gone(err)
	}
	flags := binary.BigEndian.Uint32(head[:])
	if flags&^(flagFixedNewstyle|flagNoZeroes) != 0 {
		return agreed{}, fmt.Errorf("unknown client flags %#x", flags)
	}
	n.noZeroes = flags&flagNoZeroes != 0
	for {
		if _, err := io.ReadFull(sock, head[:]); err != nil {
			return agreed{}, gone(err)
		}
		h, ok := parseOptionHeader(head[:])
		if !ok {
			return agreed{}, errors.New("bad magic number before an option")
		}
		if h.length > optionLimit {
			if h.length > skipLimit || h.option == optExportName {
				return agreed{}, fmt.Errorf("option %d of %d bytes", h.option, h.length)
			}
			if _, err := io.CopyN(io.Discard, sock, int64(h.length)); err != nil {
				return agreed{}, err
			}
			if err := n.answer(h.option, repErrTooBig, nil); err != nil {
				return agreed{}, err
			}
			continue
		}
		data := make([]byte, h.length)
		if _, err := io.ReadFull(sock, data); err != nil {
			return agreed{}, err
		}
		e, err := n.option(h.option, data)
		if err != nil {
			return agreed{}, err
		}
		if e != nil {
			return agreed{export: e, structured: n.structured, allocation: n.metaFor == e}, nil
		}
	}
}

func gone(err error) error {
	if errors.Is(err, io.EOF) {
		return errGone
	}
	return err
}

// option handles one option. It gives the export when the transmission phase begins.
func (n *negotiation) option(option uint32, data []byte) (*export, error) {
	switch option {
	case optExportName:
		return n.exportName(string(data))
	case optAbort:
		_ = n.answer(option, repAck, nil)
		return nil, errGone
	case optList:
		return nil, n.list(data)
	case optInfo, optGo:
		return n.info(option, data)
	case optStructuredReply:
		if len(data) != 0 {
			return nil, n.answer(option, repErrInvalid, nil)
		}
		n.structured = true
		return nil, n.answer(option, repAck, nil)
	case optListMetaContext, optSetMetaContext:
		return nil, n.metaContext(option, data)
	default: // STARTTLS too
		return nil, n.answer(option, repErrUnsup, nil)
	}
}

// answer sends what was collected in n.out, and one more reply.
func (n *negotiation) answer(option, kind uint32, data []byte) error {
	n.out = appendOptionReply(n.out, option, kind, data)
	_, err := n.sock.Write(n.out)
	n.out = n.out[:0]
	return err
}

func (n *negotiation) exportName(name string) (*export, error) {
	e := n.srv.lookup(name)
	if e == nil {
		return nil, fmt.Errorf("there is no export %q", name) // this option has no way to say it
	}
	b := binary.BigEndian.AppendUint64(nil, uint64(e.info.Load().Size))
	b = binary.BigEndian.AppendUint16(b, e.flags(n.structured))
	if !n.noZeroes {
		b = append(b, make([]byte, 124)...)
	}
	if err := n.srv.keep(n.sock); err != nil {
		return nil, err
	}
	_, err := n.sock.Write(b)
	return e, err
}

func (n *negotiation) list(data []byte) error {
	if len(data) != 0 {
		return n.answer(optList, repErrInvalid, nil)
	}
	for _, e := range n.srv.list() {
		n.out = appendOptionReply(n.out, optList, repServer, append(appendText(nil, e.Name), e.Description...))
	}
	return n.answer(optList, repAck, nil)
}

func (n *negotiation) info(option uint32, data []byte) (*export, error) {
	r, ok := parseInfoRequest(data)
	if !ok {
		return nil, n.answer(option, repErrInvalid, nil)
	}
	e := n.srv.lookup(r.name)
	if e == nil {
		return nil, n.answer(option, repErrUnknown, fmt.Appendf(nil, "there is no export %q", r.name))
	}
	info := e.info.Load()
	reply := func(kind uint16, b []byte) {
		n.out = appendOptionReply(n.out, option, repInfo, append(binary.BigEndian.AppendUint16(nil, kind), b...))
	}
	b := binary.BigEndian.AppendUint64(nil, uint64(info.Size))
	reply(infoExport, binary.BigEndian.AppendUint16(b, e.flags(n.structured)))
	if slices.Contains(r.kinds, infoName) {
		reply(infoName, []byte(e.Name))
	}
	if slices.Contains(r.kinds, infoDescription) {
		reply(infoDescription, []byte(e.Description))
	}
	if slices.Contains(r.kinds, infoBlockSize) {
		b := binary.BigEndian.AppendUint32(nil, uint32(info.BlockSize))
		b = binary.BigEndian.AppendUint32(b, uint32(preferredBlock(info)))
		reply(infoBlockSize, binary.BigEndian.AppendUint32(b, uint32(e.maxPayload)))
	}
	if option == optInfo {
		return nil, n.answer(option, repAck, nil)
	}
	if err := n.srv.keep(n.sock); err != nil {
		return nil, err
	}
	return e, n.answer(option, repAck, nil)
}

func (n *negotiation) metaContext(option uint32, data []byte) error {
	r, ok := parseMetaRequest(data)
	if !ok || option == optSetMetaContext && !n.structured {
		return n.answer(option, repErrInvalid, nil)
	}
	e := n.srv.lookup(r.name)
	if e == nil {
		return n.answer(option, repErrUnknown, nil)
	}
	match := slices.Contains(r.queries, contextBase)
	id := uint32(contextBaseID)
	if option == optListMetaContext {
		id = 0 // there is none yet
		match = match || len(r.queries) == 0 || slices.Contains(r.queries, strings.TrimSuffix(contextBase, "allocation"))
	} else if n.metaFor = nil; match {
		n.metaFor = e
	}
	if match {
		n.out = appendOptionReply(n.out, option, repMetaContext,
			append(binary.BigEndian.AppendUint32(nil, id), contextBase...))
	}
	return n.answer(option, repAck, nil)
}
