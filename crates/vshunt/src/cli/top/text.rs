//! The tables of `vshunt top --once`, and the cells that the terminal shows, too.

use vshunt_types::spec::{ExportKind, WorkerKind, cpu_list};

use super::super::show::{balance_of, or_dash, ranges, time};
use super::fit::{Columns, Cut};
use super::view::{ExportRow, Latency, QueueRow, Rates, View, WorkerRow};

pub(super) const EXPORTS: Columns<9> = Columns {
    titles: ["EXPORT", "TYPE", "BACKEND", "STATE", ">IN-FLIGHT", ">REQ/s", ">READ/s", ">WRITTEN/s", ">P99"],
    cut: &[(2, Cut::Middle, 10), (0, Cut::Middle, 16)],
    left_out: &[1],
};
pub(super) const QUEUES: Columns<11> = Columns {
    titles: [
        "QUEUE",
        ">WORKER",
        "STATE",
        ">IN-FLIGHT",
        ">REQ/s",
        ">READ/s",
        ">WRITTEN/s",
        ">ERR/s",
        ">LIM%",
        ">P50",
        ">P99",
    ],
    cut: &[(0, Cut::Middle, 16)],
    left_out: &[9, 7],
};
pub(super) const WORKERS: Columns<10> = Columns {
    titles: [">WORKER", "NAME", "CPUS", ">BUSY%", ">POLL%", ">CPU%", "NOTE", ">REQ/s", ">SLEEPS/s", "QUEUES"],
    cut: &[(9, Cut::End, 8), (2, Cut::End, 8), (1, Cut::Middle, 16)],
    left_out: &[8, 4],
};
/// The columns of the share of the busy time, and of the note.
pub(super) const BUSY: usize = 3;
pub(super) const NOTE: usize = 6;

/// Returns all tables, for a screen of so many characters. None: the reader is a program or a file,
/// and nothing is cut or left out. There is always a worker.
pub(super) fn tables(view: &View, width: Option<usize>) -> String {
    let mut text = String::new();
    if !view.exports.is_empty() {
        text += &EXPORTS.table(view.exports.iter().map(export).collect(), width);
        text += "\n";
    }
    if !view.queues.is_empty() {
        text += &QUEUES.table(view.queues.iter().map(queue).collect(), width);
        text += "\n";
    }
    text += &WORKERS.table(view.workers.iter().map(worker).collect(), width);
    let balanced = view.exports.iter().filter_map(|e| Some((e.name.as_str(), e.balancing.as_ref()?)));
    if let Some(balance) = balance_of(balanced) {
        text += "\n";
        text += &balance;
    }
    text
}

pub(super) fn export(row: &ExportRow) -> [String; 9] {
    let kind = match row.kind {
        ExportKind::VhostUserBlk => "vhost-user-blk",
        ExportKind::VhostUserNet => "vhost-user-net",
        ExportKind::Fuse => "fuse",
        ExportKind::Uplink => "uplink",
        ExportKind::Nbd => "nbd",
    };
    let state = match (row.kind, row.connected) {
        _ if row.leaving => "leaving",
        _ if row.limited => "limited",
        (ExportKind::Fuse, _) => "mounted",
        (ExportKind::Uplink, _) => "joined",
        (_, true) => "connected",
        (_, false) => "waiting",
    };
    let [requests, read, written, _] = rates(&row.rates);
    [
        row.name.clone(),
        kind.to_owned(),
        row.backend.clone(),
        state.to_owned(),
        row.in_flight.to_string(),
        requests,
        read,
        written,
        latency(row.service_times, |l| l.p99_ns),
    ]
}

/// Formats a service time; `-` if none was measured.
fn latency(latency: Option<Latency>, of: impl Fn(Latency) -> u64) -> String {
    latency.map_or("-".to_owned(), |l| time(of(l)))
}

pub(super) fn queue(row: &QueueRow) -> [String; 11] {
    let [requests, read, written, errors] = rates(&row.rates);
    [
        row.name(),
        row.worker.to_string(),
        if row.limited { "limited".to_owned() } else { row.state.clone() },
        row.in_flight.to_string(),
        requests,
        read,
        written,
        errors,
        if row.limited { format!("{:.0}", row.limited_percent) } else { "-".to_owned() },
        latency(row.service_times, |l| l.p50_ns),
        latency(row.service_times, |l| l.p99_ns),
    ]
}

pub(super) fn worker(row: &WorkerRow) -> [String; 10] {
    let note = match (row.kind, row.stalled, row.hot) {
        (_, true, _) => "stalled",
        (_, _, true) => "hot",
        (WorkerKind::Kernel, ..) => "kernel",
        _ => "-",
    };
    [
        row.id.to_string(),
        row.name.clone(),
        or_dash(cpu_list(&row.cpu)),
        format!("{:.1}", row.busy_percent),
        format!("{:.0}", row.polling_percent),
        format!("{:.0}", row.cpu_percent),
        note.to_owned(),
        count(row.requests_per_s),
        count(row.sleeps_per_s),
        or_dash(ranges(&row.queues)),
    ]
}

pub(super) fn rates(rates: &Rates) -> [String; 4] {
    [count(rates.requests), bytes(rates.read), bytes(rates.written), count(rates.errors)]
}

/// Formats a number with at most four digits: 999, 12.3k, 4.56M.
fn count(n: f64) -> String {
    scaled(n, 1000.0, ["", "k", "M", "G", "T"])
}

/// Formats bytes in units of 1024: 999, 12.3K, 4.56M.
fn bytes(n: f64) -> String {
    scaled(n, 1024.0, ["", "K", "M", "G", "T"])
}

fn scaled(mut n: f64, step: f64, units: [&str; 5]) -> String {
    let mut unit = 0;
    // 999.95 would be rounded to 1000.0.
    while n >= 999.95 && unit + 1 < units.len() {
        n /= step;
        unit += 1;
    }
    match (unit, n) {
        (0, _) => format!("{n:.0}"),
        (_, n) if n < 9.995 => format!("{n:.2}{}", units[unit]),
        (_, n) if n < 99.95 => format!("{n:.1}{}", units[unit]),
        _ => format!("{n:.0}{}", units[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_at_most_four_digits() {
        let cases = [
            (0.0, "0"),
            (0.4, "0"),
            (999.4, "999"),
            (1000.0, "1.00k"),
            (12_345.0, "12.3k"),
            (999_960.0, "1.00M"),
        ];
        for (n, want) in cases {
            assert_eq!(count(n), want, "{n}");
        }
        for (n, want) in
            [(1023.0, "1.00K"), (4096.0, "4.00K"), (3.5 * 1048576.0, "3.50M"), (1e30, "909494701772928256T")]
        {
            assert_eq!(bytes(n), want, "{n}");
        }
    }
}
