package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"farblk/host"
	"farblk/host/nvme"
	"farblk/transport"
)

// Status is what a session says about itself on GET /status.
type Status struct {
	Name   string `json:"name"`
	PID    int    `json:"pid"`
	State  string `json:"state"` // the controller's, "connecting" before there is one, or Unresponsive
	Error  string `json:"error,omitempty"`
	Config Config `json:"config"`

	Device       string `json:"device"`  // local RDMA device
	Address      string `json:"address"` // "10.0.0.1:4420"
	ControllerID uint16 `json:"cntlid"`
	Model        string `json:"model"`
	Serial       string `json:"serial"`
	Firmware     string `json:"firmware"`
	IOQueues     int    `json:"io_queues"`
	QueueSize    int    `json:"queue_size"`
	MaxTransfer  int64  `json:"max_transfer"` // bytes of one command, 0: no limit

	Namespaces []NamespaceStatus `json:"namespaces"`
	Counters   *host.Counters    `json:"counters,omitempty"` // nil before there is a controller
}

// NamespaceStatus is a namespace with what only a list shows.
type NamespaceStatus struct {
	Namespace
	Used     int64  `json:"used"`                // bytes
	Error    string `json:"error,omitempty"`     // why it takes no I/O although its controller is live
	ANA      string `json:"ana_state,omitempty"` // where the controller reports it
	ReadOnly bool   `json:"read_only,omitempty"`
	EUI64    string `json:"eui64,omitempty"`
	NGUID    string `json:"nguid,omitempty"`
	UUID     string `json:"uuid,omitempty"`
}

// NamespaceOf is the namespace that an operand names: "farblk0n1", or the path or URI of an export that shows one
// namespace only. 0 if it names none.
func (s *Status) NamespaceOf(what string) (nsid uint32) {
	path, _ := filepath.Abs(what)
	for _, n := range s.Namespaces {
		if what == fmt.Sprintf("%sn%d", s.Name, n.NSID) {
			return n.NSID
		}
		for _, e := range n.Exports {
			if e.URI != "" && e.URI == what || e.URI == "" && e.Path == path {
				return n.NSID
			}
		}
	}
	return 0
}

// Unresponsive is the state shown for a session whose process lives but does not answer.
const Unresponsive = "unresponsive"

// Crashed is the state shown for a session whose process died while its devices were in use.
const Crashed = "crashed"

// AdminRequest is the body of POST /admin: a command that brings data from the controller. Only commands that
// change nothing are let through: Identify, Get Log Page, Get Features.
type AdminRequest struct {
	Opcode nvme.Opcode `json:"opcode"`
	NSID   uint32      `json:"nsid"`
	CDW10  [6]uint32   `json:"cdw10"`  // dwords 10 to 15
	Length int         `json:"length"` // bytes of data
}

// AdminResponse is its answer. Status is not 0 when the controller refused.
type AdminResponse struct {
	Status nvme.StatusCode `json:"status"`
	Result uint32          `json:"result"`
	Data   []byte          `json:"data"`
}

type disconnectRequest struct {
	Force bool `json:"force"`
}

// errorBody is the answer to a request that failed. Busy and Unfinished say that the session goes on, and that force
// would help.
type errorBody struct {
	Error      string `json:"error"`
	Busy       bool   `json:"busy,omitempty"`
	Unfinished bool   `json:"unfinished,omitempty"`
}

// MaxAdminData bounds AdminRequest.Length.
const MaxAdminData = 1 << 20

// listen opens the control socket, for the owner alone.
func (f *Folder) listen() (net.Listener, error) {
	path := f.file("socket")
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("control socket: the path %s is longer than the %d bytes that a socket's can have: choose a shorter FARBLK_STATE_DIR", path, maxSocketPath)
	}
	_ = os.Remove(path) // of the session that died and whose folder this was
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil { // the folder is 0700 already
		l.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return l, nil
}

// handler serves the control socket.
func (s *session) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, s.status()) })
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		writeMetrics(w, s.status())
	})
	mux.HandleFunc("POST /disconnect", func(w http.ResponseWriter, r *http.Request) {
		var q disconnectRequest
		if !readBody(w, r, &q) {
			return
		}
		err := s.askDisconnect(r.Context(), q.Force)
		var busy *BusyError
		var unfinished *UnfinishedError
		switch {
		case errors.As(err, &unfinished):
			reply(w, http.StatusConflict, errorBody{Error: err.Error(), Unfinished: true})
		case errors.As(err, &busy):
			reply(w, http.StatusConflict, errorBody{Error: err.Error(), Busy: true})
		case err != nil:
			reply(w, http.StatusInternalServerError, errorBody{Error: err.Error()})
		default:
			reply(w, http.StatusOK, struct{}{})
		}
	})
	mux.HandleFunc("POST /admin", func(w http.ResponseWriter, r *http.Request) {
		var q AdminRequest
		if !readBody(w, r, &q) {
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), 4*time.Second)
		defer cancel()
		a, err := s.admin(ctx, q)
		if err != nil {
			reply(w, http.StatusBadGateway, errorBody{Error: err.Error()})
			return
		}
		reply(w, http.StatusOK, a)
	})
	return mux
}

func readBody(w http.ResponseWriter, r *http.Request, v any) bool {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		reply(w, http.StatusBadRequest, errorBody{Error: "bad request: " + err.Error()})
		return false
	}
	return true
}

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // the client is gone: nobody to tell
}

// admin passes a harmless admin command on.
func (s *session) admin(ctx context.Context, q AdminRequest) (*AdminResponse, error) {
	switch q.Opcode {
	case nvme.AdminIdentify, nvme.AdminGetLogPage, nvme.AdminGetFeatures:
	default:
		return nil, fmt.Errorf("admin command %#02x is not let through", uint8(q.Opcode))
	}
	if q.Length < 0 || q.Length > MaxAdminData {
		return nil, fmt.Errorf("%d bytes of data: at most %d are let through", q.Length, MaxAdminData)
	}
	c := s.controller()
	if c == nil {
		return nil, errors.New("still connecting")
	}
	var cmd nvme.Command
	cmd.FillIdentify(0, q.NSID, 0)
	cmd.SetOpcode(q.Opcode)
	for i, v := range q.CDW10 {
		cmd.SetDW(10+i, v)
	}
	dir := transport.ToHost
	if q.Length == 0 {
		dir = transport.None
	}
	data := make([]byte, q.Length)
	cqe, err := c.Admin(ctx, &cmd, data, dir)
	var status *nvme.StatusError
	if err != nil && !errors.As(err, &status) {
		return nil, err
	}
	a := &AdminResponse{Status: cqe.Status(), Result: cqe.Result(), Data: data}
	if status != nil {
		a.Status, a.Data = status.Status, nil
	}
	return a, nil
}
