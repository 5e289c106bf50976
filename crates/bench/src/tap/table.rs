//! The figures of a tap, next to the original ones.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::{READ, SEED, STEERED};
use crate::report::Machine;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Number of queues and threads.
    pub queues: u16,
    /// Thousand frames per second, over all queues.
    pub kpps: f64,
    /// Nanoseconds of CPU time of the queues' threads per frame. Null if there was no frame.
    pub cpu_ns: Option<f64>,
    /// Thousand frames per second that the tap took from the senders. Null for writes.
    pub sent_kpps: Option<f64>,
}

impl Figure {
    pub(super) fn new(queues: u16, frames: u64, seconds: f64, cpu: Duration, sent: Option<u64>) -> Self {
        let rate = |frames: u64| frames as f64 / seconds / 1e3;
        let cpu_ns = (frames > 0).then(|| cpu.as_secs_f64() * 1e9 / frames as f64);
        Self { queues, kpps: rate(frames), cpu_ns, sent_kpps: sent.map(rate) }
    }
}

/// One direction.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `read`, `write`, or `write, steered`: with a steering program.
    pub what: &'static str,
    /// One figure for each number of queues.
    pub figures: Vec<Figure>,
}

impl Row {
    /// Returns the percentage more than with one queue. `None` without a figure for one queue.
    fn gain(&self, figure: &Figure) -> Option<f64> {
        let one = self.figures.iter().find(|f| f.queues == 1 && f.kpps > 0.0)?;
        Some((figure.kpps / one.kpps - 1.0) * 100.0)
    }
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// The machine of the measurement.
    pub machine: Machine,
    /// Bytes of a frame.
    pub size: usize,
    /// Number of flows.
    pub flows: u16,
    /// Number of sending threads.
    pub senders: u16,
    /// Length of each measurement in seconds.
    pub seconds: f64,
    /// One for each direction, and the writes with a steering program.
    pub rows: Vec<Row>,
}

impl Table {
    /// Returns the table as JSON, with the original figures in `seed`.
    pub fn json(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["seed"] = serde_json::to_value(SEED).unwrap_or_default();
        value
    }

    /// Returns the table as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "tap: frames of {} bytes, {} flows, {:.1} s a figure; {} CPUs, Linux {}",
            self.size, self.flows, self.seconds, self.machine.cpus, self.machine.kernel
        );
        for row in &self.rows {
            match row.what {
                READ => self.read(&mut out, row),
                _ => Self::write(&mut out, row),
            }
        }
        self.note_cpus(&mut out);
        out
    }

    fn read(&self, out: &mut String, row: &Row) {
        let _ = writeln!(out, "out of its queues, a thread each that only reads; senders: {}", self.senders);
        let _ = writeln!(
            out,
            "{:>6} {:>8} {:>8} {:>13} {:>10} {:>11} {:>8}",
            "queues", "kpps", "gain", "CPU ns/frame", "sent kpps", "seed kpps", "gain"
        );
        for figure in &row.figures {
            let seed = SEED.iter().find(|seed| seed.queues == figure.queues);
            let (kpps, gain) = match seed {
                Some(seed) if seed.queues > 1 => (seed.kpps.to_string(), format!("+{} %", seed.gain_percent)),
                Some(seed) => (seed.kpps.to_string(), String::new()),
                None => ("–".into(), "–".into()),
            };
            let _ = writeln!(
                out,
                "{} {:>10.0} {kpps:>11} {gain:>8}",
                columns(row, figure),
                figure.sent_kpps.unwrap_or_default()
            );
        }
    }

    fn write(out: &mut String, row: &Row) {
        let steered = if row.what == STEERED { "; the tap has a steering program" } else { "" };
        let _ = writeln!(out, "into its queues, a thread each that only writes{steered}");
        let _ = writeln!(out, "{:>6} {:>8} {:>8} {:>13}", "queues", "kpps", "gain", "CPU ns/frame");
        for figure in &row.figures {
            let _ = writeln!(out, "{}", columns(row, figure));
        }
    }

    /// Adds a note if the machine has too few CPUs.
    fn note_cpus(&self, out: &mut String) {
        for row in &self.rows {
            let more = if row.what == READ { usize::from(self.senders) } else { 0 };
            let fit = |f: &&Figure| usize::from(f.queues) + more <= self.machine.cpus;
            if let Some(figure) = row.figures.iter().find(|f| !fit(f)) {
                let senders = if more > 0 { format!(" and {more} that send") } else { String::new() };
                let _ = writeln!(
                    out,
                    "{}: {} CPUs are too few for {} threads of queues{senders}: from there on rates and gains say how \
                     the CPUs were shared; CPU a frame still counts",
                    row.what, self.machine.cpus, figure.queues
                );
            }
        }
        if self.rows.iter().any(|row| row.what == READ) {
            out.push_str(
                "The seed was measured on another machine: compare shapes and ratios, not numbers.\n",
            );
        }
    }
}

fn columns(row: &Row, figure: &Figure) -> String {
    let gain = row.gain(figure).filter(|_| figure.queues > 1);
    let gain = gain.map_or(String::new(), |gain| format!("{gain:+.0} %"));
    let cpu = figure.cpu_ns.map_or("–".into(), |ns| format!("{ns:.0}"));
    format!("{:>6} {:>8.0} {gain:>8} {cpu:>13}", figure.queues, figure.kpps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_stands_beside_the_seed() {
        let figure = |queues, frames| {
            Figure::new(queues, frames, 2.0, Duration::from_secs(u64::from(queues)), Some(3_000_000))
        };
        let rows = vec![
            Row { what: "read", figures: vec![figure(1, 2_000_000), figure(2, 5_000_000)] },
            Row { what: "write", figures: vec![figure(2, 4_000_000)] },
            Row { what: STEERED, figures: vec![figure(2, 4_000_000)] },
        ];
        let machine = Machine { cpus: 2, cpu: None, kernel: "6".into() };
        let table = Table { machine, size: 64, flows: 64, senders: 1, seconds: 2.0, rows };
        let text = table.text();
        assert!(text.contains("+150 %") && text.contains("+135 %") && text.contains("1926"), "{text}");
        assert!(text.contains("read: 2 CPUs are too few for 2 threads of queues and 1 that send"), "{text}");
        assert!(!text.contains("write: 2 CPUs"), "{text}");
        assert!(text.contains("only writes; the tap has a steering program"), "{text}");
        let json = table.json();
        assert_eq!(json["rows"][0]["figures"][0]["cpu_ns"], 500.0);
        assert_eq!(json["seed"][3]["kpps"], 3536);
    }
}
