package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"farblk/cmd/internal/session"
	"farblk/host/nvme"
)

func listSubsysCommand() *cli.Command {
	return &cli.Command{
		Name:  "list-subsys",
		Usage: "show the connected subsystems and the paths to them",
		Flags: []cli.Flag{
			outputFlag(),
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "show the host's identity, too"},
		},
		Action: func(c *cli.Context) error {
			all, asJSON, err := listed(c)
			if err != nil {
				return err
			}
			hosts := hostsOf(all)
			if asJSON {
				return printJSON(c.App.Writer, hosts)
			}
			for _, h := range hosts {
				for _, s := range h.Subsystems {
					fmt.Fprintf(c.App.Writer, "%s - NQN=%s\n", s.Name, s.NQN)
					if c.Bool("verbose") {
						fmt.Fprintf(c.App.Writer, "    hostnqn=%s\n    hostid=%s\n", h.HostNQN, h.HostID)
					}
					fmt.Fprintln(c.App.Writer, "\\")
					for _, p := range s.Paths {
						fmt.Fprintf(c.App.Writer, " +- %s %s %s %s\n", p.Name, p.Transport, p.Address, p.State)
					}
				}
			}
			return nil
		},
	}
}

// The shapes of nvme-cli's list-subsys: hosts, their subsystems, the paths to those.
type (
	subsysHost struct {
		HostNQN    string
		HostID     nvme.UUID
		Subsystems []subsysEntry
	}
	subsysEntry struct {
		Name  string
		NQN   string
		Paths []subsysPath
	}
	subsysPath struct {
		Name      string
		Transport string
		Address   string // "traddr=10.0.0.1,trsvcid=4420"
		State     string
		Provider  string
	}
)

func hostsOf(all []session.Status) []subsysHost {
	hosts := []subsysHost{}
	for _, s := range all {
		h := -1
		for i := range hosts {
			if hosts[i].HostNQN == s.Config.HostNQN && hosts[i].HostID == s.Config.HostID {
				h = i
			}
		}
		if h < 0 {
			h = len(hosts)
			hosts = append(hosts, subsysHost{HostNQN: s.Config.HostNQN, HostID: s.Config.HostID})
		}
		e := -1
		for i := range hosts[h].Subsystems {
			if hosts[h].Subsystems[i].NQN == s.Config.Subsystem {
				e = i
			}
		}
		if e < 0 {
			e = len(hosts[h].Subsystems)
			hosts[h].Subsystems = append(hosts[h].Subsystems, subsysEntry{
				Name: fmt.Sprintf("farblk-subsys%d", e), NQN: s.Config.Subsystem,
			})
		}
		address := fmt.Sprintf("traddr=%s,trsvcid=%d", s.Config.Remote, s.Config.Port)
		if s.Config.Local.IsValid() {
			address += fmt.Sprintf(",host_traddr=%s", s.Config.Local)
		}
		sub := &hosts[h].Subsystems[e]
		sub.Paths = append(sub.Paths, subsysPath{s.Name, "rdma", address, s.State, s.Config.Provider})
	}
	return hosts
}
