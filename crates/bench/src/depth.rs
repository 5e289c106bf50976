//! IOPS over depth: the requests in flight on each queue, for one queue and for several.
//!
//! Each measurement has a server of its own (see [`crate::server`]), and is made as those of
//! [`crate::workers`].

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use crate::plot::{self, Axis, Line, Panel, Plot};
use crate::report::Machine;
use crate::server::{QUEUES, Server, program};
use crate::units::show_rate;
use crate::workers::{self, Conditions, Mode, figure, length, median, options, plan};
use vshunt_guest::driver::Disk;
use vshunt_guest::error::Result;
use vshunt_guest::fail;
use vshunt_guest::load::LoadPlan;

/// Most requests in flight on a queue: the descriptors of a queue.
const DEPTH_MAX: u16 = 256;

/// The parameters of the comparison.
#[derive(Clone, Debug)]
pub struct Request {
    /// Requests in flight on each queue.
    pub depths: Vec<u16>,
    /// Numbers of queues.
    pub queues: Vec<u16>,
    /// How each figure is measured.
    pub conditions: Conditions,
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Requests per second, over all queues.
    pub iops: f64,
    /// Microseconds of the server's CPU time per request. Null if it is not known.
    pub server_us_per_io: Option<f64>,
    /// Median latency in nanoseconds.
    pub p50_ns: u64,
}

/// One row: a backend, a number of queues and their workers.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Backend.
    pub format: String,
    /// Number of queues.
    pub queues: u16,
    /// Name of the assignment of queues to workers.
    pub workers: String,
    /// One figure for each depth.
    pub figures: Vec<Figure>,
}

/// The comparison's result.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// The machine of the measurement.
    pub machine: Machine,
    /// Access pattern.
    pub rw: String,
    /// Length of each measurement in seconds.
    pub seconds: f64,
    /// Measurements for each figure.
    pub reps: u16,
    /// Measured rows.
    pub rows: Vec<Row>,
}

/// Returns the assignments that differ for a number of queues.
fn modes(queues: u16) -> &'static [Mode] {
    if queues == 1 { &[Mode::One] } else { &[Mode::One, Mode::PerQueue] }
}

/// Runs all requested measurements, and shows the progress on stderr.
///
/// # Errors
/// A depth or a number of queues out of range; no vshunt program; a measurement that fails.
pub fn compare(request: &Request) -> Result<Table> {
    if let Some(bad) = request.depths.iter().find(|&&depth| depth == 0 || depth > DEPTH_MAX) {
        return Err(fail!(Usage, "--depths {bad}: use 1 to {DEPTH_MAX}"));
    }
    if let Some(bad) = request.queues.iter().find(|&&queues| queues == 0 || queues > QUEUES) {
        return Err(fail!(Usage, "--queues {bad}: use 1 to {QUEUES}"));
    }
    let vshunt = program(request.conditions.vshunt.as_deref())?;
    let mut rows = Vec::new();
    for format in &request.conditions.formats {
        for &queues in &request.queues {
            for &mode in modes(queues) {
                let mut figures = Vec::new();
                for &depth in &request.depths {
                    eprint!("{format}, {queues} jobs, {}, depth {depth}: ", mode.name());
                    let one = || measure(&vshunt, request, format, mode, queues, depth);
                    let measured =
                        median(request.conditions.reps, one).inspect_err(|_| eprintln!("failed"))?;
                    eprintln!("{} IOPS", show_rate(measured.iops));
                    figures.push(Figure::new(depth, &measured));
                }
                rows.push(Row { format: format.clone(), queues, workers: mode.name().into(), figures });
            }
        }
    }
    let seconds = request.conditions.runtime.as_secs_f64();
    Ok(Table {
        machine: Machine::here(),
        rw: request.conditions.rw.name().into(),
        seconds,
        reps: request.conditions.reps,
        rows,
    })
}

fn measure(
    vshunt: &Path,
    request: &Request,
    format: &str,
    mode: Mode,
    queues: u16,
    depth: u16,
) -> Result<workers::Figure> {
    let server = Server::start(vshunt, format, mode == Mode::PerQueue)?;
    let plan =
        LoadPlan { server_pid: Some(server.pid()), iodepth: depth, ..plan(request.conditions.rw, queues) };
    let mut disk = Disk::connect(server.socket(), options(&plan, queues))?;
    figure(&mut disk, &plan, queues, request.conditions.runtime, || Ok(()))
}

