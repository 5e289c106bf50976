//! Opening a disk on a server.

use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use ::nbd::transmission_flag::{CAN_MULTI_CONN, READ_ONLY, SEND_FLUSH, SEND_FUA, SEND_TRIM};
use ::nbd::{Server, Settings, Uri};
use rustix::mm::ProtFlags;
use vshunt_engine::EventFd;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Kind, Result};
use vshunt_types::spec::{Cache, Direct, DiskSpec, Format};

use super::connect::{Needs, Place, Target};
use super::connector::{Connector, TRY};
use super::in_use::InUse;
use super::one::One;
use super::port::{Connected, Port};
use super::stream::Limit;
use super::table::ZERO_BYTES;
use super::tls::Tls;
use super::unflushed::Unflushed;
use super::{Flag, Nbd, Shared};
use crate::limits::{Limits, SECTOR_BYTES, why_no_size};
use crate::memory::Mapping;

/// Longest value of `reconnect-delay` and `open-timeout`, seconds: a day.
const SECONDS_MAX: u32 = 86_400;
/// Pause between two tries to open.
const PAUSE: Duration = Duration::from_millis(200);

/// Checks the keys of a disk on a server.
///
/// # Errors
/// `Invalid`, with the key and the remedy.
pub(crate) fn check(spec: &DiskSpec) -> Result<Uri> {
    let name = &spec.name;
    if let Some(file) = &spec.file {
        return Err(Error::invalid(format!(
            "disk {name} has format nbd, which has no image: leave out file={}, and say uri=nbd://host:port/export",
            file.display()
        )));
    }
    let Some(uri) = &spec.uri else {
        return Err(Error::invalid(format!(
            "disk {name} has format nbd, which needs a server: add uri=nbd://host:port/export or \
             uri=nbd+unix:///export?socket=/path"
        )));
    };
    if spec.size.is_some() {
        return Err(Error::invalid(format!("disk {name} has the size that its server says: leave out size")));
    }
    if spec.direct == Direct::On {
        return Err(Error::invalid(format!(
            "disk {name} has format nbd, which has no page cache here: leave out direct=on"
        )));
    }
    for (key, value) in [("reconnect-delay", spec.reconnect_delay), ("open-timeout", spec.open_timeout)] {
        if value.is_some_and(|seconds| seconds > SECONDS_MAX) {
            return Err(Error::invalid(format!("disk {name}: {key} is from 0 to {SECONDS_MAX} seconds")));
        }
    }
    uri.parse().map_err(|e| Error::invalid(format!("disk {name}: the URI {uri} {e}")))
}

/// Returns the folder with certificates that the URI of a disk names.
pub fn certificates_of(spec: &DiskSpec) -> Option<PathBuf> {
    let uri: Uri = spec.uri.as_ref()?.parse().ok()?;
    uri.tls?.certificates
}

/// Refuses keys of this format in disks of other formats, and a URI where a file should be.
///
/// # Errors
/// `Invalid`, with the key and the remedy.
pub(crate) fn check_others(spec: &DiskSpec) -> Result<()> {
    let name = &spec.name;
    if let Some(file) = spec.file.as_ref().and_then(|file| file.to_str()).filter(|file| {
        let scheme = file.split_once("://").map(|(scheme, _)| scheme);
        scheme.is_some_and(|scheme| ["nbd", "nbds", "nbd+unix", "nbds+unix"].contains(&scheme))
    }) {
        return Err(Error::invalid(format!(
            "disk {name}: {file} is no file: say uri={file} instead of file="
        )));
    }
    if spec.format() == Format::Nbd {
        return Ok(());
    }
    let keys = [
        ("uri", spec.uri.is_some()),
        ("reconnect-delay", spec.reconnect_delay.is_some()),
        ("open-timeout", spec.open_timeout.is_some()),
    ];
    match keys.into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((key, _)) => Err(Error::invalid(format!(
            "disk {name}: {key} is for a server: leave it out, or say format=nbd, or format=qcow2 with a uri"
        ))),
    }
}

/// Connects to the server of a disk. Returns the disk with its size in bytes and its limits.
///
/// # Errors
/// `Invalid` for a key, an unknown host, or an export that cannot be a disk; `Io` if there is no
/// connection in time, or the server refuses; `Busy` if the daemon uses the export already.
pub(crate) fn open(spec: &DiskSpec) -> Result<(Nbd, u64, Limits)> {
    open_any(spec, spec.locking, size_and_limits)
}

/// [`open`] for the file of a qcow2 image, which may have any length.
///
/// # Errors
/// Those of [`open`]; `Unsupported` for a server whose blocks are longer than a sector, or that
/// cannot make the image's metadata stable.
pub(crate) fn open_part(spec: &DiskSpec) -> Result<(Nbd, u64, Limits)> {
    open_any(spec, true, length_and_limits)
}

