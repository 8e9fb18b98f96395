// Package nvme holds the wire formats of NVM Express that a fabrics host and
// target exchange: commands, completions, status codes, data structures and log
// pages. It moves no data and knows no transport.
//
// Sources are the NVM Express Base Specification 2.0 and 2.1 ("Base"), the NVM
// Command Set Specification 1.0 ("NVM"), and the RDMA Transport Specification
// 1.0 ("RDMA"); each type cites its section.
//
// Two shapes are used. Structures that live in registered memory and are touched
// for every command, [Command] and [Completion], are byte views with getters
// and setters. Everything else is a Go struct with a Parse function, which
// checks the length and never trusts a count, and an Append method, which
// writes the whole wire structure. All fields are little-endian.
//
// Reserved and vendor specific bytes are not kept: parsing ignores them and
// encoding writes zeros.
package nvme
