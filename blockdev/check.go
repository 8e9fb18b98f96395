package blockdev

import "fmt"

// Bytes is how many bytes of the device r is about: len(Data) of a Read or Write, else Len; 0 of a Flush.
func (r *Request) Bytes() int64 {
	switch r.Op {
	case Read, Write:
		return int64(len(r.Data))
	case Flush:
		return 0
	default:
		return r.Len
	}
}

// Check is what every device checks before it starts r, in this order: known operation and support
// (ErrUnsupported), read-only (ErrReadOnly), a length above 0 and a place inside the device (ErrRange; of a
// Write or WriteZeroes that runs past the end also ErrNoSpace), alignment (ErrAlignment).
func (i *Info) Check(r *Request) error { return i.CheckRange(r.Op, r.Off, r.Bytes()) }

// CheckRange is Check for an operation on n bytes at off.
func (i *Info) CheckRange(op Op, off, n int64) error {
	switch {
	case op >= numOps, op == Discard && !i.Discard, op == WriteZeroes && !i.WriteZeroes:
		return fmt.Errorf("%v: %w", op, ErrUnsupported)
	case op == Flush:
		return nil
	case op != Read && i.ReadOnly:
		return fmt.Errorf("%v: %w", op, ErrReadOnly)
	}
	if off < 0 || n <= 0 || off > i.Size || n > i.Size-off {
		if n > 0 && off >= 0 && (op == Write || op == WriteZeroes) {
			return fmt.Errorf("%v of %d bytes at %d on a device of %d: %w, %w", op, n, off, i.Size, ErrNoSpace, ErrRange)
		}
		return fmt.Errorf("%v of %d bytes at %d on a device of %d: %w", op, n, off, i.Size, ErrRange)
	}
	if mask := int64(i.BlockSize - 1); (off|n)&mask != 0 {
		return fmt.Errorf("%v of %d bytes at %d with blocks of %d: %w", op, n, off, i.BlockSize, ErrAlignment)
	}
	return nil
}
