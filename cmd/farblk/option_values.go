package main

import (
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
)

// The words that an option takes, the default first.
var (
	providers     = []string{"auto", "verbs", "iwarp"}
	outputFormats = []string{"text", "json"}
	benchModes    = []string{"randread", "read", "write", "randwrite", "randrw"}
)

// Each of these reads an option into *to, and leaves that alone where the option is not given or the command lacks it.

// numberOption is for whole numbers from low to high.
func numberOption[T ~int | ~int64 | ~uint8 | ~uint32](c *cli.Context, name string, low, high int64, to *T) error {
	if !c.IsSet(name) {
		return nil
	}
	n, err := parseNumber(c.String(name), low, high)
	if err != nil {
		return usagef("--%s %v", name, err)
	}
	*to = T(n)
	return nil
}

// secondsOption is for times from low to high.
func secondsOption(c *cli.Context, name string, low, high time.Duration, to *time.Duration) error {
	if !c.IsSet(name) {
		return nil
	}
	d, err := parseSeconds(c.String(name))
	if err != nil || d < low || d > high {
		return usagef("--%s %q is not a number of seconds from %s to %s, nor such a time with its unit, as 500ms",
			name, c.String(name), inSeconds(low), inSeconds(high))
	}
	*to = d
	return nil
}

func inSeconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) }

// sizeOption is for bytes from low to high.
func sizeOption[T ~int | ~int64](c *cli.Context, name string, low, high int64, to *T) error {
	if !c.IsSet(name) {
		return nil
	}
	n, err := parseSize(c.String(name))
	if err != nil || n < low || n > high {
		return usagef("--%s %q is not a size from %s to %s, such as 4096, 4k or 1G", name, c.String(name), formatSize(low), formatSize(high))
	}
	*to = T(n)
	return nil
}

// wordOption is for one of some words, of which the first is meant when the option is not given.
func wordOption(c *cli.Context, name string, words []string) (string, error) {
	given := c.String(name)
	if given == "" {
		return words[0], nil
	}
	for _, w := range words {
		if w == given {
			return w, nil
		}
	}
	return "", usagef("--%s %q: %s", name, given, anyOf(words))
}

// anyOf is "a, b or c".
func anyOf(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
