package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// parseSize reads a number of bytes: digits and perhaps K, M, G, T or P, which are powers of 1024; "4k",
// "4KiB" and "4096" are the same.
func parseSize(s string) (int64, error) {
	bad := fmt.Errorf("%q is not a size such as 4096, 4k or 1G", s)
	t := strings.ToUpper(s)
	if rest, ok := strings.CutSuffix(t, "IB"); ok && rest != "" && !isDigit(rest[len(rest)-1]) {
		t = rest
	}
	shift := 0
	if t != "" {
		if i := strings.IndexByte("KMGTP", t[len(t)-1]); i >= 0 {
			shift, t = 10*(i+1), t[:len(t)-1]
		}
	}
	if t == "" || !isDigit(t[0]) {
		return 0, bad
	}
	n, err := strconv.ParseInt(t, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange) || err == nil && n > math.MaxInt64>>shift:
		return 0, fmt.Errorf("%q is too large", s)
	case err != nil:
		return 0, bad
	}
	return n << shift, nil
}

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

// parseSeconds reads a duration as nvme-cli takes it, in seconds, or with a unit: "10", "1.5s", "500ms".
func parseSeconds(s string) (time.Duration, error) {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return time.ParseDuration(s)
	}
	if n *= float64(time.Second); !(math.Abs(n) < math.MaxInt64) { // nor NaN
		return 0, strconv.ErrRange
	}
	return time.Duration(n), nil
}

// parseNumber reads a decimal or 0x number from low to high.
func parseNumber(s string, low, high int64) (int64, error) {
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil || n < low || n > high {
		return 0, fmt.Errorf("%q is not a number from %d to %d", s, low, high)
	}
	return n, nil
}

// formatSize is for people: "1 GiB", "1.5 MiB", "512 B".
func formatSize(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/1024, 0
	for f >= 1024 && i < 4 {
		f, i = f/1024, i+1
	}
	return strings.TrimSuffix(strings.TrimSuffix(fmt.Sprintf("%.2f", f), "0"), ".0") + " " + "KMGTP"[i:i+1] + "iB"
}

// countOf is "1 queue", "2 queues".
func countOf[T int | uint64](n T, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}
