package nvme

import (
	"fmt"
	"strconv"
)

func itoa(v uint16) string { return strconv.Itoa(int(v)) }

// StatusCode is a completion's status field without its phase tag (Base
// 3.3.3.2.1):
//
//	7:0 code  10:8 type  12:11 command retry delay  13 more  14 do not retry
//
// The constants hold type and code alone, such as 0x181. A StatusCode is an
// error, so that errors.Is(err, nvme.StatusInvalidField) works on a
// [StatusError].
type StatusCode uint16

// StatusDNR is the Do Not Retry bit.
const StatusDNR StatusCode = 1 << 14

const statusMore StatusCode = 1 << 13

// StatusType is the class of a status.
type StatusType uint8

// Status types.
const (
	TypeGeneric  StatusType = 0
	TypeSpecific StatusType = 1
	TypeMedia    StatusType = 2
	TypePath     StatusType = 3
	TypeVendor   StatusType = 7
)

// Code returns type and code without the other bits, to compare with the
// constants.
func (s StatusCode) Code() StatusCode { return s & 0x7FF }

// Type returns the status type.
func (s StatusCode) Type() StatusType { return StatusType(s >> 8 & 7) }

// OK says whether the command succeeded.
func (s StatusCode) OK() bool { return s.Code() == 0 }

// DNR says that the same command would fail again.
func (s StatusCode) DNR() bool { return s&StatusDNR != 0 }

// More says that the error log has more about it.
func (s StatusCode) More() bool { return s&statusMore != 0 }

// CRD returns the index, 0 to 3, of the retry delay; 0 is none.
func (s StatusCode) CRD() int { return int(s >> 11 & 3) }

// WithDNR returns the status with Do Not Retry set.
func (s StatusCode) WithDNR() StatusCode { return s | StatusDNR }

// String returns the status in words.
func (s StatusCode) String() string {
	if name, ok := statusNames[s.Code()]; ok {
		return name
	}
	switch s.Type() {
	case TypeGeneric:
		return fmt.Sprintf("generic status %#02x", uint8(s))
	case TypeSpecific:
		return fmt.Sprintf("command specific status %#02x", uint8(s))
	case TypeMedia:
		return fmt.Sprintf("media status %#02x", uint8(s))
	case TypePath:
		return fmt.Sprintf("path status %#02x", uint8(s))
	case TypeVendor:
		return fmt.Sprintf("vendor specific status %#02x", uint8(s))
	}
	return fmt.Sprintf("status %#x", uint16(s.Code()))
}

// Error makes a status usable as a target of errors.Is.
func (s StatusCode) Error() string { return "NVMe status: " + s.String() }

// StatusError is a command that the controller completed with an error.
type StatusError struct {
	Opcode  Opcode
	Admin   bool        // which opcode space
	Fabrics FabricsType // for OpcodeFabrics
	Status  StatusCode
	Result  uint32 // dword 0 of the completion
}

// Command returns the failed command's name.
func (e *StatusError) Command() string {
	if e.Opcode == OpcodeFabrics {
		return e.Fabrics.String()
	}
	return e.Opcode.Name(e.Admin)
}

// words names the status as it is meant for this command.
func (e *StatusError) words() string {
	names := ioStatusNames
	switch {
	case e.Opcode == OpcodeFabrics:
		names = connectNames
	case e.Admin:
		names = nil
	}
	if s, ok := names[e.Status.Code()]; ok {
		return s
	}
	return e.Status.String()
}

func (e *StatusError) Error() string {
	where := ""
	if e.Opcode == OpcodeFabrics && e.Fabrics == FabricsConnect && e.Status.Code() == StatusConnectInvalidParameters {
		where = ": " + ConnectParameter(e.Result).String()
	}
	retry := ""
	if e.Status.DNR() {
		retry = ", do not retry"
	}
	return fmt.Sprintf("NVMe %s failed: %s%s (status %#x%s)", e.Command(), e.words(), where, uint16(e.Status.Code()), retry)
}

// Is compares with a [StatusCode], by type and code only.
func (e *StatusError) Is(target error) bool {
	s, ok := target.(StatusCode)
	return ok && s.Code() == e.Status.Code()
}

// CommandError returns nil for a successful completion, else a *[StatusError].
func CommandError(c *Command, admin bool, cqe *Completion) error {
	s := cqe.Status()
	if s.OK() {
		return nil
	}
	return &StatusError{Opcode: c.Opcode(), Admin: admin, Fabrics: c.FabricsType(), Status: s, Result: cqe.Result()}
}
