//! The end of a daemon: first its jobs, then its exports, then its disks. What does not answer
//! delays only what needs it, so that all other images are closed in good order.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Daemon, REMOVE_LIMIT, await_end};
use crate::disk_entry::DiskEntry;
use crate::export::Export;
use crate::registry::Phase;

/// How long the end of a daemon may take. The program then ends at once. Service managers wait
/// longer before they kill: systemd 90 s.
pub const END_LIMIT: Duration = Duration::from_secs(60);

/// An export that is being removed, by its name.
type Ending = (String, Arc<Export>, Receiver<()>);

impl Daemon {
    /// Returns what has not ended, for messages: exports and jobs.
    pub fn unended(&self) -> Vec<String> {
        let state = self.state();
        let exports = state.exports.keys().map(|name| format!("export {name}"));
        let jobs = state.jobs.values().filter(|job| !job.is_concluded());
        exports.chain(jobs.map(|job| format!("job {}", job.id))).collect()
    }

    /// Ends everything: disconnects and drains exports, closes disks, frees workers. Returns when
    /// that is complete, even if another thread started it. May be called more than once.
    ///
    /// Returns the jobs that have not ended, because their storage does not answer. Their workers
    /// and some of their disks are still there then, and the process has to end.
    pub fn shutdown(&self) -> Vec<String> {
        self.state().shut = true;
        self.balance.shut();
        let left = self.end_jobs();
        let until = Instant::now() + REMOVE_LIMIT;
        let mut ending = self.start_removals();
        let mut hang = !self.await_made(Some(until));
        ending.append(&mut self.start_removals());
        for (name, export, ended) in &ending {
            if let Err(e) = await_end(name, export, ended, until) {
                tracing::warn!("{e}");
                hang = true;
            }
        }
        drop(ending);
        let mut closing = self.close_unused(&left);
        if hang {
            tracing::warn!(
                "the daemon ends when these requests do, and {} s after it was told to at the latest; to end it at once, send \
                 SIGTERM again (after 'vshunt quit' twice, more than a second apart): front ends that keep an in-flight \
                 region lose no request by that",
                END_LIMIT.as_secs()
            );
            self.await_made(None);
            drop(self.start_removals());
        }
        self.wait_all_gone();
        let nets = std::mem::take(&mut self.state().nets);
        drop(nets);
        closing.append(&mut self.close_unused(&left));
        for thread in closing {
            let _ = thread.join();
        }
        if left.is_empty() {
            self.workers.end_all();
        }
        left
    }

    /// Starts to remove all exports that are served. No export is added any more, but some may
    /// still be being made.
    fn start_removals(&self) -> Vec<Ending> {
        let exports: Vec<_> = {
            let mut state = self.state();
            let served = state.exports.iter().filter(|(_, e)| matches!(e.phase, Phase::Serving(_)));
            let names: Vec<_> = served.map(|(name, _)| name.clone()).collect();
            names.into_iter().map(|name| (state.mark_removing(&name), name)).collect()
        };
        // An export whose disk hangs does not delay the others.
        let start = |(export, name): (Arc<Export>, String)| {
            let ended = self.start_removal(&name, export.clone());
            (name, export, ended)
        };
        exports.into_iter().map(start).collect()
    }

    /// Waits until no export is being made any more. Returns false, and warns, if one still is at
    /// `until`.
    fn await_made(&self, until: Option<Instant>) -> bool {
        let mut state = self.state();
        loop {
            let making = state.exports.iter().find(|(_, e)| matches!(e.phase, Phase::Making));
            let Some((name, _)) = making else { return true };
            let Some(until) = until else {
                state = self.wait(state);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!("export {name} is being made, and has to be there before it can be removed");
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Closes the disks that no export has, each on a thread of its own: one whose storage does not
    /// answer delays no other. Returns the threads to wait for. `left`: jobs that are not waited
    /// for.
    fn close_unused(&self, left: &[String]) -> Vec<JoinHandle<()>> {
        let unused: Vec<_> = {
            let mut state = self.state();
            let names = state.disks.keys().filter(|name| state.users(name).is_empty());
            let names: Vec<_> = names.cloned().collect();
            names.iter().filter_map(|name| state.disks.remove(name)).collect()
        };
        unused.into_iter().filter_map(|entry| close(entry, left)).collect()
    }
}

/// Closes a disk, unless a job of `left` uses it. Returns the thread that does it; none if there is
/// nothing to wait for.
fn close(entry: Arc<DiskEntry>, left: &[String]) -> Option<JoinHandle<()>> {
    if entry.watched.job().is_some_and(|job| left.contains(&job)) {
        return None;
    }
    let close = |entry: Arc<DiskEntry>| {
        // A resize may be running.
        drop(entry.op_lock());
        drop(entry);
    };
    let (give, take) = channel();
    let thread = std::thread::Builder::new().name(format!("close-{}", entry.name));
    match thread.spawn(move || take.iter().for_each(close)) {
        Ok(thread) => {
            give.send(entry).expect("it waits");
            Some(thread)
        }
        Err(_) => {
            close(entry);
            None
        }
    }
}
