package main

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// bashCompletion asks the program itself what can follow.
const bashCompletion = `# bash completion for farblk: source <(farblk completion bash)
_farblk() {
	local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" words values=''
	if [[ $cur == = ]]; then # of --option=VALUE
		cur=''
	elif [[ $before == = ]]; then
		before="${COMP_WORDS[COMP_CWORD - 2]}"
	fi
	if ((COMP_CWORD == 1)); then
		words=$("${COMP_WORDS[0]}" --generate-bash-completion)
	else
		words=$("${COMP_WORDS[0]}" "${COMP_WORDS[1]}" --generate-bash-completion)
	fi
	if [[ $before == -* ]]; then
		values=$(sed -n "s/^$before=//p" <<<"$words")
	fi
	words=$(grep -v = <<<"$words")
	if [[ -n $values ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
	elif [[ $cur == -* ]] || ((COMP_CWORD == 1)); then
		mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
	else
		mapfile -t COMPREPLY < <(compgen -W "$(grep -v ^- <<<"$words")" -- "$cur"; compgen -f -- "$cur")
	fi
}
complete -o filenames -F _farblk farblk
`

// optionValues are what completion offers for an option.
var optionValues = map[string][]string{
	"adrfam":        {"ipv4", "ipv6", "ib"},
	"block-size":    {"512", "4096"},
	"export":        {"nbd", "nbd-unix", "nbd-tcp", "fuse", "none"},
	"output-format": outputFormats,
	"provider":      providers,
	"rw":            benchModes,
	"transport":     {"rdma"},
}

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

// completeFlags prints a command's long options, lines such as "-o=json" and "--provider=iwarp" for the words that an
// option takes, and the connections if it takes one.
func completeFlags(c *cli.Context) {
	for _, f := range c.Command.VisibleFlags() {
		for _, n := range f.Names() {
			if strings.HasPrefix(n, "generate-") {
				continue
			}
			option := "-" + n
			if len(n) > 1 {
				option = "--" + n
				fmt.Fprintln(c.App.Writer, option)
			}
			for _, v := range optionValues[f.Names()[0]] {
				fmt.Fprintln(c.App.Writer, option+"="+v)
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
