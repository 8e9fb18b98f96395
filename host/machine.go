package host

import (
	"fmt"
	"time"

	"farblk/blockdev"
)

// State is where a controller is in its life.
type State uint8

// States. New, Connecting and Dead happen once; Live, Resetting and Reconnecting may repeat.
const (
	StateNew          State = iota
	StateConnecting         // the first association is being made
	StateLive               // I/O runs
	StateResetting          // the association is lost and being taken down
	StateReconnecting       // none; attempts are made, requests wait
	StateDeleting           // being shut down
	StateDead               // the end: everything fails
)

// String is the state's name, in lower case.
func (s State) String() string {
	names := [...]string{"new", "connecting", "live", "resetting", "reconnecting", "deleting", "dead"}
	if int(s) < len(names) {
		return names[s]
	}
	return "unknown state"
}

// MarshalText gives the name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// eventKind is what the machine is told.
type eventKind uint8

const (
	evStart         eventKind = iota
	evConnected               // the attempt succeeded: identity checked, ready for I/O
	evAttemptFailed           // err, verdict
	evLost                    // the live association ended: err
	evQuiesced                // it is closed, the fabric holds no request; writes, grace
	evTimer                   // timer
	evDelete                  // the owner wants it gone
)

// verdict says what a failed attempt means for further ones.
type verdict uint8

const (
	again    verdict = iota // may work later
	stale                   // the fabric still knows an older connection; even a first attempt is repeated
	hopeless                // would fail again
)

type machineEvent struct {
	kind    eventKind
	err     error
	verdict verdict
	timer   timerID
	armed   uint // which arming of the timer it was; for the loop
	// writes says that write commands were under way on the association that was closed, and grace how long
	// the controller may take from now to be done with them.
	writes bool
	grace  time.Duration
}

type timerID uint8

const (
	timerReconnect timerID = iota
	timerCtrlLoss
	timerFastFail
	timerGrace // until a lost association cannot write any more
	numTimers
)

// actionKind is what the machine wants done.
type actionKind uint8

const (
	doAttempt       actionKind = iota // start connecting; ends in evConnected or evAttemptFailed
	doCancelAttempt                   // make it end soon
	doQuiesce                         // close the association; ends in evQuiesced
	doShutdown                        // tell the controller, then close; ends in evQuiesced
	doResume                          // run requests, writes only if the action says so
	doReleaseWrites                   // run the writes too
	doFail                            // fail what waits and what comes with err
	doArm                             // start a timer anew
	doDisarm                          // stop it
	doFree                            // the end: give everything back
)

type action struct {
	kind   actionKind
	timer  timerID
	after  time.Duration
	writes bool
	err    error
}

// machine is the life of one controller. It has no I/O and no clock: step takes what happened and returns
// what to do, in order.
type machine struct {
	state          State
	hold           time.Duration // writes wait at first
	reconnectDelay time.Duration
	ctrlLoss       time.Duration // negative: never
	fastFail       time.Duration // 0: never

	attempting bool  // between doAttempt and its end
	expired    bool  // controller loss time is over
	oldWrites  bool  // a lost association may still write
	stales     int   // stale first attempts
	cause      error // first cause of what the state is
}

const (
	maxStale   = 5
	staleDelay = time.Second
	firstDelay = time.Second // before the first attempt to reconnect
)

func (m *machine) step(e machineEvent) []action {
	switch e.kind {
	case evStart:
		if m.state == StateNew {
			m.state = StateConnecting
			if m.hold > 0 {
				m.oldWrites = true
				return append(m.attempt(), action{kind: doArm, timer: timerGrace, after: m.hold})
			}
			return m.attempt()
		}
	case evConnected:
		return m.connected()
	case evAttemptFailed:
		return m.failed(e)
	case evLost:
		if m.state == StateLive {
			m.state, m.cause, m.expired = StateResetting, e.err, false
			acts := []action{{kind: doQuiesce}}
			if m.ctrlLoss >= 0 {
				acts = append(acts, action{kind: doArm, timer: timerCtrlLoss, after: m.ctrlLoss})
			}
			if m.fastFail > 0 {
				acts = append(acts, action{kind: doArm, timer: timerFastFail, after: m.fastFail})
			}
			return acts
		}
	case evQuiesced:
		return m.quiesced(e)
	case evTimer:
		return m.timer(e.timer)
	case evDelete:
		return m.delete()
	}
	return nil
}

