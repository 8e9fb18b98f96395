// Command farblk connects this machine to NVMe subsystems over RDMA, in user space, and gives their
// namespaces to it as block devices or files.
//
// Each subcommand is one file. The words and letters of the options are nvme-cli's where nvme-cli has them.
// Results go to standard output, everything else to standard error; a failure is one line and exit status 1.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// usageError is a command line that makes no sense; the message is followed by where to find help.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

func usagef(format string, a ...any) error { return &usageError{fmt.Sprintf(format, a...)} }

// run executes one command line (without the program's name) and returns the exit status.
func run(args []string, stdout, stderr io.Writer) int {
	app := newApp(stdout, stderr)
	name := "farblk"
	if len(args) > 0 {
		if c := app.Command(args[0]); c != nil {
			name += " " + c.Name
			var err error
			if args, err = normalise(args, c); err != nil {
				return report(stderr, name, err)
			}
		}
	}
	return report(stderr, name, app.Run(append([]string{"farblk"}, args...)))
}

// report prints err as one line and returns the exit status.
func report(stderr io.Writer, name string, err error) int {
	if err == nil {
		return 0
	}
	lines := strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' })
	msg := strings.Join(strings.Fields(strings.Join(lines, "; ")), " ")
	var usage *usageError
	if errors.As(err, &usage) {
		msg += ": try '" + name + " --help'"
	}
	fmt.Fprintf(stderr, "%s: %s\n", name, msg)
	return 1
}

func newApp(stdout, stderr io.Writer) *cli.App {
	cli.VersionFlag = &cli.BoolFlag{Name: "version", Aliases: []string{"V"}, Usage: "print the version"}
	cli.VersionPrinter = func(*cli.Context) { printVersion(stdout) }
	commands := []*cli.Command{
		discoverCommand(), connectCommand(), connectAllCommand(), listCommand(), listSubsysCommand(),
		disconnectCommand(), idCtrlCommand(), idNSCommand(), smartLogCommand(), errorLogCommand(),
		anaLogCommand(), metricsCommand(), benchCommand(), targetCommand(), genHostNQNCommand(),
		showHostNQNCommand(), versionCommand(), completionCommand(), sessionCommand(),
	}
	onUsage := func(_ *cli.Context, err error, _ bool) error { return &usageError{err.Error()} }
	for _, c := range commands {
		c.OnUsageError = onUsage
		c.HideHelpCommand = true
		c.BashComplete = completeFlags
	}
	return &cli.App{
		Name:  "farblk",
		Usage: "NVMe over RDMA in user space: connect to remote namespaces as block devices or files",
		Description: "Start with 'farblk discover -a ADDR', then 'farblk connect -a ADDR -n NQN'.\n" +
			"Where there is no RDMA device, farblk speaks iWARP itself over TCP.",
		Version:                   version(),
		Commands:                  commands,
		Writer:                    stdout,
		ErrWriter:                 stderr,
		EnableBashCompletion:      true,
		DisableSliceFlagSeparator: true,
		HideHelpCommand:           true,
		OnUsageError:              onUsage,
		ExitErrHandler:            func(*cli.Context, error) {},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return usagef("unknown command %q", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
	}
}

// normalise moves operands behind the options, as getopt does, so that both "id-ns DEVICE -n 1" and
// "id-ns -n 1 DEVICE" work, and splits "-i4" and "-vo". It knows c's options and refuses unknown ones.
func normalise(args []string, c *cli.Command) ([]string, error) {
	takesValue := map[string]bool{"help": false, "h": false, "generate-bash-completion": false}
	for _, f := range c.Flags {
		_, isBool := f.(*cli.BoolFlag)
		for _, n := range f.Names() {
			takesValue[n] = !isBool
		}
	}
	options, operands := []string{args[0]}, []string{}
	for i := 1; i < len(args); i++ {
		a := args[i]
		switch {
		case a == "--":
			operands = append(operands, args[i+1:]...)
			i = len(args)
		case len(a) < 2 || a[0] != '-':
			operands = append(operands, a)
		case strings.HasPrefix(a, "--"):
			name, _, inline := strings.Cut(a[2:], "=")
			value, known := takesValue[name]
			if !known {
				return nil, usagef("unknown option --%s", name)
			}
			options = append(options, a)
			if value && !inline {
				if i+1 == len(args) {
					return nil, usagef("option --%s needs a value", name)
				}
				i++
				options[len(options)-1] += "=" + args[i]
			}
		default:
			for letters := a[1:]; letters != ""; {
				name := letters[:1]
				value, known := takesValue[name]
				if !known {
					return nil, usagef("unknown option -%s", name)
				}
				letters = letters[1:]
				if !value {
					options = append(options, "-"+name)
					continue
				}
				if letters == "" {
					if i+1 == len(args) {
						return nil, usagef("option -%s needs a value", name)
					}
					i++
					letters = args[i]
				}
				options = append(options, "-"+name+"="+strings.TrimPrefix(letters, "="))
				letters = ""
			}
		}
	}
	if len(operands) > 0 {
		options = append(append(options, "--"), operands...)
	}
	return options, nil
}

// noArgs refuses operands.
func noArgs(c *cli.Context) error {
	if c.NArg() > 0 {
		return usagef("unexpected argument %q", c.Args().First())
	}
	return nil
}

// oneArg is the one operand of a command, which what names.
func oneArg(c *cli.Context, what string) (string, error) {
	switch {
	case c.Args().First() == "":
		return "", usagef("no %s given", what)
	case c.NArg() == 1:
		return c.Args().First(), nil
	default:
		return "", usagef("unexpected argument %q", c.Args().Get(1))
	}
}
