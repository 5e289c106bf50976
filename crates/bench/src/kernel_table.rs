//! Measurements next to the tables that started this project: one worker of the kernel compared
//! with several, attached at set-up and under load, and vhost-blk on a RAM disk.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::report::Machine;
use crate::units::show_rate;
use crate::workers::{Figure, Mode, Row, Table, figure, options, plan};
use vshunt_guest::driver::{Disk, KernelOptions, Workers};
use vshunt_guest::error::{Error, Kind, Result};
use vshunt_guest::load::Rw;

/// vhost-blk on a RAM disk, queues as vCPUs (fio 4k, direct, libaio, depth 128): thousand IOPS,
/// random read and random write. `None` if the original table has none.
type Cell = Option<(u32, u32)>;
const COLUMNS: [(&str, u16, u16); 5] =
    [("1", 1, 1), ("2", 2, 1), ("4", 4, 1), ("8, 1 worker", 8, 1), ("8, 2 workers", 8, 2)];
const SEED: [(&str, [Cell; 5]); 2] = [
    ("seed, QEMU virtio-blk", [Some((123, 129)), Some((253, 250)), Some((158, 154)), None, None]),
    ("seed, vhost-blk", [Some((110, 113)), Some((247, 252)), None, Some((497, 469)), Some((730, 701))]),
];

/// The parameters of the measurement.
#[derive(Clone, Debug)]
pub struct Request {
    /// The device, and the options that stay the same. Its backend is not used.
    pub kernel: KernelOptions,
    /// Block devices to compare.
    pub backends: Vec<PathBuf>,
    /// Numbers of queues of the first table.
    pub jobs: Vec<u16>,
    /// Length of each measurement.
    pub runtime: Duration,
}

/// One column of the second table.
#[derive(Clone, Debug, Serialize)]
pub struct RamFigure {
    /// Number of queues.
    pub queues: u16,
    /// Number of workers.
    pub workers: u16,
    /// Random reads per second.
    pub randread: Figure,
    /// Random writes per second.
    pub randwrite: Figure,
}

/// Both tables.
#[derive(Clone, Debug, Serialize)]
pub struct Tables {
    /// One worker compared with several.
    pub workers: Table,
    /// The original RAM-disk table, for each backend.
    pub ram: Vec<(String, Vec<RamFigure>)>,
}

/// Runs all measurements, and shows the progress on stderr.
pub fn measure(request: &Request) -> Result<Tables> {
    let mut rows = Vec::new();
    let mut ram = Vec::new();
    for backend in &request.backends {
        let name = backend.display().to_string();
        for mode in Mode::ALL {
            let mut figures = Vec::new();
            for &jobs in &request.jobs {
                eprint!("{name}, {}, {jobs} queues: ", mode.name());
                let workers = if mode == Mode::PerQueue { Workers::PerQueue } else { Workers::One };
                figures.push(one(request, backend, workers, jobs, Rw::Randrw, mode == Mode::Attached)?);
            }
            rows.push(Row { format: name.clone(), workers: mode.name().into(), figures });
        }
        let mut columns = Vec::new();
        for (title, queues, workers) in COLUMNS {
            let mut both = Vec::new();
            for rw in [Rw::Randread, Rw::Randwrite] {
                eprint!("{name}, {} on {title}: ", rw.name());
                both.push(one(request, backend, Workers::Count(workers), queues, rw, false)?);
            }
            let [randread, randwrite] = both.try_into().expect("two patterns");
            columns.push(RamFigure { queues, workers, randread, randwrite });
        }
        ram.push((name, columns));
    }
    let seconds = request.runtime.as_secs_f64();
    let workers = Table { machine: Machine::here(), rw: Rw::Randrw.name().into(), seconds, reps: 1, rows };
    Ok(Tables { workers, ram })
}

fn one(
    request: &Request,
    backend: &std::path::Path,
    workers: Workers,
    queues: u16,
    rw: Rw,
    attach: bool,
) -> Result<Figure> {
    let plan = plan(rw, queues);
    let kernel = KernelOptions { backend: backend.to_owned(), workers, ..request.kernel.clone() };
    let mut disk = Disk::open_kernel(&kernel, options(&plan, queues))?;
    let vhost = disk.transport().kernel().map(|kernel| kernel.vhost().clone());
    let attach = || {
        let Some(vhost) = vhost.filter(|_| attach) else { return Ok(()) };
        let vhost_error = |e: vhost_kernel::Error| Error::new(Kind::System, e.to_string());
        // The first one stays on its worker.
        (1..u32::from(queues))
            .try_for_each(|ring| vhost.attach(ring, vhost.new_worker()?))
            .map_err(vhost_error)
    };
    let figure =
        figure(&mut disk, &plan, queues, request.runtime, attach).inspect_err(|_| eprintln!("failed"))?;
    eprintln!("{} IOPS", show_rate(figure.iops));
    Ok(figure)
}

impl Tables {
    /// Returns the tables as text: this measurement, then the original.
    pub fn text(&self) -> String {
        let mut out = self.workers.text();
        let _ =
            write!(out, "\nvhost-blk, 4k, depth 128, random read / random write, IOPS:\n{:<34}", "queues");
        for (title, ..) in COLUMNS {
            let _ = write!(out, "{title:>16}");
        }
        out.push('\n');
        for (backend, columns) in &self.ram {
            let _ = write!(out, "{:<34}", format!("vshunt, {backend}"));
            for one in columns {
                let cell = format!("{} / {}", show_rate(one.randread.iops), show_rate(one.randwrite.iops));
                let _ = write!(out, "{cell:>16}");
            }
            out.push('\n');
        }
        for (name, cells) in SEED {
            let _ = write!(out, "{name:<34}");
            for cell in cells {
                let cell = cell.map_or("–".into(), |(rr, rw)| format!("{rr}k / {rw}k"));
                let _ = write!(out, "{cell:>16}");
            }
            out.push('\n');
        }
        out.push_str(
            "The seed was measured on hardware unlike this: compare shapes and ratios, not numbers.\n",
        );
        out
    }

    /// Returns the tables as JSON.
    pub fn json(&self) -> serde_json::Value {
        let ram: Vec<_> = self
            .ram
            .iter()
            .map(|(backend, figures)| serde_json::json!({ "backend": backend, "figures": figures }))
            .collect();
        serde_json::json!({ "workers": self.workers.json(), "ram": ram })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_measurement_and_the_original_are_shown() {
        let figure = Figure { jobs: 1, iops: 2.5e5, server_us_per_io: None, p50_ns: 0 };
        let one = RamFigure { queues: 1, workers: 1, randread: figure.clone(), randwrite: figure.clone() };
        let row = Row { format: "/dev/ram0".into(), workers: "one worker".into(), figures: vec![figure] };
        let workers =
            Table { machine: Machine::here(), rw: "randrw".into(), seconds: 1.0, reps: 1, rows: vec![row] };
        let tables = Tables { workers, ram: vec![("/dev/ram0".into(), vec![one])] };
        let text = tables.text();
        assert!(text.contains("250.0k / 250.0k") && text.contains("730k / 701k"), "{text}");
        assert_eq!(tables.json()["ram"][0]["figures"][0]["randread"]["iops"], 250_000.0);
    }
}
