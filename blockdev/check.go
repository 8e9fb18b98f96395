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
// (ErrUnsupported), read-only (ErrReadOnly), a length above 0 and a place inside the device (ErrRange; for a
// Write or WriteZeroes that runs past the end also ErrNoSpace), alignment (ErrAlignment).
func (i *Info) Check(r *Request) error {
	switch {
	case r.Op >= numOps, r.Op == Discard && !i.Discard, r.Op == WriteZeroes && !i.WriteZeroes:
		return fmt.Errorf("%v: %w", r.Op, ErrUnsupported)
	case r.Op == Flush:
		return nil
	case r.Op != Read && i.ReadOnly:
		return fmt.Errorf("%v: %w", r.Op, ErrReadOnly)
	}
	n := r.Bytes()
	if r.Off < 0 || n <= 0 || r.Off > i.Size || n > i.Size-r.Off {
		if n > 0 && r.Off >= 0 && (r.Op == Write || r.Op == WriteZeroes) {
			return fmt.Errorf("%v of %d bytes at %d on a device of %d: %w, %w", r.Op, n, r.Off, i.Size, ErrNoSpace, ErrRange)
		}
		return fmt.Errorf("%v of %d bytes at %d on a device of %d: %w", r.Op, n, r.Off, i.Size, ErrRange)
	}
	if mask := int64(i.BlockSize - 1); (r.Off|n)&mask != 0 {
		return fmt.Errorf("%v of %d bytes at %d with blocks of %d: %w", r.Op, n, r.Off, i.BlockSize, ErrAlignment)
	}
	return nil
}
