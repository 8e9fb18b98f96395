package fuse

import "log/slog"

// RemoveStale takes away the mounts at path that a killed farblk left behind. No mount at path is no error; one
// that is being served is (EBUSY), and stays.
func RemoveStale(path string, log *slog.Logger) error {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	path, err := resolve(path)
	if err != nil {
		return err
	}
	return clearStale(path, log)
}
