package nbd

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(ownerFile); path != "" { // a child of the tests of the kernel attach
		fmt.Fprintln(os.Stderr, beOwner(path))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}
