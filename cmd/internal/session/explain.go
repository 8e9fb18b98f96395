package session

import (
	"errors"
	"fmt"

	"farblk/host/nvme"
)

// subNQNOffset is where Connect's data have the subsystem NQN (NVMe over Fabrics 1.1a section 3.3).
const subNQNOffset = 256

// Explain adds to a failed connect what a user can do about it.
func (c *Config) Explain(err error) error {
	var status *nvme.StatusError
	if !errors.As(err, &status) || status.Fabrics != nvme.FabricsConnect {
		return err
	}
	switch status.Status.Code() {
	case nvme.StatusConnectInvalidParameters:
		if at, inData := nvme.ConnectParameter(status.Result).Offset(); inData && at == subNQNOffset {
			return fmt.Errorf("the target at %s has no subsystem %s on this port: see 'farblk discover -a %s -s %d': %w",
				c.Address(), c.Subsystem, c.Remote, c.Port, err)
		}
	case nvme.StatusConnectInvalidHost:
		return fmt.Errorf("subsystem %s does not allow this host: allow %s at the target, or choose another host NQN with -q: %w",
			c.Subsystem, c.HostNQN, err)
	case nvme.StatusConnectControllerBusy:
		return fmt.Errorf("the target at %s has no free controller for %s: %w", c.Address(), c.Subsystem, err)
	case nvme.StatusAuthRequired:
		return fmt.Errorf("subsystem %s wants in-band authentication, which is not supported: %w", c.Subsystem, err)
	}
	return fmt.Errorf("subsystem %s at %s: %w", c.Subsystem, c.Address(), err)
}