func (m *machine) attempt() []action {
	m.attempting = true
	return []action{{kind: doAttempt}}
}

func (m *machine) connected() []action {
	m.attempting = false
	switch m.state {
	case StateConnecting, StateReconnecting:
		m.state, m.cause, m.stales = StateLive, nil, 0
		return []action{
			{kind: doDisarm, timer: timerReconnect},
			{kind: doDisarm, timer: timerCtrlLoss},
			{kind: doDisarm, timer: timerFastFail},
			{kind: doResume, writes: !m.oldWrites},
		}
	case StateDeleting:
		return []action{{kind: doShutdown}}
	}
	return nil
}

func (m *machine) failed(e machineEvent) []action {
	m.attempting = false
	switch m.state {
	case StateConnecting:
		if e.verdict == stale && m.stales < maxStale {
			m.stales++
			return []action{{kind: doArm, timer: timerReconnect, after: staleDelay}}
		}
		m.cause = e.err
		return m.die(m.lost())
	case StateReconnecting:
		if e.verdict == hopeless {
			m.cause = e.err
			return m.die(m.lost())
		}
		if m.expired {
			return m.die(m.lost())
		}
		return []action{{kind: doArm, timer: timerReconnect, after: m.reconnectDelay}}
	case StateDeleting:
		return m.die(nil)
	}
	return nil
}

func (m *machine) quiesced(e machineEvent) (acts []action) {
	if e.writes {
		m.oldWrites = true
		acts = append(acts, action{kind: doArm, timer: timerGrace, after: e.grace})
	}
	switch m.state {
	case StateResetting:
		m.state = StateReconnecting
		if m.expired {
			return m.die(m.lost())
		}
		return append(acts, action{kind: doArm, timer: timerReconnect, after: min(firstDelay, m.reconnectDelay)})
	case StateDeleting:
		return m.die(nil)
	}
	return acts
}

func (m *machine) timer(t timerID) []action {
	switch t {
	case timerReconnect:
		if (m.state == StateReconnecting || m.state == StateConnecting) && !m.attempting {
			return m.attempt()
		}
	case timerCtrlLoss:
		switch m.state {
		case StateResetting:
			m.expired = true
		case StateReconnecting:
			m.expired = true
			if m.attempting {
				return []action{{kind: doCancelAttempt}}
			}
			return m.die(m.lost())
		}
	case timerFastFail:
		if m.state == StateResetting || m.state == StateReconnecting {
			return []action{{kind: doFail, err: m.lost()}}
		}
	case timerGrace:
		m.oldWrites = false
		if m.state == StateLive {
			return []action{{kind: doReleaseWrites}}
		}
	}
	return nil
}

func (m *machine) delete() []action {
	fail := action{kind: doFail, err: blockdev.ErrClosed}
	switch m.state {
	case StateLive:
		m.state = StateDeleting
		return append(m.disarm(), fail, action{kind: doShutdown})
	case StateConnecting, StateReconnecting:
		m.state = StateDeleting
		if !m.attempting {
			return m.die(nil)
		}
		return append(m.disarm(), fail, action{kind: doCancelAttempt})
	case StateResetting:
		m.state = StateDeleting
		return append(m.disarm(), fail)
	case StateNew:
		return m.die(nil)
	}
	return nil
}

// die ends everything; err is what requests get, nil when the owner wanted it.
func (m *machine) die(err error) []action {
	m.state = StateDead
	if err == nil {
		err = blockdev.ErrClosed
	}
	return append(m.disarm(), action{kind: doFail, err: err}, action{kind: doFree})
}

func (m *machine) disarm() []action {
	acts := make([]action, 0, int(numTimers)+2)
	for t := range numTimers {
		acts = append(acts, action{kind: doDisarm, timer: t})
	}
	return acts
}

// lost is the error of requests that cannot be carried out because of cause.
func (m *machine) lost() error {
	return fmt.Errorf("%w: %w", blockdev.ErrLost, m.cause)
}
