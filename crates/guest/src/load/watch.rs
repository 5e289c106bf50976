//! The watching thread: time limits and stalls, live figures, and the death and return of the
//! server.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::thread::{FAIL, PARK, RUN, STOP, Shared};
use super::{LoadPlan, Progress, Tick};
use crate::driver::{Memory, PollEvent, RingParts, RingSetup, Transport, fresh_base};
use crate::error::{Error, Kind, Result, fail};
use crate::stats::{ServerCpu, process_state};

/// Interval of the checks for stalls and for `stop`.
const LOOK: Duration = Duration::from_millis(200);
/// Time after the end of `runtime` until a message says what the run waits for.
const NOTE_AFTER: Duration = Duration::from_secs(1);

/// The state of the watching thread.
pub(crate) struct Watcher<'a> {
    pub(crate) transport: &'a mut Transport,
    pub(crate) memory: &'a Memory,
    pub(crate) rings: Vec<RingParts>,
    pub(crate) shared: &'a Shared,
    pub(crate) plan: &'a LoadPlan,
    pub(crate) server_cpu: &'a mut ServerCpu,
    pub(crate) progress: &'a mut dyn Progress,
    /// Nothing is submitted after this time.
    pub(crate) until: Option<Instant>,
    /// The end of the time to submit, once it has passed.
    pub(crate) over: Option<Over>,
    /// Number of times that the server died and came back.
    pub(crate) reconnects: u32,
    /// The longest time without a server.
    pub(crate) outage: Duration,
}

/// The end of the time to submit.
#[derive(Clone, Copy)]
pub(crate) struct Over {
    at: Instant,
    /// Whether the message about the wait was shown.
    noted: bool,
}

/// The time of each lane's last progress.
struct LaneProgress {
    done: u64,
    at: Instant,
}