/// Checks what a server says, and returns the size, the limits, and when writes are made stable.
type Examine = fn(&DiskSpec, &str, &Settings) -> Result<(u64, Limits, Cache)>;

fn open_any(spec: &DiskSpec, locks: bool, examine: Examine) -> Result<(Nbd, u64, Limits)> {
    let uri = check(spec)?;
    let (name, shown) = (&spec.name, spec.uri.as_deref().unwrap_or_default());
    let in_use = match locks {
        true => Some(InUse::enter(shown, spec.readonly)?),
        false => None,
    };
    let seconds = |key: Option<u32>| Duration::from_secs(key.unwrap_or(0).into());
    let until = Instant::now() + seconds(spec.open_timeout);
    let tls = Tls::new(&uri).map_err(|why| Error::invalid(format!("disk {name}: {shown} {why}")))?;
    let place = match uri.server {
        Server::Unix(path) => Place::Unix(path),
        Server::Tcp { host, port } => Place::Tcp(look_up(name, &host, port, until)?),
    };
    let reconnect = seconds(spec.reconnect_delay);
    let reconnect_ms = u64::try_from(reconnect.as_millis()).unwrap_or(u64::MAX);
    let cannot = |e| Error::io(format_args!("cannot connect disk {name}"), e);
    let target = Target { export: uri.export, place, tls };
    let first =
        connect(&target, until).map_err(|why| Error::new(Kind::Io, format!("disk {name}: {shown} {why}")))?;
    let settings = first.settings;
    let (size_bytes, limits, cache) = examine(spec, shown, &settings)?;
    let zeroes = Mapping::new(ZERO_BYTES as usize, ProtFlags::READ).map_err(cannot)?;
    let several = settings.has(CAN_MULTI_CONN);
    let names = (name.clone(), shown.to_owned());
    let connector = Arc::new(Connector::new(names, target, reconnect_ms, several).map_err(cannot)?);
    let shared = Arc::new(Shared {
        connector: connector.clone(),
        common: Arc::new(Port::new().map_err(cannot)?),
        answered: Flag::default(),
        settings,
        readonly: spec.readonly,
        cache,
        reconnect_ms,
        zeroes,
        unflushed: Unflushed::new(&settings, spec.readonly, cache),
    });
    let one = One::start(&shared, first)?;
    // Its end ends the threads, also if the next call fails.
    let nbd = Nbd { shared, _one: one, _in_use: in_use };
    connector.start(Needs { readonly: spec.readonly, settings }).map_err(cannot)?;
    Ok((nbd, size_bytes, limits))
}

/// Makes the first connection. Tries until `until`, and once at least.
///
/// # Errors
/// A clause about the server.
fn connect(target: &Target, until: Instant) -> std::result::Result<Connected, String> {
    // Nothing interrupts it.
    let interrupt = EventFd::make().map_err(|e| format!("cannot be connected: {e}"))?;
    loop {
        let end = Instant::now() + TRY;
        let limit = if until > Instant::now() { until.min(end) } else { end };
        match target.connect(Limit { until: limit, interrupt: &interrupt }) {
            Err(_) if Instant::now() + PAUSE < until => std::thread::sleep(PAUSE),
            tried => return tried,
        }
    }
}

/// Looks a host up. The names of a disk are looked up once: connections that are made later use the
/// same addresses.
fn look_up(name: &str, host: &str, port: u16, until: Instant) -> Result<Vec<std::net::SocketAddr>> {
    let (answer, answered) = sync_channel(1);
    let asked = (host.to_owned(), port);
    // getaddrinfo(3) has no limit of time.
    let thread = std::thread::Builder::new().name("vshunt-lookup".to_owned());
    let run = move || drop(answer.send(asked.to_socket_addrs().map(Iterator::collect::<Vec<_>>)));
    let cannot = |e| Error::io(format_args!("disk {name}: cannot look up the host {host}"), e);
    sandbox::spawn(ThreadKind::Control, thread, run).map_err(cannot)?;
    let limit = TRY.max(until.saturating_duration_since(Instant::now()));
    match answered.recv_timeout(limit) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Err(e)) if e.raw_os_error().is_some() => Err(cannot(e)),
        Ok(_) => Err(Error::invalid(format!(
            "disk {name}: there is no host {host}; is it spelt so, and known to the name service?"
        ))),
        Err(_) => Err(cannot(std::io::ErrorKind::TimedOut.into())),
    }
}

