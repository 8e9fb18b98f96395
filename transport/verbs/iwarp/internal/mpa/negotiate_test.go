package mpa

import (
	"errors"
	"testing"
)

// TestNegotiation runs both sides' rules against each other. RFC 5044 section 7.1, RFC 6581 section 9.
func TestNegotiation(t *testing.T) {
	const all = RTRFPDU | RTRWrite | RTRRead
	for _, c := range []struct {
		name     string
		a, p     Local // active, passive
		outA     Outcome
		outP     Outcome
		code     uint8 // of Conclude's error
		badReply uint8 // of CheckRequest's error
	}{
		{
			name: "revision 1 knows no depths: serve what can be served",
			a:    Local{CRC: true, Revision: 1, IRD: 8, ORD: 9, MaxIRD: 128}, p: Local{IRD: 5, ORD: 6, MaxIRD: 64},
			outA: Outcome{CRC: true, IRD: 128, ORD: 9}, outP: Outcome{CRC: true, IRD: 64, ORD: 6},
		},
		{
			name: "depths swap and shrink",
			a:    Local{Revision: 2, IRD: 8, ORD: 9, MaxIRD: 128}, p: Local{IRD: 5, ORD: 16},
			outA: Outcome{IRD: 8, ORD: 5}, outP: Outcome{IRD: 5, ORD: 8},
		},
		{
			name: "either side forces CRC",
			a:    Local{Revision: 2, MaxIRD: 1}, p: Local{CRC: true},
			outA: Outcome{CRC: true}, outP: Outcome{CRC: true},
		},
		{
			name: "depths that are not negotiated",
			a:    Local{Revision: 2, IRD: MaxDepth, ORD: 7, MaxIRD: 128}, p: Local{IRD: MaxDepth, ORD: 6},
			outA: Outcome{IRD: MaxDepth, ORD: 7}, outP: Outcome{IRD: MaxDepth, ORD: 6},
		},
		{
			name: "RTR by Write where possible",
			a:    Local{Revision: 2, PeerToPeer: true, RTR: all}, p: Local{RTR: all},
			outA: Outcome{RTR: RTRWrite}, outP: Outcome{RTR: RTRWrite},
		},
		{
			name: "RTR by Read",
			a:    Local{Revision: 2, PeerToPeer: true, RTR: RTRRead | RTRFPDU}, p: Local{RTR: all},
			outA: Outcome{RTR: RTRRead}, outP: Outcome{RTR: RTRRead, IRD: 1},
		},
		{
			name: "no common RTR",
			a:    Local{Revision: 2, PeerToPeer: true, RTR: RTRRead}, p: Local{RTR: RTRWrite},
			code: CodeNoRTR,
		},
		{name: "no RTR at all", a: Local{Revision: 2, PeerToPeer: true}, badReply: CodeNoRTR},
		{name: "revision 3", a: Local{Revision: 3}, badReply: CodeInvalidFrame},
		{name: "revision 0", a: Local{Revision: 0}, badReply: CodeInvalidFrame},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := NewRequest(c.a, []byte("x"))
			err := CheckRequest(req)
			if code(err) != c.badReply {
				t.Fatalf("request: %v", err)
			}
			if err != nil {
				return
			}
			reply, outP := Accept(req, c.p, nil)
			outA, err := Conclude(req, reply, c.a)
			if code(err) != c.code {
				t.Fatalf("reply: %v", err)
			}
			if err == nil && (outA != c.outA || outP != c.outP) {
				t.Errorf("active %+v, want %+v; passive %+v, want %+v", outA, c.outA, outP, c.outP)
			}
			if r := Refuse(req, nil); !r.Reject || r.Revision != req.Revision || r.IsEnhanced != req.IsEnhanced {
				t.Errorf("refusal %+v", r)
			}
		})
	}
}

func code(err error) uint8 {
	var n *NegotiationError
	if errors.As(err, &n) {
		return n.Code
	}
	return 0
}

func TestConcludeRefuses(t *testing.T) {
	l := Local{Revision: 2, IRD: 4, ORD: 4, MaxIRD: 16}
	req := NewRequest(l, nil)
	for name, c := range map[string]struct {
		change func(*Frame)
		code   uint8
	}{
		"markers":           {func(f *Frame) { f.Markers = true }, CodeInvalidFrame},
		"revision":          {func(f *Frame) { f.Revision = 1 }, CodeInvalidFrame},
		"no setup data":     {func(f *Frame) { f.IsEnhanced = false }, CodeInvalidFrame},
		"too many reads":    {func(f *Frame) { f.Enhanced.ORD = 17 }, CodeInsufficientIRD},
		"more reads is all": {func(f *Frame) { f.Enhanced.ORD = 16 }, 0},
	} {
		reply, _ := Accept(req, Local{IRD: 4, ORD: 4}, nil)
		c.change(&reply)
		out, err := Conclude(req, reply, l)
		if code(err) != c.code {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && out.IRD != 16 {
			t.Errorf("%s: IRD %d", name, out.IRD)
		}
	}
	req.Markers = true
	if code(CheckRequest(req)) != CodeInvalidFrame {
		t.Error("a request for markers is accepted")
	}
}
