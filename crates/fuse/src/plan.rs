//! Plans a mount: transport, number of queues, passthrough. A mount that is impossible is refused
//! before anything is made.

use rustix::thread::CapabilitySet;
use vshunt_block::{Disk, SECTOR_BYTES};
use vshunt_engine::allowed_cpus;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportSpec, Passthrough, Transport, cpu_list};

use crate::queue::{CHANNEL_BYTES, RING_QUEUE_BYTES};

/// Parameter of the kernel's fuse module that permits requests over io_uring.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";
/// CPUs that the machine can have.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// CPUs that it has now.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// How a mount is to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePlan {
    /// `Dev` or `IoUring`.
    pub transport: Transport,
    /// With `transport=auto`: the reason why it is not `IoUring`.
    pub transport_reason: Option<String>,
    /// Number of queues. Over io_uring: one for each possible CPU, and a channel for requests that
    /// these do not carry.
    pub queues: u16,
    /// Whether the kernel serves reads and writes from the image by itself.
    pub passthrough: bool,
    /// The reason why not, unless the user switched it off.
    pub passthrough_reason: Option<String>,
}

/// Plans the mount of an export.
///
/// # Errors
/// `Unsupported` if `transport=io_uring` is impossible. The message names the remedy.
pub fn plan(spec: &ExportSpec, disk: &Disk, queues_max: u16, queues_default: u16) -> Result<QueuePlan> {
    let passthrough = passthrough(spec, disk);
    let wanted = spec.transport.unwrap_or_default();
    let channels = spec.queues.unwrap_or(queues_default).min(queues_max);
    let (transport, queues, transport_reason) = match (wanted, ring_queues(spec, queues_max)) {
        (Transport::Dev, _) => (Transport::Dev, channels, None),
        (Transport::IoUring, Ok(rings)) => (Transport::IoUring, rings + 1, None),
        (Transport::IoUring, Err(why)) => {
            return Err(Error::unsupported(format!("export {}: no transport=io_uring: {why}", spec.name)));
        }
        (Transport::Auto, Ok(_)) if passthrough.is_ok() => {
            (Transport::Dev, channels, Some("with passthrough no data goes by the queues".to_owned()))
        }
        (Transport::Auto, Ok(rings)) => match (forbidden_cpus(), too_little_memory(rings)) {
            (None, None) => (Transport::IoUring, rings + 1, None),
            // A channel has as many buffers as two ring queues, so the number of channels is
            // limited, too.
            (_, Some((why, room))) if spec.queues.is_none() => {
                (Transport::Dev, channels.min(room), Some(why))
            }
            (Some(why), _) | (None, Some((why, _))) => (Transport::Dev, channels, Some(why)),
        },
        (Transport::Auto, Err(why)) => (Transport::Dev, channels, Some(why)),
    };
    let (passthrough, passthrough_reason) = match passthrough {
        Ok(()) => (true, None),
        Err(why) => (false, Some(why).filter(|_| spec.passthrough != Some(Passthrough::Off))),
    };
    Ok(QueuePlan { transport, transport_reason, queues, passthrough, passthrough_reason })
}

/// Checks whether the kernel offers FUSE over io_uring to this process, as `transport=auto` does.
///
/// # Errors
/// The reason why `transport=auto` uses channels of /dev/fuse, with the remedy.
pub fn check_uring() -> Result<(), String> {
    uring_is_on()?;
    forbidden_cpus().map_or(Ok(()), Err)
}

/// Checks the parameter of the kernel's fuse module.
fn uring_is_on() -> Result<(), String> {
    match std::fs::read_to_string(ENABLE_URING) {
        Ok(text) if text.trim() == "Y" => Ok(()),
        Ok(_) => {
            Err(format!("FUSE over io_uring is switched off; root can switch it on: echo Y >{ENABLE_URING}"))
        }
        Err(_) => Err(format!("this kernel has no FUSE over io_uring (Linux 6.14 or newer, {ENABLE_URING})")),
    }
}

/// The number of ring queues, or the reason why there can be none.
fn ring_queues(spec: &ExportSpec, queues_max: u16) -> Result<u16, String> {
    uring_is_on()?;
    let cpus = possible_cpus()?;
    if cpus >= queues_max {
        return Err(format!(
            "it has a queue for each possible CPU, {cpus} here, and an export has {queues_max} at most"
        ));
    }
    match spec.queues {
        Some(n) if n != cpus => Err(format!(
            "it has a queue for each possible CPU; leave out queues={n}, or give the {cpus} that there are here"
        )),
        _ => Ok(cpus),
    }
}

/// One more than the highest CPU number.
fn possible_cpus() -> Result<u16, String> {
    let text = std::fs::read_to_string(POSSIBLE).map_err(|e| format!("{POSSIBLE}: {e}"))?;
    let last = text.trim().rsplit([',', '-']).next().and_then(|n| n.parse::<u16>().ok());
    last.and_then(|n| n.checked_add(1)).ok_or_else(|| format!("{POSSIBLE} is not understood: {text:?}"))
}

