package session

import (
	"fmt"
	"io"
	"strings"

	"farblk/host"
)

// writeMetrics writes a session's state in Prometheus' text format (version 0.0.4).
func writeMetrics(w io.Writer, s *Status) {
	base := fmt.Sprintf(`connection=%q,subsystem=%q,address=%q`, s.Name, labelText(s.Config.Subsystem), s.Address)
	metric := func(name, kind, help string) { fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind) }
	value := func(name, labels string, v any) { fmt.Fprintf(w, "%s{%s%s} %v\n", name, base, labels, v) }

	metric("farblk_state", "gauge", "1 for the state that the controller is in.")
	value("farblk_state", fmt.Sprintf(",state=%q", s.State), 1)
	metric("farblk_namespace_bytes", "gauge", "Size of a namespace.")
	for _, n := range s.Namespaces {
		value("farblk_namespace_bytes", fmt.Sprintf(`,nsid="%d"`, n.NSID), n.Size)
	}
	c := s.Counters
	if c == nil {
		return
	}
	metric("farblk_resets_total", "counter", "Times that the connection was lost.")
	value("farblk_resets_total", "", c.Resets)
	metric("farblk_pool_bytes", "gauge", "Memory for data.")
	value("farblk_pool_bytes", "", c.PoolSize)
	metric("farblk_pool_leased_bytes", "gauge", "Memory for data that is in use.")
	value("farblk_pool_leased_bytes", "", c.PoolLeased)
	for _, m := range []struct {
		name, kind, help string
		of               func(q *host.QueueCounters) any
	}{
		{"farblk_completed_commands_total", "counter", "I/O commands completed, with whatever status.", func(q *host.QueueCounters) any { return q.Completed }},
		{"farblk_split_commands_total", "counter", "Additional commands because a request was too large for one.", func(q *host.QueueCounters) any { return q.Splits }},
		{"farblk_retried_commands_total", "counter", "Commands sent again after a status that allows it.", func(q *host.QueueCounters) any { return q.Retried }},
		{"farblk_resent_commands_total", "counter", "Commands sent again after the connection was lost.", func(q *host.QueueCounters) any { return q.Resent }},
		{"farblk_outstanding_commands", "gauge", "I/O commands that the controller has.", func(q *host.QueueCounters) any { return q.Outstanding }},
		{"farblk_in_capsule_writes", "gauge", "Writes with their data in the capsule, since the last connect.", func(q *host.QueueCounters) any { return q.Transport.InCapsule }},
		{"farblk_read_bytes", "gauge", "Bytes read since the last connect.", func(q *host.QueueCounters) any { return q.Transport.BytesRead }},
		{"farblk_written_bytes", "gauge", "Bytes written since the last connect.", func(q *host.QueueCounters) any { return q.Transport.BytesWrite }},
	} {
		metric(m.name, m.kind, m.help)
		for i := range c.Queues {
			value(m.name, fmt.Sprintf(`,queue="%d"`, i+1), m.of(&c.Queues[i]))
		}
	}
}

// labelText leaves out what a label's quotes could not hold the way Go writes it.
func labelText(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
}
