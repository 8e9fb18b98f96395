package session

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"farblk/host"
)

// Exporter gives namespaces to this machine in one way. The session calls its methods from one goroutine, but InUse
// and Leftovers from any.
type Exporter interface {
	// Add exports a namespace and returns when it can be used.
	Add(ctx context.Context, n *host.Namespace) (Export, error)
	// Has tells whether the export that Add has made is still there.
	Has(n *host.Namespace) bool
	// Remove ends the export of a namespace that has gone, also one in use. After an error it can be called again.
	Remove(ctx context.Context, n *host.Namespace) error
	// InUse returns a *BusyError when somebody has an export open.
	InUse() error
	// Leftovers are what would stay in the system if this process died.
	Leftovers() []Leftover
	// Close ends every export when what was asked of it is done, by ctx's deadline in any case. What is in use
	// (*BusyError) or not done by then stays as it is and is served on, and Close can be called again. With force it
	// takes exports away from their users, and does not wait.
	Close(ctx context.Context, force bool) error
}

// Surroundings is what an Exporter is given by its session.
type Surroundings struct {
	Folder string // the session's, for exports without a place of their own
	Config *Config
	Log    *slog.Logger
	// Note tells the user something, in the result of the start.
	Note func(text string)
	// Record is to be called as soon as Leftovers has more to tell.
	Record func()
	// TakeOver is what a session that died has left in use, to be gone on with.
	TakeOver []Leftover
}

// Names of what exports may make in a session's folder.
const (
	SocketName = "nbd.sock"
	FilesName  = "namespaces"
)

// BusyError says that an export is in use: by whom, as a sentence.
type BusyError struct{ Detail string }

// Error says which and by whom.
func (e *BusyError) Error() string { return e.Detail }

// UnfinishedError says what an orderly disconnect would have had to wait for longer than it may.
type UnfinishedError struct{ Detail string }

// Error says what it is.
func (e *UnfinishedError) Error() string { return e.Detail }

// Leftover is something that outlives a process that dies.
type Leftover struct {
	Kind string `json:"kind"`
	Path string `json:"path"` // mount point, device or socket
	NSID uint32 `json:"nsid,omitempty"`
}

func readLeftovers(folder string) (all []Leftover) {
	b, err := os.ReadFile(filepath.Join(folder, "exports.json"))
	if err != nil || json.Unmarshal(b, &all) != nil {
		return nil
	}
	return all
}

// removeLeftovers undoes what the dead session of this folder has left in the system, and returns what it could not.
func (d *StateDir) removeLeftovers(folder string, force bool) error {
	var errs []error
	for _, l := range readLeftovers(folder) {
		errs = append(errs, d.RemoveLeftover(l, force))
	}
	return errors.Join(errs...)
}

// needsHardening tells whether the kernel may write back memory through one of the exports.
func needsHardening(specs []ExportSpec) bool {
	for _, e := range specs {
		if e.Kind == KindNBD || e.Kind == KindFUSE {
			return true
		}
	}
	return false
}
