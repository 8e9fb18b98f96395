package host

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"farblk/host/nvme"
)

const (
	// maxANALog is how much of an ANA log is read at most, in bytes: 32,767 groups without their namespaces.
	maxANALog = 1 << 20
	// anaOverlap is how many bytes a further piece of the log repeats of those before it.
	anaOverlap = nvme.LogANAGroupSize
)

// ReadANALog reads a controller's ANA log (Base 5.16.1.13), of at most 1 MiB. get runs one Get Log Page for the
// bytes from off that fill buf: most, a multiple of 4 and at least 4096, is how many it can bring at once.
//
// How long the log is only its counts say, which are not trusted. As long as one command can bring all of it, it is
// read from the start, once more if the first read was too short: Linux's target ignores the offset of a further
// piece, others refuse it. Where pieces are needed, each repeats the end of the one before it, which shows whether the
// offset was heeded. If it was not, the groups so far are the result, and missing is how many more there are.
//
// Errors: get's; an error where the counts cannot be true.
func ReadANALog(most int, get func(off uint64, buf []byte) error) (log nvme.ANALog, missing int, err error) {
	most = min(most, maxANALog)
	buf := make([]byte, min(most, nvme.IdentifySize))
	if err := get(0, buf); err != nil {
		return log, 0, err
	}
	for {
		groups, end, need := anaExtent(buf)
		total := int(binary.LittleEndian.Uint16(buf[8:]))
		switch {
		case groups == total:
			log, err = nvme.ParseANALog(buf[:end])
			return log, 0, err
		case need > maxANALog:
			return log, 0, fmt.Errorf("the ANA log would have at least %d bytes, by what it says of itself; %d are read at most", need, maxANALog)
		case len(buf) < most:
			buf = make([]byte, min(max(int(need), 4*len(buf)), most))
			if err := get(0, buf); err != nil {
				return log, 0, err
			}
			continue
		}
		off := len(buf) - anaOverlap
		piece := make([]byte, min(most, maxANALog-off))
		if err := get(uint64(off), piece); err != nil && statusOf(err) == 0 {
			return log, 0, err
		} else if err != nil || !bytes.Equal(piece[:anaOverlap], buf[off:]) {
			binary.LittleEndian.PutUint16(buf[8:], uint16(groups))
			log, err = nvme.ParseANALog(buf[:end])
			return log, total - groups, err
		}
		buf = append(buf[:off], piece...)
	}
}

// anaExtent counts the whole groups in the beginning b of a log and tells where they end. If there are to be more,
// need is the least size of the log.
func anaExtent(b []byte) (groups, end int, need int64) {
	total := int(binary.LittleEndian.Uint16(b[8:]))
	end = nvme.LogANAHeaderSize
	for ; groups < total; groups++ {
		need = int64(end + (total-groups)*nvme.LogANAGroupSize)
		if end+nvme.LogANAGroupSize > len(b) {
			return groups, end, need
		}
		names := 4 * int64(binary.LittleEndian.Uint32(b[end+4:])) // namespace IDs
		if need += names; int64(end+nvme.LogANAGroupSize)+names > int64(len(b)) {
			return groups, end, need
		}
		end += nvme.LogANAGroupSize + int(names)
	}
	return groups, end, 0
}