/// The reason why the daemon should not serve a queue for each CPU, if it may not run on all of
/// them. A request comes by the queue of the CPU where it is made. From a CPU that the daemon may
/// not use, each request would wake a worker on another CPU.
fn forbidden_cpus() -> Option<String> {
    forbidden(&cpus_of(&std::fs::read_to_string(ONLINE).ok()?), &allowed_cpus())
}

fn forbidden(online: &[usize], allowed: &[usize]) -> Option<String> {
    let others: Vec<_> = online.iter().copied().filter(|cpu| !allowed.contains(cpu)).collect();
    if others.is_empty() {
        return None;
    }
    Some(format!(
        "io_uring has a queue for each CPU, and the daemon may not run on CPU {} (cpuset or affinity); \
         ask for transport=io_uring to have it all the same",
        cpu_list(&others)
    ))
}

/// Returns the CPU numbers of a list in the kernel's notation: `0-3,8`.
pub fn cpus_of(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// If the address space is limited (RLIMIT_AS) and has no room for the buffers of that many ring
/// queues: the reason, and the number of channels that it has room for. At least one channel, which
/// then fails with its own error.
fn too_little_memory(rings: u16) -> Option<(String, u16)> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let used = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let used_kib = used.trim().trim_end_matches(" kB").parse::<u64>().ok()?;
    short_of_memory(rings, limit.saturating_sub(used_kib << 10))
}

fn short_of_memory(rings: u16, free: u64) -> Option<(String, u16)> {
    // The channel for requests that ring queues do not carry is as large as any other.
    let needed = u64::from(rings) * RING_QUEUE_BYTES + CHANNEL_BYTES;
    (needed > free).then(|| {
        let why = format!(
            "io_uring needs {} MiB of address space for {rings} queues, and the limit leaves {}; raise it (ulimit -v, \
             LimitAS=)",
            needed >> 20,
            free >> 20
        );
        (why, u16::try_from(free / CHANNEL_BYTES).unwrap_or(u16::MAX).max(1))
    })
}

/// Whether the kernel may serve reads and writes from the image by itself, or the reason why not.
fn passthrough(spec: &ExportSpec, disk: &Disk) -> Result<(), String> {
    if spec.passthrough == Some(Passthrough::Off) {
        return Err("it is switched off".to_owned());
    }
    if spec.limits.is_some() {
        return Err("the kernel would not keep the limits".to_owned());
    }
    let Some(image) = disk.image() else {
        return Err("only a raw image is a file that the kernel can go to".to_owned());
    };
    let Some(meta) = image.metadata().ok().filter(|m| m.file_type().is_file()) else {
        return Err("the kernel does it for files, not for block devices".to_owned());
    };
    if !rustix::thread::capabilities(None).is_ok_and(|c| c.effective.contains(CapabilitySet::SYS_ADMIN)) {
        return Err("the kernel does it for root alone (CAP_SYS_ADMIN)".to_owned());
    }
    let (writable, growable) = (spec.writable.unwrap_or(false), spec.growable.unwrap_or(false));
    if !growable && !meta.len().is_multiple_of(SECTOR_BYTES) {
        return Err("the image ends within a sector, which the kernel would not fill with zeroes".to_owned());
    }
    if growable && disk.image_may_wait() {
        return Err(
            "the image is a file that another program serves, which would be asked for its size".to_owned()
        );
    }
    if writable && !growable {
        return Err("writes beyond the end could not be refused; growable=on allows them".to_owned());
    }
    if disk.cache() == vshunt_types::spec::Cache::Writethrough && writable {
        return Err("writes would not be stable at once, as cache=writethrough has it".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(cpus_of("0\n"), [0]);
        assert_eq!(cpus_of("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert!(cpus_of("\n").is_empty());
    }

    #[test]
    fn a_cpu_that_the_daemon_may_not_use_is_named() {
        assert_eq!(forbidden(&[0, 1], &[0, 1]), None);
        // A CPU that is offline does not matter.
        assert_eq!(forbidden(&[0, 1], &[0, 1, 2, 3]), None);
        let why = forbidden(&[0, 1, 2, 3], &[1]).unwrap();
        assert!(why.contains("CPU 0,2-3") && why.contains("transport=io_uring"), "{why}");
    }

    #[test]
    fn a_limit_that_is_too_low_is_named() {
        let needed = 2 * RING_QUEUE_BYTES + CHANNEL_BYTES;
        assert_eq!(short_of_memory(2, needed), None);
        let (why, room) = short_of_memory(2, needed - 1).unwrap();
        assert_eq!((room, short_of_memory(2, 0).unwrap().1), (1, 1));
        assert_eq!(short_of_memory(200, 3 * CHANNEL_BYTES).unwrap().1, 3);
        assert!(why.contains("2 queues") && why.contains("ulimit -v"), "{why}");
    }
}
