package rdmacm

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"farblk/transport/verbs"
)

// sysDevices lists the RDMA devices that the kernel has.
const sysDevices = "/sys/class/infiniband"

// linkOf tells the network from enum ibv_node_type (RNIC is 4) and the port's link layer (1 InfiniBand, 2 Ethernet).
func linkOf(nodeType, linkLayer int) verbs.Link {
	switch {
	case nodeType == 4:
		return verbs.LinkIWARP
	case linkLayer == 1:
		return verbs.LinkInfiniBand
	case linkLayer == 2:
		return verbs.LinkRoCE
	default:
		return verbs.LinkUnknown
	}
}

// netDevice finds the network interface of a device's port: by the GID table (RoCE), by the PCI function
// (adapters), by rxe's own attribute, or by the MAC address that an iWARP device has for a GID. "" if unknown.
func netDevice(device string, port int) string {
	dir := filepath.Join(sysDevices, device)
	portDir := filepath.Join(dir, "ports", strconv.Itoa(port))
	if b, err := os.ReadFile(filepath.Join(portDir, "gid_attrs/ndevs/0")); err == nil {
		if name := strings.TrimSpace(string(b)); name != "" {
			return name
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "parent")); err == nil {
		return strings.TrimSpace(string(b))
	}
	if nets, err := os.ReadDir(filepath.Join(dir, "device/net")); err == nil && len(nets) == 1 {
		return nets[0].Name()
	}
	if b, err := os.ReadFile(filepath.Join(portDir, "gids/0")); err == nil {
		interfaces, _ := net.Interfaces()
		return interfaceOfGID(strings.TrimSpace(string(b)), interfaces)
	}
	return ""
}

// interfaceOfGID finds the interface whose MAC address the GID begins with.
func interfaceOfGID(gid string, interfaces []net.Interface) string {
	a, err := netip.ParseAddr(gid)
	if err != nil || !a.Is6() {
		return ""
	}
	b := a.As16()
	for _, i := range interfaces {
		if len(i.HardwareAddr) == 6 && string(i.HardwareAddr) == string(b[:6]) {
			return i.Name
		}
	}
	return ""
}
