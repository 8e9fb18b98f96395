package iwarp

// answers are the peer's RDMA Reads that wait to be answered, in order; at most limit, the IRD.
type answers struct {
	ring        [maxReads]answer
	head, count int
	limit       int
}

// answer is one RDMA Read of the peer, its access already checked.
type answer struct {
	data     []byte
	source   source
	sinkSTag uint32
	sinkTO   uint64
}

// add records a read; false means that the peer has more under way than agreed.
func (a *answers) add(r answer) bool {
	if a.count >= a.limit {
		return false
	}
	a.ring[(a.head+a.count)%maxReads] = r
	a.count++
	return true
}

func (a *answers) next() (answer, bool) {
	if a.count == 0 {
		return answer{}, false
	}
	r := a.ring[a.head]
	a.ring[a.head] = answer{}
	a.head = (a.head + 1) % maxReads
	a.count--
	return r, true
}
