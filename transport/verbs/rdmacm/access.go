package rdmacm

import "farblk/transport/verbs"

// granted is what a device of that link must be told to allow for access: iWARP adapters place the answer to an RDMA
// READ only where the peer may write (siw does so everywhere).
func granted(access verbs.Access, link verbs.Link) verbs.Access {
	if access&verbs.ReadSink == 0 {
		return access
	}
	access |= verbs.LocalWrite
	if link == verbs.LinkIWARP {
		access |= verbs.RemoteWrite
	}
	return access
}
