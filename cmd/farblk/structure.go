package main

import (
	"encoding"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"farblk/host/nvme"
)

// field is one field of an NVMe data structure under the name that nvme-cli gives it: the specification's, in
// lower case.
type field struct {
	name  string
	value any
}

// bitFields are shown in hexadecimal.
var bitFields = []string{
	"vid", "ssvid", "cmic", "cntlid", "ver", "rtd3r", "rtd3e", "oaes", "ctratt", "rrls", "nvmsr", "vwci", "mec",
	"oacs", "frmw", "lpa", "avscc", "apsta", "hctma", "sanicap", "anacap", "sqes", "cqes", "oncs", "fuses", "fna",
	"vwc", "icsvscc", "nwpc", "cdfs", "sgls", "fcatt", "ofcs", "nsfeat", "flbas", "mc", "dpc", "dps", "nmic",
	"rescap", "fpi", "dlfeat", "nsattr", "critical_warning",
}

// fieldsOf lists the fields of a structure of package nvme.
func fieldsOf(v any) []field {
	r := reflect.Indirect(reflect.ValueOf(v))
	var fs []field
	for i := range r.NumField() {
		fs = append(fs, field{strings.ToLower(r.Type().Field(i).Name), plain(r.Field(i).Interface())})
	}
	return fs
}

// plain makes byte arrays and identifiers text; other values stay what they are.
func plain(v any) any {
	switch t := v.(type) {
	case nvme.Uint128, nvme.Version:
		return t
	case encoding.TextMarshaler:
		b, err := t.MarshalText()
		if err != nil {
			return err.Error()
		}
		return string(b)
	case string:
		return printable(t)
	}
	r := reflect.ValueOf(v)
	if r.Kind() == reflect.Array && r.Type().Elem().Kind() == reflect.Uint8 {
		b := make([]byte, r.Len())
		reflect.Copy(reflect.ValueOf(b), r)
		return hex.EncodeToString(b)
	}
	return v
}

// printFields writes "name : value" lines, or one JSON object.
func printFields(w io.Writer, fs []field, asJSON bool) error {
	if asJSON {
		return printJSON(w, objectOf(fs))
	}
	for _, f := range fs {
		fmt.Fprintf(w, "%-10s: %s\n", f.name, show(f))
	}
	return nil
}

func objectOf(fs []field) map[string]any {
	m := map[string]any{}
	for _, f := range fs {
		m[f.name] = f.value
	}
	return m
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func show(f field) string {
	if r := reflect.ValueOf(f.value); r.CanUint() && slices.Contains(bitFields, f.name) {
		return fmt.Sprintf("%#x", r.Uint())
	}
	return fmt.Sprint(f.value)
}
