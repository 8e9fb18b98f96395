package nbd

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Clients describes the clients that use an export now, for people: their process where they come over a unix
// socket, else their address.
func (s *Server) Clients() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for sock, c := range s.socks {
		if c != nil {
			all = append(all, clientName(sock))
		}
	}
	slices.Sort(all)
	return all
}

func clientName(sock net.Conn) string {
	if a := sock.RemoteAddr(); a != nil && a.Network() != "unix" {
		return a.String()
	}
	raw, err := rawConn(sock)
	if err != nil {
		return "unknown client"
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil || err != nil {
		return "unknown client"
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cred.Pid))
	return fmt.Sprintf("process %d (%s)", cred.Pid, strings.TrimSpace(string(comm)))
}
