//! What a mount is going to be: decided, and refused where it cannot be, before anything is made.

use rustix::thread::CapabilitySet;

use crate::backend::block::Disk;
use crate::error::{Error, Result};
use crate::export::spec::{ExportSpec, Passthrough, Transport};

/// The switch of the kernel's fuse module for requests over io_uring.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";
/// CPUs that there can be.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `Dev` or `IoUring`.
    pub transport: Transport,
    /// Why not over io_uring, where `auto` was asked for.
    pub transport_why: Option<String>,
    /// Queues to make. Over io_uring one for each possible CPU, and a channel for what does not go by them.
    pub queues: u16,
    /// Reads and writes are to go to the image within the kernel.
    pub passthrough: bool,
    /// Why not, where it was not switched off.
    pub passthrough_why: Option<String>,
}

/// Decides.
///
/// # Errors
/// `Invalid` and `Unsupported`, with what to change.
pub fn plan(spec: &ExportSpec, disk: &Disk, queues_max: u16, queues_default: u16) -> Result<Plan> {
    let passthrough = passthrough(spec, disk);
    let wanted = spec.transport.unwrap_or_default();
    let channels = spec.queues.unwrap_or(queues_default).min(queues_max);
    let (transport, queues, transport_why) = match (wanted, ring_queues(spec, queues_max)) {
        (Transport::Dev, _) => (Transport::Dev, channels, None),
        (Transport::IoUring, Ok(rings)) => (Transport::IoUring, rings + 1, None),
        (Transport::IoUring, Err(why)) => {
            return Err(Error::unsupported(format!("export {}: no transport=io_uring: {why}", spec.name)));
        }
        (Transport::Auto, Ok(_)) if passthrough.is_ok() => {
            (Transport::Dev, channels, Some("with passthrough no data goes by the queues".to_owned()))
        }
        (Transport::Auto, Ok(rings)) => (Transport::IoUring, rings + 1, None),
        (Transport::Auto, Err(why)) => (Transport::Dev, channels, Some(why)),
    };
    let (passthrough, passthrough_why) = match passthrough {
        Ok(()) => (true, None),
        Err(why) => (false, Some(why).filter(|_| spec.passthrough != Some(Passthrough::Off))),
    };
    Ok(Plan { transport, transport_why, queues, passthrough, passthrough_why })
}

/// How many ring queues there have to be, or why there can be none.
fn ring_queues(spec: &ExportSpec, queues_max: u16) -> Result<u16, String> {
    match std::fs::read_to_string(ENABLE_URING) {
        Ok(text) if text.trim() == "Y" => {}
        Ok(_) => return Err(format!("it is switched off; root can switch it on: echo Y >{ENABLE_URING}")),
        Err(_) => return Err(format!("this kernel has none (Linux 6.14 or newer, {ENABLE_URING})")),
    }
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
    last.map(|n| n + 1).ok_or_else(|| format!("{POSSIBLE} is not understood: {text:?}"))
}

/// Whether the kernel may read and write the image by itself, or why not.
fn passthrough(spec: &ExportSpec, disk: &Disk) -> Result<(), String> {
    if spec.passthrough == Some(Passthrough::Off) {
        return Err("it is switched off".to_owned());
    }
    let Some(image) = disk.image() else {
        return Err("only a raw image is a file that the kernel can go to".to_owned());
    };
    if !image.metadata().is_ok_and(|m| m.file_type().is_file()) {
        return Err("the kernel does it for files, not for block devices".to_owned());
    }
    if !rustix::thread::capabilities(None).is_ok_and(|c| c.effective.contains(CapabilitySet::SYS_ADMIN)) {
        return Err("the kernel does it for root alone (CAP_SYS_ADMIN)".to_owned());
    }
    let (writable, growable) = (spec.writable.unwrap_or(false), spec.growable.unwrap_or(false));
    if growable && disk.image_may_wait() {
        return Err(
            "the image is a file that another program serves, which would be asked for its size".to_owned()
        );
    }
    if writable && !growable {
        return Err("writes beyond the end could not be refused; growable=on allows them".to_owned());
    }
    if disk.cache() == crate::export::spec::Cache::Writethrough && writable {
        return Err("writes would not be stable at once, as cache=writethrough has it".to_owned());
    }
    Ok(())
}
