package host

import "time"

// GraceTime is how long a controller with keep-alive timeout kato may go on with commands of a lost connection, where
// no more is known of it; for Config.HoldWrites. See Controller.Grace.
func GraceTime(kato time.Duration) time.Duration { return graceTime(kato, true, 0) }

// graceTime is how long after its last command could arrive a controller may go on with commands of a lost
// association: it gives up after KATO without sign of life (counted in whole intervals with traffic based
// keep-alive, so up to twice that), and then needs time to quiesce, CQT if it says so (Base 2.1, 9.6,
// "Communication Loss Handling"). Without keep-alive, some time has to do.
func graceTime(kato time.Duration, trafficBased bool, quiesce time.Duration) time.Duration {
	if kato <= 0 {
		kato = 10 * time.Second
	} else if trafficBased {
		kato *= 2
	}
	return kato + max(kato/4, time.Second, quiesce)
}

// grace is that time for an association.
func (a *association) grace() time.Duration {
	return graceTime(a.kato, a.trafficBased, time.Duration(a.id.CQT)*time.Millisecond)
}

// Grace is how long the controller may go on with writes if this process dies now: to be written down, so that
// whoever connects next can hold its own writes back for as long from the death on (Config.HoldWrites). It follows
// from what the controller granted and said, the keep-alive timeout that was read back from it, whether traffic
// restarts that, and CQT (Base 2.1, 9.6); it is never less than what is left of an older connection's time. It can be
// another after each reconnect, and is the new one when EventState tells of StateLive.
func (c *Controller) Grace() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := GraceTime(c.cfg.KeepAlive)
	if c.last != nil {
		d = c.last.grace()
	}
	return max(d, time.Until(c.writesUntil))
}

// WritesMayLive is how long from now the controller may still carry out writes of this connection, or of those before
// it that Config.HoldWrites was for. Once Done is closed it is 0 when every write that had been sent was answered before
// the end, and whenever the time has run out; else what is left of Grace, counted from when the connection was closed.
// That the controller confirmed its shutdown (CSTS.SHST) does not make it 0: Linux's target confirms at once, whatever
// it still has under way. Before Done is closed, for example when Shutdown's context ended first, it is Grace.
func (c *Controller) WritesMayLive() time.Duration {
	select {
	case <-c.done:
	default:
		return c.Grace()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(0, time.Until(c.writesUntil))
}
