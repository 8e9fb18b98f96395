package nbd

import "farblk/blockdev"

// task is a command under way, or one part of a command whose data need several buffers: the first part stands
// for the whole. All of a connection's tasks are made when it begins.
//
// Before it is submitted a task belongs to the connection's loop; then to the device; from Done on to the
// connection's mu, while it is on a list.
type task struct {
	req   blockdev.Request
	lease []byte // nil: none; in full, of which req.Data is the part in use
	next  *task  // on the list of free tasks, or of those to be answered
	more  *task  // the next part of the same command

	head *task // the first part; itself, of a command with one

	// Of a first part only:
	request
	last *task // the last part so far
	// left counts the parts not completed, and one more while the loop still adds parts.
	left int
	// unsent counts the parts not yet answered of a Read that is answered part by part.
	unsent     int
	err        error // of the first part that failed
	errno      uint32
	chunked    bool // answered part by part
	structured bool // answered with a structured reply
	large      bool // holds the export's right to several buffers
	thenFlush  bool // a Discard with FUA: NVMe has no such thing
}

// taskList is a first-in first-out list of tasks, linked through next.
type taskList struct {
	first, last *task
	n           int
}

func (l *taskList) push(t *task) {
	t.next = nil
	if l.first == nil {
		l.first = t
	} else {
		l.last.next = t
	}
	l.last = t
	l.n++
}

func (l *taskList) pop() *task {
	t := l.first
	if t != nil {
		l.first, t.next = t.next, nil
		l.n--
	}
	return t
}