impl Watcher<'_> {
    /// Watches until all threads have ended. After an error, the threads were told to stop.
    pub(crate) fn run(&mut self) -> Result<()> {
        let result = self.watch();
        if result.is_err() {
            self.tell(FAIL);
        }
        // A thread's own error is more precise than an error that followed from it.
        self.shared.take_error().map_or(result, Err)
    }

    fn watch(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut next_tick = start + self.plan.interval;
        let mut progress_of_lanes: Vec<_> =
            self.rings.iter().map(|_| LaneProgress { done: 0, at: start }).collect();
        let mut last = (start, 0, 0);
        while self.shared.running() > 0 {
            if let Some(error) = self.shared.take_error() {
                return Err(error);
            }
            let now = Instant::now();
            let stopped = self.plan.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed));
            if self.over.is_none() && (stopped || self.until.is_some_and(|until| now >= until)) {
                self.until = None;
                self.over = Some(Over { at: now, noted: false });
                self.tell(STOP);
            }
            self.note_waiting();
            let gone =
                self.wait_until(self.until.map_or(next_tick, |until| until.min(next_tick)).min(now + LOOK))?;
            if gone {
                if self.shared.running() == 0 {
                    break;
                }
                self.server_is_gone()?;
                progress_of_lanes.iter_mut().for_each(|m| m.at = Instant::now());
            }
            self.look_for_stalls(&mut progress_of_lanes)?;
            if Instant::now() >= next_tick {
                next_tick += self.plan.interval;
                self.tick(start, &mut last);
            }
        }
        self.server_cpu.sample();
        Ok(())
    }

    /// Sleeps until `deadline` or until an event. Returns true if the server is gone.
    fn wait_until(&mut self, deadline: Instant) -> Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let ready: Vec<bool> = {
            let mut fds = vec![PollFd::from_borrowed_fd(self.shared.event.as_fd(), PollFlags::IN)];
            fds.extend(self.transport.fds().into_iter().map(|(fd, what)| PollFd::from_borrowed_fd(fd, what)));
            let _ = poll(&mut fds, Some(&limit));
            if !fds[0].revents().is_empty() {
                drain(&self.shared.event);
            }
            fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        match self.transport.poll_event(&ready)? {
            PollEvent::Nothing => Ok(false),
            PollEvent::Gone => Ok(true),
            PollEvent::Changed(config) => {
                self.progress.note(&format!("the disk has {} sectors now", config.capacity));
                Ok(false)
            }
        }
    }

    /// Sets the command for all threads, and wakes them.
    fn tell(&self, control: u8) {
        self.shared.order(control);
        self.rings.iter().for_each(RingParts::wake);
    }

    /// Handles the end of the connection. Requests may be in flight.
    fn server_is_gone(&mut self) -> Result<()> {
        let (Some(patience), Transport::Socket(_)) = (self.plan.reconnect, &self.transport) else {
            return Err(fail!(
                Lost,
                "the server closed the connection while the load ran; --reconnect waits for a new one"
            ));
        };
        let began = Instant::now();
        self.progress.note("the server is gone; waiting for it to come back");
        self.tell(PARK);
        while !self.shared.all_parked() {
            let mut fds = [PollFd::from_borrowed_fd(self.shared.event.as_fd(), PollFlags::IN)];
            let _ = poll(&mut fds, None);
            drain(&self.shared.event);
        }
        if let Some(error) = self.shared.take_error() {
            return Err(error);
        }
        let setup = |(queue, parts)| RingSetup { parts, base: self.base(queue) };
        let rings: Vec<_> = self.rings.iter().enumerate().map(setup).collect();
        if let Transport::Socket(session) = &mut *self.transport {
            session.reopen(self.memory, &rings, began + patience)?;
        }
        let outage = began.elapsed();
        self.reconnects += 1;
        self.outage = self.outage.max(outage);
        self.server_cpu.watch(self.plan.server_pid.or_else(|| self.transport.peer_pid()));
        self.progress.note(&format!("the server is back after {:.0} ms", outage.as_secs_f64() * 1e3));
        // As QEMU does when it passes a ring to a server: a kick may be lost, because the previous
        // server read it.
        self.rings.iter().for_each(RingParts::kick);
        self.tell(if self.over.is_none() { RUN } else { STOP });
        Ok(())
    }

    fn base(&self, queue: usize) -> u32 {
        if self.plan.stale_packed_base && self.rings[queue].packed {
            return fresh_base(true);
        }
        self.shared.gauges[queue].base.load(Ordering::Acquire) as u32
    }

    /// Shows the reason when a run takes longer than planned.
    fn note_waiting(&mut self) {
        let outstanding = || self.shared.gauges.iter().map(|g| g.outstanding()).sum::<u64>();
        if let Some(over) = &mut self.over
            && !over.noted
            && over.at.elapsed() > NOTE_AFTER
        {
            over.noted = true;
            self.progress.note(&format!(
                "the time is over; waiting for {} {} outstanding",
                outstanding(),
                self.plan.unit
            ));
        }
    }

    fn look_for_stalls(&self, progress_of_lanes: &mut [LaneProgress]) -> Result<()> {
        for ((queue, gauge), moved) in self.shared.gauges.iter().enumerate().zip(progress_of_lanes) {
            let done = gauge.done.load(Ordering::Relaxed);
            let outstanding = gauge.outstanding();
            let (since, limit) = match self.over {
                Some(over) => (moved.at.max(over.at), self.plan.stall.min(self.plan.linger)),
                None => (moved.at, self.plan.stall),
            };
            if done != moved.done || outstanding == 0 {
                *moved = LaneProgress { done, at: Instant::now() };
            } else if since.elapsed() > limit {
                return Err(self.stalled(queue, outstanding, limit));
            }
        }
        Ok(())
    }

    #[cold]
    fn stalled(&self, queue: usize, outstanding: u64, limit: Duration) -> Error {
        let server = match self.plan.server_pid.or_else(|| self.transport.peer_pid()) {
            Some(pid) => format!("its process, {pid}, {}", process_state(pid)),
            None if self.transport.kernel().is_some() => "it is the kernel".into(),
            None => "its process is unknown".into(),
        };
        fail!(
            Io,
            "queue {queue}: no completion for {:?} with {outstanding} {} outstanding: they are lost, or the \
             server hangs, or its storage ({server}; the connection is open)",
            limit,
            self.plan.unit
        )
    }

    fn tick(&mut self, start: Instant, last: &mut (Instant, u64, u64)) {
        let sum = |f: fn(&super::gauge::LoadGauge) -> u64| self.shared.gauges.iter().map(f).sum::<u64>();
        let ios = sum(|g| g.done.load(Ordering::Relaxed));
        let bytes = sum(|g| g.bytes.load(Ordering::Relaxed));
        let now = Instant::now();
        let seconds = now.duration_since(last.0).as_secs_f64();
        let tick = Tick {
            elapsed: now.duration_since(start),
            ios,
            iops: (ios - last.1) as f64 / seconds,
            mib_per_s: (bytes - last.2) as f64 / seconds / f64::from(1 << 20),
            server_cpu: self.server_cpu.sample(),
        };
        *last = (now, ios, bytes);
        self.progress.tick(&tick);
    }
}

fn drain(event: &OwnedFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}

/// Checks that the device can continue after the death of its server, if the plan needs it.
pub(super) fn check_can_reconnect(transport: &Transport, plan: &LoadPlan) -> Result<()> {
    let can = matches!(transport, Transport::Socket(session) if session.inflight().is_some());
    if plan.reconnect.is_some() && !can {
        return Err(Error::new(
            Kind::Usage,
            "--reconnect needs an in-flight region (INFLIGHT_SHMFD), which this server does not offer",
        ));
    }
    Ok(())
}
