package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v2"
)

// release is set at link time: -ldflags "-X main.release=1.2.3".
var release string

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "show the version",
		Flags: []cli.Flag{outputFlag()},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			asJSON, err := wantJSON(c)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(c.App.Writer).Encode(map[string]string{
					"version": version(), "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
				})
			}
			printVersion(c.App.Writer)
			return nil
		},
	}
}

func printVersion(w io.Writer) {
	fmt.Fprintf(w, "farblk %s (%s, %s/%s)\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// version is the release, or the commit that was built.
func version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+changes"
		}
	}
	if revision == "" {
		return "devel"
	}
	return "devel-" + revision + dirty
}
