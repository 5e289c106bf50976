//! The dirty log, switched on and off under load. Every page that was written is looked up in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::driver::{DirtyLog, LogSwitch, Memory, RingParts};
use crate::error::{Result, fail};
use crate::load::LogGate;

/// Time limit for the lanes to become idle.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit for the mark of a page, counted from the completion of its request.
const LATE: Duration = Duration::from_secs(30);

/// Results of the rounds.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct LogCheck {
    /// Number of times that the log was switched on under load.
    pub rounds: u64,
    /// Writes of the device that were looked up in the log.
    pub writes: u64,
    /// Sum of the marked pages of all rounds.
    pub marked_pages: u64,
}

/// Switches the log on and off every `pause` until `stop`, or until the load ends.
///
/// # Errors
/// A page that was written is not marked, or a call failed.
pub fn run(
    memory: &Memory,
    switch: &LogSwitch,
    rings: &[RingParts],
    gate: &Arc<LogGate>,
    pause: Duration,
    stop: &AtomicBool,
) -> Result<LogCheck> {
    let mut total = LogCheck::default();
    let mut log = DirtyLog::new(memory)?;
    switch.share(&log)?;
    while !stop.load(Ordering::Acquire) && !gate.ended() {
        std::thread::sleep(pause);
        let round = round(switch, rings, gate, &mut log, &mut total);
        // The lanes continue, also after an error.
        gate.rest(rings);
        round?;
    }
    Ok(total)
}

fn round(
    switch: &LogSwitch,
    rings: &[RingParts],
    gate: &LogGate,
    log: &mut DirtyLog,
    total: &mut LogCheck,
) -> Result<()> {
    if !gate.arm(rings, PATIENCE)? {
        return Ok(());
    }
    switch.switch(rings, true)?;
    gate.count(rings);
    gate.wait(PATIENCE)?;
    let notes = gate.take();
    notes.iter().for_each(|note| log.expect(note.addr, u64::from(note.len), note.what));
    look_up(log)?;
    total.marked_pages += log.marked().len() as u64;
    total.rounds += u64::from(!notes.is_empty());
    total.writes += notes.len() as u64;
    switch.switch(rings, false)?;
    log.clear();
    Ok(())
}

fn look_up(log: &DirtyLog) -> Result<()> {
    let deadline = Instant::now() + LATE;
    loop {
        let missed = log.missed();
        let Some(first) = missed.first() else { return Ok(()) };
        if Instant::now() > deadline {
            return Err(fail!(
                Io,
                "{} pages that the device wrote with the log on are not marked, the first at guest address {:#x} ({})",
                missed.len(),
                first.guest_addr,
                first.what
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
