package session

import (
	"fmt"
	"net"
	"os"
)

// Notify tells the service manager about this process, in the protocol of sd_notify(3): assignments such as
// "READY=1", one a line, as one datagram to the socket in NOTIFY_SOCKET. Without a service manager it does
// nothing.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' { // abstract
		path = "\x00" + path[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("service manager: %w", err)
	}
	defer c.Close()
	_, err = c.Write([]byte(state))
	return err
}
