package session

import (
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxLog is how large a session's log becomes, in bytes, before it is put aside as log.old.
const MaxLog = 1 << 20

// OpenLog gives a logger that writes to the folder's log, where this process's standard error goes as well.
func (f *Folder) OpenLog() (*slog.Logger, error) {
	w := &logFile{path: f.file("log")}
	if err := w.open(); err != nil {
		return nil, err
	}
	return slog.New(slog.NewTextHandler(w, nil)), nil
}

// logFile is a file that is replaced when it has become too large.
type logFile struct {
	path string

	mu   sync.Mutex
	f    *os.File
	size int64
}

func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	if l.f != nil {
		l.f.Close()
	}
	l.f, l.size = f, st.Size()
	// What the runtime says when it dies belongs here, too.
	return os.NewSyscallError("dup", unix.Dup2(int(f.Fd()), 2))
}

// Write implements io.Writer.
func (l *logFile) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.size+int64(len(b)) > MaxLog {
		if err := os.Rename(l.path, l.path+".old"); err == nil {
			_ = l.open() // else the old one goes on
		}
	}
	n, err := l.f.Write(b)
	l.size += int64(n)
	return n, err
}