impl Figure {
    fn new(depth: u16, measured: &workers::Figure) -> Self {
        let (iops, p50_ns) = (measured.iops, measured.p50_ns);
        Self { depth, iops, server_us_per_io: measured.server_us_per_io, p50_ns }
    }
}

impl Row {
    /// Returns the queues and workers in words.
    fn name(&self) -> String {
        match self.queues {
            1 => "1 queue".into(),
            queues => format!("{queues} queues, {}", self.workers),
        }
    }
}

impl Table {
    /// Returns the table as JSON: `machine`, `rw`, `seconds`, `rows` of `format`, `queues`,
    /// `workers` and `figures`.
    pub fn json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Returns the table as text: IOPS, then the server's CPU time.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ =
            writeln!(out, "4k {}, {}; {}", self.rw, length(self.seconds, self.reps), self.machine.describe());
        out.push_str("IOPS by requests in flight on each queue:\n");
        self.block(&mut out, |figure| show_rate(figure.iops));
        out.push_str("Server's CPU time for a request, in µs:\n");
        self.block(&mut out, |figure| figure.server_us_per_io.map_or("–".into(), |us| format!("{us:.2}")));
        out
    }

    fn block(&self, out: &mut String, cell: impl Fn(&Figure) -> String) {
        let _ = write!(out, "{:<34}", "depth");
        for figure in self.rows.first().map(|row| &row.figures[..]).unwrap_or_default() {
            let _ = write!(out, "{:>9}", figure.depth);
        }
        out.push('\n');
        for row in &self.rows {
            let _ = write!(out, "{:<34}", format!("{}, {}", row.format, row.name()));
            for figure in &row.figures {
                let _ = write!(out, "{:>9}", cell(figure));
            }
            out.push('\n');
        }
    }

    /// Returns the picture of the table's IOPS, with a panel for each backend. `command` is the
    /// command line that measured.
    pub fn plot(&self, command: &str) -> Plot {
        let mut panels: Vec<Panel> = Vec::new();
        for row in &self.rows {
            let points = row.figures.iter().map(|f| (f64::from(f.depth), f.iops)).collect();
            let line = Line { name: row.name(), points };
            plot::panel(&mut panels, format!("format={}", row.format)).lines.push(line);
        }
        Plot {
            title: "vshunt, IOPS by depth".into(),
            notes: vec![
                format!(
                    "Each point: {}. Machine: {}.",
                    length(self.seconds, self.reps),
                    self.machine.describe()
                ),
                format!("$ {command}"),
            ],
            x: Axis::Doubling("depth: requests in flight on each queue"),
            y: "IOPS",
            panels,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vshunt_guest::load::Rw;

    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_assignment() {
        let row = |queues, workers: &str| Row {
            format: "null".into(),
            queues,
            workers: workers.into(),
            figures: vec![Figure { depth: 8, iops: 2.5e5, server_us_per_io: Some(0.25), p50_ns: 1 }],
        };
        let rows = vec![row(1, "one worker"), row(4, "a worker a queue")];
        let machine = Machine { cpus: 2, cpu: Some("A CPU".into()), kernel: "6".into() };
        let table = Table { machine, rw: "randread".into(), seconds: 0.5, reps: 1, rows };
        let text = table.text();
        for part in ["0.5 s a figure; A CPU, 2 CPUs, Linux 6", "null, 1 queue ", "250.0k", "0.25"] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        let plot = table.plot("c");
        let names: Vec<_> = plot.panels[0].lines.iter().map(|line| &line.name[..]).collect();
        assert_eq!(names, ["1 queue", "4 queues, a worker a queue"]);
        assert_eq!(plot.panels[0].lines[0].points, [(8.0, 2.5e5)]);
        assert_eq!(table.json()["rows"][1]["figures"][0]["depth"], 8);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let good = Request {
            depths: vec![1],
            queues: vec![1],
            conditions: Conditions {
                vshunt: Some("no/vshunt".into()),
                formats: vec![],
                rw: Rw::Randread,
                runtime: Duration::ZERO,
                reps: 1,
            },
        };
        let refused = |request: Request| compare(&request).unwrap_err().to_string();
        assert!(refused(Request { depths: vec![257], ..good.clone() }).contains("--depths 257"));
        assert!(refused(Request { queues: vec![1, 17], ..good.clone() }).contains("--queues 17"));
        assert!(refused(good).contains("--vshunt"));
    }
}
