//! Counts, latencies and CPU time.

use std::collections::HashMap;
use std::time::Duration;

use hdrhistogram::Histogram;

/// Latencies above this (one minute) are counted as this.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// Requests that take this long (half a second) are listed individually.
pub const SLOW_NS: u64 = 500_000_000;
/// Most requests that a queue lists.
const SLOW_LISTED_MAX: usize = 64;

/// A slow request.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct SlowRequest {
    /// Time of completion, in nanoseconds of the system's monotonic clock.
    pub end_ns: u64,
    /// Latency in nanoseconds.
    pub latency_ns: u64,
}

/// Requests that took [`SLOW_NS`] or longer.
#[derive(Clone, Debug, Default)]
pub struct Slow {
    /// Number of such requests.
    pub count: u64,
    /// The first of them.
    pub listed: Vec<SlowRequest>,
}

impl Slow {
    /// Makes a list with room for the requests of one queue.
    pub fn of_a_queue() -> Self {
        Self { count: 0, listed: Vec::with_capacity(SLOW_LISTED_MAX) }
    }

    /// Lists a request if there is room.
    #[cold]
    pub fn record(&mut self, request: SlowRequest) {
        self.count += 1;
        if self.listed.len() < SLOW_LISTED_MAX {
            self.listed.push(request);
        }
    }

    /// Adds those of another queue.
    pub fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.listed.extend_from_slice(&other.listed);
    }
}

/// Requests of one direction: their number, size and latency.
#[derive(Clone)]
pub struct Ops {
    /// Requests completed.
    pub ios: u64,
    /// Bytes of data.
    pub bytes: u64,
    latency: Histogram<u64>,
    /// Equal latencies that are not recorded yet. Most requests of one batch have the same latency.
    run_ns: u64,
    run: u64,
}

impl std::fmt::Debug for Ops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The histogram is left out. It has tens of thousands of counters.
        f.debug_struct("Ops").field("ios", &self.ios).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Default for Ops {
    fn default() -> Self {
        let latency =
            Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("constant bounds that are valid");
        Self { ios: 0, bytes: 0, latency, run_ns: 0, run: 0 }
    }
}

impl Ops {
    /// Counts one request.
    #[inline]
    pub fn record(&mut self, bytes: u32, latency_ns: u64) {
        self.ios += 1;
        self.bytes += u64::from(bytes);
        if latency_ns != self.run_ns {
            self.settle();
            self.run_ns = latency_ns;
        }
        self.run += 1;
    }

    fn settle(&mut self) {
        if self.run > 0 {
            // This cannot fail, because `clamp` keeps the value in bounds.
            let _ = self.latency.record_n(self.run_ns.clamp(1, LATENCY_NS_MAX), self.run);
            self.run = 0;
        }
    }

    /// Adds the counts of another queue.
    pub fn add(&mut self, other: &mut Ops) {
        self.settle();
        other.settle();
        self.ios += other.ios;
        self.bytes += other.bytes;
        // This cannot fail, because both have the same bounds.
        let _ = self.latency.add(&other.latency);
    }

    /// Returns the latency in nanoseconds below which this share (0 to 1) of the requests stayed,
    /// or 0 without requests.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        debug_assert_eq!(self.run, 0, "asked before the counts of all queues were added up");
        self.latency.value_at_quantile(share)
    }

    /// Returns the mean latency in nanoseconds.
    pub fn mean_ns(&self) -> f64 {
        self.latency.mean()
    }

    /// Returns the longest latency in nanoseconds.
    pub fn max_ns(&self) -> u64 {
        self.latency.max()
    }
}

/// Returns the user and system time of a process, if it is known.
pub fn process_cpu(pid: u32) -> Option<Duration> {
    cpu_of(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses user and system time in the `stat` file of a process or thread.
fn cpu_of(stat: &str) -> Option<Duration> {
    // Fields are counted after the command's name. The name may contain any character, and ends at
    // the last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Returns the kernel's vhost workers of this process, which are its threads: id and CPU time.
pub fn vhost_threads() -> Vec<(u32, Duration)> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let one = |task: std::io::Result<std::fs::DirEntry>| {
        let task = task.ok()?;
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let ours = stat.split_once('(')?.1.starts_with("vhost-");
        ours.then_some((task.file_name().to_str()?.parse().ok()?, cpu_of(&stat)?))
    };
    tasks.filter_map(one).collect()
}

/// Returns the state of a process in words.
pub fn process_state(pid: u32) -> &'static str {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('R') => "runs",
        Some('S' | 'I') => "sleeps",
        Some('D') => "waits for its storage",
        Some('Z' | 'X') => "was killed and has not ended yet",
        Some('T' | 't') => "is stopped",
        Some(_) => "is in a state unknown here",
        None => "is gone",
    }
}

/// Returns the CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns nanoseconds of the monotonic clock. The vDSO takes about 25 ns.
#[inline]
pub fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CPU time of the server over all processes that it has during a run, or over the kernel's worker
/// threads.
#[derive(Debug, Default)]
pub struct ServerCpu {
    pid: Option<u32>,
    /// Whether the server is the vhost workers of this process.
    vhost: bool,
    /// Last known time of each process or thread.
    last: HashMap<u32, Duration>,
    sum: Duration,
    known: bool,
}

impl ServerCpu {
    /// Starts to watch `pid`.
    pub fn watch(&mut self, pid: Option<u32>) {
        self.pid = pid;
        self.last = self.look().into_iter().collect();
        self.known |= !self.last.is_empty();
    }

    /// Starts to watch the kernel's workers of this process.
    pub fn watch_vhost(&mut self) {
        self.vhost = true;
        self.watch(None);
    }

    fn look(&self) -> Vec<(u32, Duration)> {
        match self.pid {
            _ if self.vhost => vhost_threads(),
            Some(pid) => process_cpu(pid).map(|time| (pid, time)).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the total so far, or `None` if no process could be read. The time of a thread after
    /// its last sample is lost when it ends. A new thread counts from its start.
    pub fn sample(&mut self) -> Option<Duration> {
        for (id, now) in self.look() {
            let last = self.last.insert(id, now).unwrap_or_default();
            self.sum += now.saturating_sub(last);
        }
        self.known.then_some(self.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_two_queues() {
        let (mut a, mut b) = (Ops::default(), Ops::default());
        (0..990).for_each(|_| a.record(4096, 10_000));
        (0..10).for_each(|_| b.record(4096, 5_000_000));
        let mut all = Ops::default();
        all.add(&mut a);
        all.add(&mut b);
        assert_eq!((all.ios, all.bytes), (1000, 4_096_000));
        assert!((9_990..=10_010).contains(&all.quantile_ns(0.5)));
        assert!(all.quantile_ns(0.999) > 4_900_000);
        assert!((4_990_000..=5_010_000).contains(&all.max_ns()));
    }

    #[test]
    fn our_own_cpu_time_is_known() {
        assert!(process_cpu(std::process::id()).is_some());
        assert!(process_cpu(u32::MAX).is_none());
        assert_ne!(process_state(std::process::id()), "is gone");
        assert_eq!(process_state(u32::MAX), "is gone");
    }
}
