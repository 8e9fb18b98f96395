//go:build cgo && linux

package rdmacm

/*
#cgo LDFLAGS: -lrdmacm -libverbs
#include <errno.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"syscall"
	"unsafe"

	"farblk/transport/verbs"
)

// Devices lists the machine's RDMA devices as their first port has them. A device that cannot be opened is left
// out, with a warning in the log.
func (p *Provider) Devices() ([]verbs.Device, error) {
	var n C.int
	list, err := C.ibv_get_device_list(&n)
	if list == nil {
		if err == syscall.ENOSYS || err == syscall.ENOENT {
			return nil, nil // a kernel without RDMA
		}
		return nil, fmt.Errorf("RDMA devices: ibv_get_device_list: %w", err)
	}
	defer C.ibv_free_device_list(list)
	var ds []verbs.Device
	for _, dev := range unsafe.Slice(list, int(n)) {
		name := C.GoString(C.ibv_get_device_name(dev))
		v, err := C.ibv_open_device(dev)
		if v == nil {
			p.log.Warn("RDMA device cannot be opened", "device", name, "error", err)
			continue
		}
		d, err := describe(v, 1)
		C.ibv_close_device(v)
		if err != nil {
			p.log.Warn("RDMA device cannot be queried", "device", name, "error", err)
			continue
		}
		ds = append(ds, d)
	}
	return ds, nil
}

// describe queries a device and one of its ports.
func describe(v *C.struct_ibv_context, port int) (verbs.Device, error) {
	var d C.struct_farblk_device
	if r := C.farblk_describe(v, C.int(port), &d); r != 0 {
		return verbs.Device{}, callError("ibv_query_device", int(-r), "RDMA device")
	}
	name := C.GoString(&d.name[0])
	return verbs.Device{
		Name:       name,
		Link:       linkOf(int(d.node_type), int(d.link_layer)),
		NetDevice:  netDevice(name, port),
		MaxQPDepth: int(d.max_qp_wr), MaxSGE: min(int(d.max_sge), verbs.MaxSGE), MaxCQE: int(d.max_cqe),
		MaxResponderResources: int(d.max_rd_atom), MaxInitiatorDepth: int(d.max_init_rd_atom),
		MaxMR: uint64(d.max_mr_size),
	}, nil
}
