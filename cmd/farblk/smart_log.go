package main

import (
	"fmt"
	"math"
	"strings"

	"github.com/urfave/cli/v2"

	"farblk/host/nvme"
)

func smartLogCommand() *cli.Command {
	return deviceCommand("smart-log", "show a controller's health log", []cli.Flag{namespaceFlag()}, showSMARTLog)
}

func showSMARTLog(c *cli.Context, d *device) error {
	nsid := nvme.AllNamespaces
	if err := numberOption(c, "namespace-id", 1, math.MaxUint32, &nsid); err != nil {
		return err
	}
	b, err := d.log(nvme.LogSMART, nsid, 512)
	if err != nil {
		return err
	}
	s, err := nvme.ParseSMARTLog(b)
	if err != nil {
		return err
	}
	fs := smartFields(s)
	if !d.asJSON {
		for i, f := range fs {
			if k, ok := f.value.(uint16); ok && strings.HasPrefix(f.name, "temperature") {
				fs[i].value = fmt.Sprintf("%d K (%d C)", k, int(k)-273)
			}
		}
	}
	return printFields(c.App.Writer, fs, d.asJSON)
}

// smartFields has nvme-cli's names. Temperatures are in kelvin.
func smartFields(s nvme.SMARTLog) []field {
	fs := []field{
		{"critical_warning", s.CriticalWarning},
		{"temperature", s.Temperature},
		{"avail_spare", s.AvailableSpare},
		{"spare_thresh", s.AvailableSpareThreshold},
		{"percent_used", s.PercentageUsed},
		{"endurance_grp_critical_warning_summary", s.EnduranceGroupWarning},
		{"data_units_read", s.DataUnitsRead},
		{"data_units_written", s.DataUnitsWritten},
		{"host_read_commands", s.HostReads},
		{"host_write_commands", s.HostWrites},
		{"controller_busy_time", s.ControllerBusyMinutes},
		{"power_cycles", s.PowerCycles},
		{"power_on_hours", s.PowerOnHours},
		{"unsafe_shutdowns", s.UnsafeShutdowns},
		{"media_errors", s.MediaErrors},
		{"num_err_log_entries", s.ErrorLogEntries},
		{"warning_temp_time", s.WarningTempMinutes},
		{"critical_comp_time", s.CriticalTempMinutes},
		{"thm_temp1_trans_count", s.ThermalTransitions[0]},
		{"thm_temp2_trans_count", s.ThermalTransitions[1]},
		{"thm_temp1_total_time", s.ThermalSeconds[0]},
		{"thm_temp2_total_time", s.ThermalSeconds[1]},
	}
	for i, t := range s.Sensors {
		if t != 0 {
			fs = append(fs, field{"temperature_sensor_" + string(rune('1'+i)), t})
		}
	}
	return fs
}
