package nvme

// LogEffectsSize is the size in bytes of the Commands Supported and Effects log.
const LogEffectsSize = 4096

// CommandEffects says that a command is supported and what it does (Base
// figure "Commands Supported and Effects Data Structure").
type CommandEffects uint32

// Bits of CommandEffects.
const (
	EffectSupported         CommandEffects = 1 << 0
	EffectContentChange     CommandEffects = 1 << 1 // logical block content
	EffectNamespaceChange   CommandEffects = 1 << 2
	EffectNamespacesChange  CommandEffects = 1 << 3 // inventory
	EffectControllerChanged CommandEffects = 1 << 4
)

// EffectsLog is log page 05h (Base 5.16.1.6), indexed by opcode.
type EffectsLog struct {
	Admin [256]CommandEffects
	IO    [256]CommandEffects
}

func (e *EffectsLog) layout(l layout) {
	for i := range 256 {
		l.u32(4*i, (*uint32)(&e.Admin[i]))
		l.u32(1024+4*i, (*uint32)(&e.IO[i]))
	}
}

// Append appends the 4096 bytes.
func (e *EffectsLog) Append(b []byte) []byte {
	b, p := grow(b, LogEffectsSize)
	e.layout(layout{p, true})
	return b
}

// ParseEffectsLog decodes the first 4096 bytes of b.
func ParseEffectsLog(b []byte) (*EffectsLog, error) {
	if err := need("commands and effects log", b, LogEffectsSize); err != nil {
		return nil, err
	}
	e := new(EffectsLog)
	e.layout(layout{b, false})
	return e, nil
}

// LogSupportedSize is the size in bytes of the Supported Log Pages log.
const LogSupportedSize = 1024

// SupportedLogs is log page 00h (Base 5.16.1.1), indexed by log ID: bit 0 is
// set where the log is supported.
type SupportedLogs [256]uint32

func (s *SupportedLogs) layout(l layout) {
	for i := range s {
		l.u32(4*i, &s[i])
	}
}

// Append appends the 1024 bytes.
func (s *SupportedLogs) Append(b []byte) []byte {
	b, p := grow(b, LogSupportedSize)
	s.layout(layout{p, true})
	return b
}

// ParseSupportedLogs decodes the first 1024 bytes of b.
func ParseSupportedLogs(b []byte) (*SupportedLogs, error) {
	if err := need("supported log pages", b, LogSupportedSize); err != nil {
		return nil, err
	}
	s := new(SupportedLogs)
	s.layout(layout{b, false})
	return s, nil
}
