package main

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// bashCompletion asks the program itself what can follow.
const bashCompletion = `# bash completion for farblk: source <(farblk completion bash)
_farblk() {
	local cur="${COMP_WORDS[COMP_CWORD]}" words
	if [[ $COMP_CWORD -eq 1 ]]; then
		words=$("${COMP_WORDS[0]}" --generate-bash-completion)
	else
		words=$("${COMP_WORDS[0]}" "${COMP_WORDS[1]}" --generate-bash-completion)
	fi
	if [[ $cur == -* || $COMP_CWORD -eq 1 ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
	else
		mapfile -t COMPREPLY < <(compgen -W "$(grep -v ^- <<<"$words")" -- "$cur"; compgen -f -- "$cur")
	fi
}
complete -o filenames -F _farblk farblk
`

func completionCommand() *cli.Command {
	return &cli.Command{
		Name:        "completion",
		Usage:       "print a shell's completion script",
		ArgsUsage:   "[bash]",
		Description: "For this shell: source <(farblk completion bash)",
		Action: func(c *cli.Context) error {
			shell := "bash"
			if c.NArg() > 0 {
				var err error
				if shell, err = oneArg(c, "shell"); err != nil {
					return err
				}
			}
			if shell != "bash" {
				return usagef("no completion for the shell %q: only bash", shell)
			}
			_, err := fmt.Fprint(c.App.Writer, bashCompletion)
			return err
		},
	}
}

// completeFlags prints a command's long options, and the connections if it takes one.
func completeFlags(c *cli.Context) {
	for _, f := range c.Command.VisibleFlags() {
		for _, n := range f.Names() {
			if len(n) > 1 && !strings.HasPrefix(n, "generate-") {
				fmt.Fprintln(c.App.Writer, "--"+n)
			}
		}
	}
	if !strings.Contains(c.Command.ArgsUsage, "DEVICE") {
		return
	}
	dir, err := openStateDir()
	if err != nil {
		return
	}
	entries, _ := dir.Scan()
	for _, e := range entries {
		fmt.Fprintln(c.App.Writer, e.Name)
	}
}
