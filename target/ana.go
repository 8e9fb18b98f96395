package target

import (
	"fmt"
	"slices"

	"farblk/host/nvme"
)

// anaKey names the access that hosts have through one port to one group.
type anaKey struct {
	port  uint16
	group uint32
}

// SetANAState sets the access through a port (0: through all) to the namespaces
// of an ANA group, and tells connected hosts. Groups begin as optimized.
func (s *Subsystem) SetANAState(port uint16, group uint32, state nvme.ANAState) error {
	if group < 1 || group > maxGroups {
		return fmt.Errorf("ANA group %d is not in 1 to %d", group, maxGroups)
	}
	s.mu.Lock()
	if port == 0 {
		for k := range s.ana {
			if k.group == group {
				delete(s.ana, k)
			}
		}
	}
	s.ana[anaKey{port, group}] = state
	s.anaCount++
	s.changes.Add(1)
	s.mu.Unlock()
	s.notify(nvme.EventANAChanged, 0)
	return nil
}

// anaState returns the state of a group; s.mu is held.
func (s *Subsystem) anaState(port uint16, group uint32) nvme.ANAState {
	if st, ok := s.ana[anaKey{port, group}]; ok {
		return st
	}
	if st, ok := s.ana[anaKey{0, group}]; ok {
		return st
	}
	return nvme.ANAOptimized
}

// anaStatus returns what I/O fails with in a state, 0 if it does not.
func anaStatus(st nvme.ANAState) nvme.StatusCode {
	switch st {
	case nvme.ANAInaccessible:
		return nvme.StatusANAInaccessible
	case nvme.ANAPersistentLoss:
		return nvme.StatusANAPersistentLoss
	case nvme.ANAChange:
		return nvme.StatusANATransition
	}
	return 0
}

// anaLog builds the log as a controller on that port shows it.
func (s *Subsystem) anaLog(port uint16, groupsOnly bool) nvme.ANALog {
	s.mu.Lock()
	defer s.mu.Unlock()
	groups := make(map[uint32][]uint32)
	for id, n := range s.namespaces {
		groups[n.group] = append(groups[n.group], id)
	}
	log := nvme.ANALog{ChangeCount: s.anaCount}
	for g := uint32(1); g <= maxGroups; g++ {
		ids, ok := groups[g]
		if !ok {
			continue
		}
		slices.Sort(ids)
		if groupsOnly {
			ids = nil
		}
		log.Groups = append(log.Groups, nvme.ANAGroup{
			ID: g, ChangeCount: s.anaCount, State: s.anaState(port, g), NSIDs: ids,
		})
	}
	return log
}
