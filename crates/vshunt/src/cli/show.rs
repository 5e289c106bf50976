//! Tables for users: columns two spaces apart, numbers aligned to the right.

mod connections;
mod idle;
mod latency;
mod queues;

use std::fmt::Write as _;

use vshunt_sandbox::{Mode, SandboxInfo};
use vshunt_types::spec::{
    AddressOrigin, BalanceDecision, BalanceInfo, BalanceOutcome, BitmapInfo, Burst, Cache, DiskInfo, Engine,
    ExportInfo, ExportKind, Format, JobInfo, JobKind, JobStatus, MountInfo, NetAddress, NetCounters, NetInfo,
    NetKind, PortState, ResizeDecision, ResizeOutcome, Transport, WorkerInfo, WorkerKind, cpu_list,
};

pub(crate) use self::connections::connections;
pub(crate) use self::idle::ranges;
pub(crate) use self::latency::{latencies, time};
pub(crate) use self::queues::{drops, queues};
use crate::outcome::one_line;

/// The title of a column. A column whose title begins with `>` has numbers.
type Title = &'static str;

pub(crate) fn table<const N: usize>(titles: [Title; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<_> = rows.map(|row| row.map(|cell| one_line(&cell).into_owned())).collect();
    let widths = widths(titles, &rows);
    aligned(titles, &rows, widths, 2)
}

/// Returns the characters that each column needs.
pub(crate) fn widths<const N: usize>(titles: [Title; N], rows: &[[String; N]]) -> [usize; N] {
    let title = |at: usize| titles[at].trim_start_matches('>').chars().count();
    std::array::from_fn(|at| {
        rows.iter().map(|row| row[at].chars().count()).chain([title(at)]).max().unwrap_or(0)
    })
}

/// Returns a table with columns of these widths, `gap` spaces apart. A column of width 0 is left
/// out. A cell that contains the end of a line would forge a row: the caller escapes it.
pub(crate) fn aligned<const N: usize>(
    titles: [Title; N],
    rows: &[[String; N]],
    widths: [usize; N],
    gap: usize,
) -> String {
    let head = titles.map(|t| t.trim_start_matches('>').to_owned());
    let mut out = String::new();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for ((cell, title), width) in row.iter().zip(titles).zip(widths).filter(|(_, width)| *width > 0) {
            let _ = match title.starts_with('>') {
                true => write!(line, "{cell:>width$}{:gap$}", ""),
                false => write!(line, "{cell:<width$}{:gap$}", ""),
            };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Returns `-` for an empty text.
pub(crate) fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

pub(crate) fn disks(disks: &[DiskInfo]) -> String {
    table(
        ["DISK", "FORMAT", ">SIZE", "MODE", "PATH", "EXPORTS", "FILE"],
        disks.iter().map(|d| {
            let format = match d.spec.format() {
                Format::Raw => "raw",
                Format::Qcow2 => "qcow2",
                Format::Null => "null",
                Format::Ram => "ram",
                Format::Nbd => "nbd",
                Format::Frozen => "frozen",
            };
            [
                d.spec.name.clone(),
                format.to_owned(),
                size(d.size_bytes),
                mode(d),
                d.path.clone(),
                or_dash(d.exports.join(",")),
                or_dash(
                    d.spec
                        .file
                        .as_ref()
                        .map(|f| f.display().to_string())
                        .or(d.spec.uri.clone())
                        .unwrap_or_default(),
                ),
            ]
        }),
    )
}

/// Describes the permissions of the daemon's threads in one line.
pub(crate) fn sandbox(info: &SandboxInfo) -> String {
    let or_none = |list: &[String]| if list.is_empty() { "none".to_owned() } else { list.join(",") };
    if info.mode == Mode::Off {
        return "sandbox: off\n".to_owned();
    }
    let line = format!(
        "sandbox: {}; system calls filtered: {}; landlock: {}; capabilities: {}; refused: {}",
        info.mode.name(),
        or_none(&info.filtered),
        info.landlock,
        match (info.mode, info.capabilities.is_empty()) {
            // No capability was dropped.
            (Mode::Log, false) => "all".to_owned(),
            _ => or_none(&info.capabilities),
        },
        info.refused
    );
    format!("{}\n", one_line(&line))
}

/// Returns the options of a disk that differ from the default: `ro`, `direct`, `writethrough`,
/// `unsafe`.
fn mode(disk: &DiskInfo) -> String {
    let words = [
        (disk.spec.readonly, "ro"),
        (!disk.spec.readonly, "rw"),
        (disk.direct_in_use, "direct"),
        (disk.spec.cache == Cache::Writethrough, "writethrough"),
        (disk.spec.cache == Cache::Unsafe, "unsafe"),
    ];
    let words: Vec<&str> = words.iter().filter(|(on, _)| *on).map(|(_, word)| *word).collect();
    words.join(",")
}

pub(crate) fn nets(nets: &[NetInfo]) -> String {
    table(
        ["NET", "TYPE", "INTERFACE", ">QUEUES", ">MTU", "EXPORTS", ">FROM-GUEST", ">TO-GUEST", ">DROPPED"],
        nets.iter().map(|n| {
            let count =
                |f: fn(&NetCounters) -> u64| or_dash(n.counters.map_or(String::new(), |c| f(&c).to_string()));
            let kind = match n.spec.kind {
                NetKind::Tap => "tap",
                NetKind::Switch => "switch",
            };
            [
                n.spec.name.clone(),
                kind.to_owned(),
                or_dash(n.spec.ifname.clone().unwrap_or_default()),
                n.open_queues.to_string(),
                or_dash(n.mtu.map_or(String::new(), |mtu| mtu.to_string())),
                or_dash(n.exports.join(",")),
                count(|c| c.from_guest_packets),
                count(|c| c.to_guest_packets),
                count(|c| c.from_guest_dropped + c.to_guest_dropped),
            ]
        }),
    )
}

/// Returns the table of the addresses that a switch knows.
pub(crate) fn addresses(addresses: &[NetAddress]) -> String {
    table(
        ["ADDRESS", ">VLAN", "PORT", "ORIGIN", ">AGE"],
        addresses.iter().map(|a| {
            let number = |n: Option<u32>| or_dash(n.map_or(String::new(), |n| n.to_string()));
            let origin = match a.origin {
                AddressOrigin::Configured => "configured",
                AddressOrigin::Host => "host",
                AddressOrigin::Learnt => "learnt",
            };
            [
                a.address.to_string(),
                number(a.vlan.map(u32::from)),
                a.export.clone(),
                origin.to_owned(),
                number(a.age_s),
            ]
        }),
    )
}

pub(crate) fn exports(exports: &[ExportInfo]) -> String {
    table(
        ["EXPORT", "TYPE", "BACKEND", "MODE", "STATE", ">QUEUES", "ENGINE", "AT"],
        exports.iter().map(|e| {
            let kind = match e.spec.kind {
                ExportKind::VhostUserBlk => "vhost-user-blk",
                ExportKind::VhostUserNet => "vhost-user-net",
                ExportKind::Fuse => "fuse",
                ExportKind::Uplink => "uplink",
                ExportKind::Nbd => "nbd",
            };
            let at = e.spec.place().unwrap_or_else(|| "-".to_owned());
            let state = match (e.connected, e.spec.kind) {
                _ if e.removing => "removing",
                (_, ExportKind::Fuse) => "mounted",
                (_, ExportKind::Uplink) if is_blocked(e) => "blocked",
                (_, ExportKind::Uplink) => "joined",
                (true, _) if e.leaving => "leaving",
                (true, _) => "connected",
                (false, _) => "waiting",
            };
            [
                e.spec.name.clone(),
                kind.to_owned(),
                e.spec.of().to_owned(),
                if e.spec.refuses_writes() { "ro" } else { "rw" }.to_owned(),
                state.to_owned(),
                (e.queue_list.len() + e.queues_left_out as usize).to_string(),
                engine(e).to_owned(),
                at,
            ]
        }),
    )
}

/// Returns the reasons for the engine of exports with `engine=auto`, and for the transport of
/// mounts with `transport=auto`. None if there are no reasons.
pub(crate) fn choices(exports: &[ExportInfo]) -> Option<String> {
    let rows: Vec<_> = exports
        .iter()
        .filter_map(|e| {
            let of_mount = e.mount.as_ref().filter(|mount| !mount.passthrough);
            let why =
                e.engine_reason.as_ref().or(of_mount.and_then(|mount| mount.transport_reason.as_ref()))?;
            Some([e.spec.name.clone(), engine(e).to_owned(), why.clone()])
        })
        .collect();
    (!rows.is_empty()).then(|| table(["EXPORT", "ENGINE", "CHOSEN BECAUSE"], rows.into_iter()))
}

/// Returns the engine of an export, or the transport of a mount.
fn engine(export: &ExportInfo) -> &'static str {
    match &export.mount {
        Some(MountInfo { passthrough: true, .. }) => "passthrough",
        Some(MountInfo { transport: Transport::IoUring, .. }) => "io_uring",
        Some(_) => "dev",
        None if export.engine == Engine::Kernel => "kernel",
        None => "user",
    }
}

fn is_blocked(export: &ExportInfo) -> bool {
    export.port.as_ref().is_some_and(|port| port.state == PortState::Blocked)
}

/// Returns the table of the ports of switches and their options. None if there are no ports.
pub(crate) fn ports(exports: &[ExportInfo]) -> Option<String> {
    let rows: Vec<_> = exports
        .iter()
        .filter_map(|e| {
            let (spec, port) = (&e.spec, e.port.as_ref()?);
            let vlans = spec.vlan.map(|vlan| vlan.to_string()).into_iter();
            let vlans: Vec<_> = vlans.chain(spec.trunk.as_ref().map(|trunk| format!("{trunk}t"))).collect();
            let options = [
                (port.mac_filter, "mac-filter"),
                (spec.isolated == Some(true), "isolated"),
                (spec.reserved == Some(true), "reserved"),
            ];
            let options: Vec<_> = options.iter().filter(|(on, _)| *on).map(|(_, word)| *word).collect();
            Some([
                spec.name.clone(),
                spec.of().to_owned(),
                or_dash(vlans.join(",")),
                or_dash(options.join(",")),
                port.mtu.to_string(),
                format!("{}/{}", port.addresses, port.mac_limit),
                if is_blocked(e) { "blocked" } else { "forwarding" }.to_owned(),
            ])
        })
        .collect();
    let titles = ["PORT", "SWITCH", "VLANS", "OPTIONS", ">MTU", ">LEARNT", "STATE"];
    (!rows.is_empty()).then(|| table(titles, rows.into_iter()))
}

/// Returns the table of the limits of exports. None if there are none.
pub(crate) fn limits(exports: &[ExportInfo]) -> Option<String> {
    let rows: Vec<_> = exports
        .iter()
        .filter_map(|e| {
            let limits = e.spec.limits.as_ref()?;
            let number = |key: &str, n: u64| if key.starts_with("bps") { size(n) } else { n.to_string() };
            let one = |(key, rate, burst): (&str, Option<u64>, Option<Burst>)| {
                let rate = number(key, rate?);
                Some(match burst {
                    Some(burst) => format!("{key} {rate}+{}:{}s", number(key, burst.rate), burst.seconds),
                    None => format!("{key} {rate}"),
                })
            };
            let sizes = limits.sizes().into_iter();
            let exact = |n: u64| if n.is_multiple_of(1024) { size(n) } else { n.to_string() };
            let sizes = sizes.filter_map(|(key, _, bytes)| Some(format!("{key} {}", exact(bytes?))));
            let all: Vec<_> = limits.rates().into_iter().filter_map(one).chain(sizes).collect();
            let limited: u64 = e.queue_list.iter().map(|queue| queue.limited_us).sum();
            let limited = format!("{:.1}s", std::time::Duration::from_micros(limited).as_secs_f64());
            Some([
                e.spec.name.clone(),
                or_dash(limits.group.clone().unwrap_or_default()),
                all.join(", "),
                limited,
                wait_max(e.limited_ms_max),
            ])
        })
        .collect();
    (!rows.is_empty())
        .then(|| table(["EXPORT", "GROUP", "LIMITS", ">LIMITED", ">WAIT-MAX"], rows.into_iter()))
}

/// Returns how long limits hold back a request at most.
fn wait_max(ms: Option<u64>) -> String {
    match ms.map(std::time::Duration::from_millis) {
        None => "-".to_owned(),
        Some(wait) if wait.as_secs() < 100 => format!("{:.1}s", wait.as_secs_f64()),
        Some(wait) => format!("{}s", wait.as_secs()),
    }
}

/// Returns the table of exports whose queues follow load. None if there are none.
pub(crate) fn balance(exports: &[ExportInfo]) -> Option<String> {
    balance_of(exports.iter().filter_map(|e| Some((e.spec.name.as_str(), e.balancing.as_ref()?))))
}

/// Returns the same table for exports with these names.
pub(crate) fn balance_of<'a>(exports: impl Iterator<Item = (&'a str, &'a BalanceInfo)>) -> Option<String> {
    let rows: Vec<_> = exports
        .map(|(name, balancing)| {
            let stay: Vec<_> = balancing.attached.iter().map(|&index| usize::from(index)).collect();
            let last = balancing.last.as_ref().map(|last| {
                let what = match last.outcome {
                    BalanceOutcome::Moved => "",
                    BalanceOutcome::Failed => ", failed",
                    BalanceOutcome::DryRun => ", not done",
                };
                let BalanceDecision { index, from, worker, age_s, reason, .. } = last;
                format!("queue {index} from worker {from} to {worker}{what}, {age_s} s ago: {reason}")
            });
            let resized = balancing.resized.as_ref().map(|resized| {
                let what = match resized.outcome {
                    ResizeOutcome::Done => "",
                    ResizeOutcome::Failed => ", failed",
                    ResizeOutcome::DryRun => ", not done",
                };
                let ResizeDecision { workers, age_s, reason, .. } = resized;
                format!(
                    "{workers} worker{}{what}, {age_s} s ago: {reason}",
                    if *workers == 1 { "" } else { "s" }
                )
            });
            [
                name.to_owned(),
                balancing.mode.to_string(),
                balancing.moves.to_string(),
                or_dash(cpu_list(&stay)),
                or_dash(last.into_iter().chain(resized).collect::<Vec<_>>().join("; ")),
            ]
        })
        .collect();
    (!rows.is_empty()).then(|| table(["EXPORT", "BALANCE", ">MOVES", "STAY", "LAST"], rows.into_iter()))
}

pub(crate) fn jobs(jobs: &[JobInfo]) -> String {
    table(
        ["JOB", "TYPE", "DISK", "STATUS", ">DONE", ">TOTAL", "SPEED", "TO", "ERROR"],
        jobs.iter().map(|j| {
            let kind = match j.kind {
                JobKind::Backup => "backup",
                JobKind::Commit => "commit",
                JobKind::Mirror => "mirror",
                JobKind::Stream => "stream",
            };
            let status = match j.status {
                status if j.cancelled && status != JobStatus::Concluded => "cancelling",
                JobStatus::Running => "running",
                JobStatus::Paused => "paused",
                JobStatus::Ready => "ready",
                JobStatus::Aborting => "aborting",
                JobStatus::Pending => "pending",
                JobStatus::Concluded if j.cancelled => "cancelled",
                JobStatus::Concluded if j.error.is_some() => "failed",
                JobStatus::Concluded => "done",
            };
            // A pull backup copies nothing by itself.
            let copied = |bytes| if j.pull.is_some() { or_dash(String::new()) } else { size(bytes) };
            let speed = match j.speed {
                _ if j.pull.is_some() => or_dash(String::new()),
                None => "shared".to_owned(),
                Some(0) => "max".to_owned(),
                Some(n) => format!("{}/s", size(n)),
            };
            [
                j.id.clone(),
                kind.to_owned(),
                j.disk.clone(),
                status.to_owned(),
                copied(j.done_bytes),
                copied(j.total_bytes),
                speed,
                match (&j.fleece, j.fleece_bytes) {
                    (Some(file), Some(n)) => format!("{}, {} in {}", j.target, size(n), file.display()),
                    _ => j.target.clone(),
                },
                or_dash(match &j.waits_for {
                    Some(storage) => format!("waits for {storage}"),
                    None => j.error.clone().unwrap_or_default(),
                }),
            ]
        }),
    )
}

pub(crate) fn bitmaps(bitmaps: &[(&str, &BitmapInfo)]) -> String {
    table(
        ["DISK", "BITMAP", ">GRANULARITY", ">DIRTY", "STATE", "KEPT"],
        bitmaps.iter().map(|(disk, b)| {
            let state = match (b.busy, b.recording) {
                (true, _) => "busy",
                (false, true) => "recording",
                (false, false) => "disabled",
            };
            let kept = if b.persistent { "in the image" } else { "until the disk is closed" };
            [
                (*disk).to_owned(),
                b.name.clone(),
                size(b.granularity),
                size(b.count),
                state.to_owned(),
                kept.to_owned(),
            ]
        }),
    )
}

pub(crate) fn workers(workers: &[WorkerInfo]) -> String {
    table(
        [
            ">WORKER",
            "NAME",
            "KIND",
            "CPU",
            ">NICE",
            ">POLL-US",
            ">REQUESTS",
            ">CPU-TIME",
            ">BUSY",
            ">POLLING",
            ">SLEEPING",
            "QUEUES",
        ],
        workers.iter().map(|w| {
            [
                w.id.to_string(),
                w.name.clone(),
                match w.kind {
                    WorkerKind::User if w.stalled => "user, stalled",
                    WorkerKind::User => "user",
                    WorkerKind::Kernel => "kernel",
                }
                .to_owned(),
                or_dash(cpu_list(&w.cpu)),
                w.nice.to_string(),
                w.poll_us.to_string(),
                w.requests.to_string(),
                format!("{:.2}s", w.cpu_time_us as f64 / 1e6),
                share(w, w.busy_us),
                share(w, w.polling_us),
                share(w, w.sleeping_us),
                or_dash(idle::ranges(&w.queues)),
            ]
        }),
    )
}

/// Formats a part of a worker's time as a share of its time; `-` if a daemon does not tell it.
fn share(worker: &WorkerInfo, us: u64) -> String {
    match worker.busy_us + worker.polling_us + worker.sleeping_us {
        0 => "-".to_owned(),
        all => format!("{:.1}%", us as f64 / all as f64 * 100.0),
    }
}

/// Formats bytes in the largest unit in which the number is at least 1, with one decimal if it is
/// not whole.
fn size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    for (shift, unit) in UNITS {
        if bytes >= 1 << shift {
            let whole = bytes >> shift;
            if bytes == whole << shift {
                return format!("{whole}{unit}");
            }
            return format!("{:.1}{unit}", bytes as f64 / (1u64 << shift) as f64);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use vshunt_types::spec::{DropReason, NetDrops, NetQueueCounters, QueueInfo};

    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["a".to_owned(), "1".to_owned()], ["long-é".to_owned(), "100".to_owned()]];
        assert_eq!(table(["N", ">NUM"], rows.into_iter()), "N       NUM\na         1\nlong-é  100\n");
        let forged = [["a\nb  7".to_owned(), "1".to_owned()]];
        assert_eq!(table(["N", ">NUM"], forged.into_iter()), "N        NUM\na\\nb  7    1\n");
    }

    #[test]
    fn sizes_and_cpus_are_short() {
        let cases =
            [(0, "0"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), (3 << 29, "1.5G"), (1 << 41, "2T")];
        for (bytes, want) in cases {
            assert_eq!(size(bytes), want);
        }
        assert_eq!(cpu_list(&[0, 1, 2, 3, 6, 8, 9]), "0-3,6,8-9");
        assert_eq!(cpu_list(&[]), "");
    }

    #[test]
    fn an_export_that_is_being_removed_or_left_says_so() {
        let export = |removing: bool, leaving: bool| -> ExportInfo {
            let value = serde_json::json!({ "type": "vhost-user-blk", "name": "e0", "disk": "d0", "engine": "user",
                "connected": true, "leaving": leaving, "removing": removing, "features": [], "queue-list": [] });
            serde_json::from_value(value).unwrap()
        };
        let cases = [(false, false, "connected"), (false, true, "leaving"), (true, true, "removing")];
        for (removing, leaving, state) in cases {
            let text = exports(&[export(removing, leaving)]);
            assert_eq!(
                text.lines().nth(1).and_then(|row| row.split_whitespace().nth(4)),
                Some(state),
                "{text}"
            );
        }
    }

    #[test]
    fn addresses_of_a_switch_are_a_table() {
        let value = serde_json::json!([
            { "address": "52:54:00:00:00:01", "export": "c0", "origin": "configured" },
            { "address": "52:54:00:00:00:02", "export": "u0", "origin": "learnt", "vlan": 5, "age-s": 12 },
        ]);
        let list: Vec<NetAddress> = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(serde_json::to_value(&list).unwrap(), value);
        let want = "ADDRESS            VLAN  PORT  ORIGIN      AGE\n\
                    52:54:00:00:00:01     -  c0    configured    -\n\
                    52:54:00:00:00:02     5  u0    learnt       12\n";
        assert_eq!(addresses(&list), want);
    }

    #[test]
    fn the_reason_of_a_choice_is_shown() {
        let export = |kind: &str, more: serde_json::Value| -> ExportInfo {
            let mut value = serde_json::json!({ "type": kind, "name": "e0", "disk": "d0", "engine": "user",
                "connected": false, "features": [], "queue-list": [] });
            value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            serde_json::from_value(value).unwrap()
        };
        let mount = |passthrough: bool, why: Option<&str>| {
            let mut mount = serde_json::json!({ "transport": "dev", "passthrough": passthrough, "allow-other": true,
                "open-files": 0 });
            if let Some(why) = why {
                mount["transport-reason"] = why.into();
            }
            export("fuse", serde_json::json!({ "mountpoint": "/m", "mount": mount }))
        };
        let kernel = export("vhost-user-blk", serde_json::json!({ "engine-reason": "no module" }));
        let shown = |e: ExportInfo| choices(&[e]);
        assert_eq!(shown(mount(false, None)), None);
        assert_eq!(shown(mount(true, Some("with passthrough"))), None);
        let want = |engine: &str, why: &str| {
            Some(table(
                ["EXPORT", "ENGINE", "CHOSEN BECAUSE"],
                [["e0", engine, why].map(str::to_owned)].into_iter(),
            ))
        };
        assert_eq!(shown(mount(false, Some("no ring"))), want("dev", "no ring"));
        assert_eq!(shown(kernel), want("user", "no module"));
    }

    #[test]
    fn only_what_was_dropped_is_listed() {
        let queue = |export: &str, net: Option<NetQueueCounters>| QueueInfo {
            export: export.to_owned(),
            index: 1,
            worker: 0,
            state: "running".to_owned(),
            size: 256,
            packed: false,
            in_flight: 0,
            generation: 1,
            requests: 0,
            reads: 0,
            writes: 0,
            flushes: 0,
            errors: 0,
            read_bytes: 0,
            write_bytes: 0,
            kicks: 0,
            notifications: 0,
            limited_us: 0,
            limited: false,
            net,
            service_times: None,
        };
        let nic = |drops| queue("c0", Some(NetQueueCounters { drops, ..NetQueueCounters::default() }));
        assert_eq!(drops(&[nic(NetDrops::default()), queue("d0", None)]), None);
        let some = NetDrops::new(|why| match why {
            DropReason::NoRoom => 12,
            DropReason::Detached => 3,
            _ => 0,
        });
        let want = "QUEUE  DROPPED   FRAMES\nc0:1   no-room       12\nc0:1   detached       3\n";
        assert_eq!(drops(&[queue("d0", None), nic(some)]).as_deref(), Some(want));
    }

    #[test]
    fn what_the_daemon_tells_can_be_read_back() {
        let daemon = vshunt_daemon::Daemon::new(vshunt_daemon::Options { poll_us: 0 }).unwrap();
        let spec = "name=d,format=null,size=1G";
        daemon.disk_add(crate::keyval::parse(spec).unwrap()).unwrap();
        let text = serde_json::to_string(&daemon.disks()).unwrap();
        let back: Vec<DiskInfo> = serde_json::from_str(&text).unwrap();
        assert_eq!(back, daemon.disks());
        assert!(disks(&back).contains("null"));
    }
}
