package nbd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// The kernel's netlink interface (include/uapi/linux/nbd-netlink.h): family, commands, attributes.
const (
	netlinkFamily  = "nbd"
	netlinkVersion = 1

	nlConnect     = 1
	nlDisconnect  = 2
	nlReconfigure = 3

	attrIndex           = 1
	attrSize            = 2
	attrBlockSize       = 3
	attrTimeout         = 4
	attrServerFlags     = 5
	attrClientFlags     = 6
	attrSockets         = 7
	attrDeadConnTimeout = 8
	attrBackend         = 10

	attrSocketItem = 1
	attrSocketFD   = 1
)

// ErrNoModule says that the kernel's NBD driver is not there.
var ErrNoModule = errors.New("the kernel has no NBD driver, and \"modprobe nbd\" loads none: install this kernel's modules, or export in another way")

// ErrNotRoot says that the kernel refused for lack of rights.
var ErrNotRoot = errors.New("attaching a kernel NBD device needs root (CAP_SYS_ADMIN outside of any user namespace)")

// kernelSettings is what CONNECT and RECONFIGURE tell the kernel. Zero values are left out, but for the timeouts
// at CONNECT (flags are not 0): what an index's last user set stays otherwise.
type kernelSettings struct {
	index       int // -1: the kernel chooses
	size        int64
	blockSize   int
	flags       uint16
	timeout     time.Duration
	deadTimeout time.Duration
	fds         []int
	backend     string
}

func (k *kernelSettings) encode() ([]byte, error) {
	e := netlink.NewAttributeEncoder()
	if k.index >= 0 {
		e.Uint32(attrIndex, uint32(k.index))
	}
	if k.size > 0 {
		e.Uint64(attrSize, uint64(k.size))
	}
	if k.blockSize > 0 {
		e.Uint64(attrBlockSize, uint64(k.blockSize))
	}
	if k.flags != 0 {
		e.Uint64(attrServerFlags, uint64(k.flags))
		e.Uint64(attrClientFlags, 0) // neither is the last user's
		e.Uint64(attrTimeout, seconds(k.timeout))
	}
	if len(k.fds) > 0 {
		e.Uint64(attrDeadConnTimeout, seconds(k.deadTimeout))
		e.Nested(attrSockets, func(list *netlink.AttributeEncoder) error {
			for _, fd := range k.fds {
				list.Nested(attrSocketItem, func(item *netlink.AttributeEncoder) error {
					item.Uint32(attrSocketFD, uint32(fd))
					return nil
				})
			}
			return nil
		})
	}
	if k.backend != "" {
		e.String(attrBackend, k.backend)
	}
	return e.Encode()
}

func seconds(d time.Duration) uint64 { return uint64(math.Ceil(d.Seconds())) }

// kernelCall does one command, on a socket of its own, so that no other command's acknowledgement can be taken
// for its answer. The kernel does it while the message is being sent, which cannot be interrupted.
// CONNECT gives the index; the others are acknowledged.
func kernelCall(command uint8, k kernelSettings) (index int, err error) {
	data, err := k.encode()
	if err != nil {
		return 0, err
	}
	c, err := genetlink.Dial(nil)
	if err != nil {
		return 0, fmt.Errorf("netlink: %w", err)
	}
	defer c.Close()
	family, err := c.GetFamily(netlinkFamily)
	if errors.Is(err, os.ErrNotExist) {
		return 0, ErrNoModule
	}
	if err != nil {
		return 0, fmt.Errorf("netlink: %w", err)
	}
	flags := netlink.Request
	if command != nlConnect {
		flags |= netlink.Acknowledge
	}
	answers, err := c.Execute(genetlink.Message{
		Header: genetlink.Header{Command: command, Version: netlinkVersion}, Data: data,
	}, family.ID, flags)
	if errors.Is(err, unix.EPERM) {
		return 0, ErrNotRoot
	}
	if err != nil || command != nlConnect {
		return k.index, err
	}
	if len(answers) == 0 {
		return 0, errors.New("netlink: no answer to CONNECT")
	}
	d, err := netlink.NewAttributeDecoder(answers[0].Data)
	if err != nil {
		return 0, fmt.Errorf("netlink: answer to CONNECT: %w", err)
	}
	index = -1
	for d.Next() {
		if d.Type() == attrIndex {
			index = int(d.Uint32())
		}
	}
	if d.Err() != nil || index < 0 {
		return 0, fmt.Errorf("netlink: answer to CONNECT without an index: %w", d.Err())
	}
	return index, nil
}

// loadModule sees to it that the kernel's NBD driver is there.
func loadModule(ctx context.Context) error {
	if hasFamily() {
		return nil
	}
	out, err := exec.CommandContext(ctx, "modprobe", netlinkFamily).CombinedOutput()
	if hasFamily() {
		return nil
	}
	if s := strings.TrimSpace(string(out)); s != "" {
		return fmt.Errorf("%w (%s)", ErrNoModule, s)
	}
	if err != nil {
		return fmt.Errorf("%w (modprobe: %w)", ErrNoModule, err)
	}
	return ErrNoModule
}

func hasFamily() bool {
	c, err := genetlink.Dial(nil)
	if err != nil {
		return false
	}
	defer c.Close()
	_, err = c.GetFamily(netlinkFamily)
	return err == nil
}