/// Checks what the server says about the export, and makes the disk's limits of it.
fn size_and_limits(spec: &DiskSpec, shown: &str, settings: &Settings) -> Result<(u64, Limits, Cache)> {
    let limits = limits(spec, shown, settings)?;
    if let Some(why) = why_no_size(settings.size) {
        return Err(Error::invalid(format!(
            "disk {}: {shown} has {} bytes, which is no size of a disk: {why}",
            spec.name, settings.size
        )));
    }
    let cache = caching(spec, shown, settings)?;
    if cache == Cache::Writeback && !spec.readonly && !settings.has(SEND_FLUSH) {
        tracing::warn!(
            "disk {}: {shown} can neither flush nor make a single write stable (FUA): flushes of guests have no \
             effect, and a failure of the server may lose completed writes (cache=unsafe says that this is known)",
            spec.name
        );
    }
    Ok((settings.size / SECTOR_BYTES * SECTOR_BYTES, limits, cache))
}

/// Returns when writes are made stable, by what the server can do.
///
/// # Errors
/// `Unsupported`: each write was to be made stable, and the server cannot do that.
fn caching(spec: &DiskSpec, shown: &str, settings: &Settings) -> Result<Cache> {
    let (flushes, stores) = (settings.has(SEND_FLUSH), settings.has(SEND_FUA));
    match spec.cache {
        _ if spec.readonly => Ok(spec.cache),
        Cache::Writethrough if !flushes && !stores => Err(Error::unsupported(format!(
            "disk {}: {shown} can neither flush nor make a single write stable (FUA), and cache=writethrough needs \
             one of them: enable that there, or use another cache=",
            spec.name
        ))),
        // Without a flush, only writes that are stable by themselves keep what guests count on.
        Cache::Writeback if !flushes && stores => Ok(Cache::Writethrough),
        cache => Ok(cache),
    }
}

/// [`size_and_limits`] for the file of a qcow2 image. The size is the file's length.
fn length_and_limits(spec: &DiskSpec, shown: &str, settings: &Settings) -> Result<(u64, Limits, Cache)> {
    let name = &spec.name;
    let limits = limits(spec, shown, settings)?;
    let minimum = settings.blocks.minimum;
    if u64::from(minimum) > SECTOR_BYTES {
        return Err(Error::unsupported(format!(
            "disk {name}: {shown} has blocks of {minimum} bytes, and a qcow2 image needs 512 at most: let the server accept \
             smaller requests (nbdkit --filter=blocksize does)"
        )));
    }
    if i64::try_from(settings.size).is_err() {
        return Err(Error::invalid(format!(
            "disk {name}: {shown} has {} bytes, more than a file can have",
            settings.size
        )));
    }
    let cache = caching(spec, shown, settings)?;
    if cache == Cache::Writeback && !spec.readonly && !settings.has(SEND_FLUSH) {
        return Err(Error::unsupported(format!(
            "disk {name}: {shown} can neither flush nor make a single write stable (FUA), so a power failure of the \
             server could destroy a qcow2 image: enable that there, or add cache=unsafe or readonly=on"
        )));
    }
    Ok((settings.size, limits, cache))
}

/// Checks what the server says about the export, except its size, and makes limits of it.
fn limits(spec: &DiskSpec, shown: &str, settings: &Settings) -> Result<Limits> {
    let name = &spec.name;
    if !spec.readonly && settings.has(READ_ONLY) {
        return Err(Error::invalid(format!(
            "disk {name}: {shown} is read-only on its server: add readonly=on"
        )));
    }
    let minimum = settings.blocks.minimum;
    if minimum > 4096 {
        return Err(Error::unsupported(format!(
            "disk {name}: {shown} has blocks of {minimum} bytes, and a guest can use 4096 at most: let the server accept \
             smaller requests (nbdkit --filter=blocksize does)"
        )));
    }
    if !settings.size.is_multiple_of(u64::from(minimum)) {
        return Err(Error::unsupported(format!(
            "disk {name}: {shown} has {} bytes, of which the last ones cannot be reached in blocks of {minimum} bytes, \
             the smallest that the server takes: let it state a size in whole blocks (nbdkit --filter=truncate \
             round-up={minimum} does)",
            settings.size
        )));
    }
    let preferred = settings.blocks.preferred;
    let block_size = minimum.max(512);
    let trims = settings.has(SEND_TRIM) && !spec.readonly;
    Ok(Limits {
        block_size,
        physical_block_exp: u8::try_from((preferred.clamp(block_size, 4096) / block_size).ilog2())
            .unwrap_or(0),
        min_io: preferred.max(block_size),
        opt_io: 0,
        max_discard_bytes: if trims { Limits::DISCARD_BYTES_MAX } else { 0 },
        discard_align: preferred.clamp(block_size, 1 << 20),
        can_discard: trims,
        can_zero: !spec.readonly,
    })
}
