//! The daemon's registry: disks, exports, networks and jobs, each by its name.

mod jobs;
mod nets;

use std::collections::BTreeMap;
use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, ExportKind, ExportSpec};

use crate::disk_entry::DiskEntry;
use crate::export::Export;
use crate::job::Job;
use crate::net::NetEntry;

/// Disks at once, overlays that wait for their snapshot included. Each costs descriptors and memory
/// for its map; it keeps one control client from using up what others need.
pub(super) const DISKS_MAX: usize = 1024;
/// Networks at once, for the same reason.
pub(super) const NETS_MAX: usize = 1024;
/// Exports at once, for the same reason: each costs a thread.
pub(super) const EXPORTS_MAX: usize = 1024;

#[derive(Default)]
pub(super) struct Registry {
    pub(super) disks: BTreeMap<String, Arc<DiskEntry>>,
    /// Overlays that wait for their snapshot. Their names are no disk's.
    pub(super) overlays: BTreeMap<String, WaitingOverlay>,
    /// Those under way, and those that are over and not dismissed.
    pub(super) jobs: BTreeMap<String, Arc<Job>>,
    /// Jobs that ended so far.
    pub(super) jobs_ended: u64,
    pub(super) nets: BTreeMap<String, Arc<NetEntry>>,
    pub(super) exports: BTreeMap<String, ExportEntry>,
    /// Exports that are out of the map, and listeners not told yet.
    pub(super) untold: usize,
    pub(super) shut: bool,
}

/// An overlay that waits for its snapshot.
pub(super) struct WaitingOverlay {
    pub(super) spec: DiskSpec,
    /// Of its disk.
    pub(super) size_bytes: u64,
    /// Device number and inode of its file.
    pub(super) id: Option<(u64, u64)>,
}

pub(super) struct ExportEntry {
    /// Empty where it is a network's.
    disk: String,
    /// Of a network: its name, and of an uplink its tap's, too.
    pub(super) nets: Vec<String>,
    readonly: bool,
    pub(super) phase: Phase,
}

impl ExportEntry {
    /// One of networks, that is about to be made.
    pub(super) fn of_nets(nets: Vec<String>) -> Self {
        Self { disk: String::new(), nets, readonly: false, phase: Phase::Making }
    }
}

/// An export's life. Its name and its disk are in use from the first phase to the end of the last.
#[derive(Clone)]
pub(super) enum Phase {
    /// Reserved, while it is made without the lock. Not shown.
    Making,
    Serving(Arc<Export>),
    /// Disconnects and drains. Shown; nobody else may remove it.
    Removing(Arc<Export>),
}

impl Phase {
    /// The export, once it is made.
    pub(super) fn export(&self) -> Option<&Arc<Export>> {
        match self {
            Self::Making => None,
            Self::Serving(export) | Self::Removing(export) => Some(export),
        }
    }
}

impl Registry {
    pub(super) fn check_up(&self) -> Result<()> {
        match self.shut {
            true => Err(Error::busy("the daemon is ending")),
            false => Ok(()),
        }
    }

    pub(super) fn disk(&self, name: &str) -> Result<Arc<DiskEntry>> {
        match self.disks.get(name) {
            Some(disk) => Ok(disk.clone()),
            None if self.overlays.contains_key(name) => Err(Error::invalid(format!(
                "{name} is an overlay that waits for blockdev-snapshot, and no disk yet"
            ))),
            None => Err(no_disk(name)),
        }
    }

    /// Whether a disk, or an overlay that waits, may get that name.
    pub(super) fn check_unnamed(&self, name: &str) -> Result<()> {
        match (self.disks.contains_key(name), self.overlays.contains_key(name)) {
            (true, _) => Err(Error::exists(format!("there is a disk {name} already"))),
            (_, true) => Err(Error::exists(format!(
                "there is an overlay {name} already, which waits for blockdev-snapshot"
            ))),
            _ if self.disks.len() + self.overlays.len() >= DISKS_MAX => Err(Error::limit(format!(
                "there are {DISKS_MAX} disks already, which is the most; remove one with 'disk remove NAME'"
            ))),
            _ => self.check_up(),
        }
    }

    /// Whether a disk whose turn was waited for is still there.
    fn still(&self, entry: &Arc<DiskEntry>) -> Result<()> {
        let name = &entry.name;
        match self.disks.get(name) {
            Some(there) if Arc::ptr_eq(there, entry) => Ok(()),
            _ => Err(no_disk(name)),
        }
    }

    /// The exports of a disk whose turn was waited for and which is still there.
    pub(super) fn exports_of(&self, disk: &Arc<DiskEntry>) -> Result<Vec<Arc<Export>>> {
        self.still(disk)?;
        let of = self.exports.values().filter(|e| e.disk == disk.name);
        Ok(of.filter_map(|e| e.phase.export().cloned()).collect())
    }

    /// The disk of an export, and the other exports of that disk.
    pub(super) fn disk_and_others(&self, export: &str) -> Option<(String, Vec<Arc<Export>>)> {
        let disk = &self.exports.get(export)?.disk;
        let others = self.exports.iter().filter(|(name, e)| e.disk == *disk && *name != export);
        Some((disk.clone(), others.filter_map(|(_, e)| e.phase.export().cloned()).collect()))
    }

    pub(super) fn phase(&self, export: &str) -> Result<Phase> {
        self.exports.get(export).map(|e| e.phase.clone()).ok_or_else(|| no_export(export))
    }

    /// The export that writes to a disk.
    pub(super) fn writer(&self, disk: &str) -> Option<&str> {
        self.exports.iter().find(|(_, e)| e.disk == disk && !e.readonly).map(|(name, _)| name.as_str())
    }

    /// Enters an export that is to be made, if it may be.
    pub(super) fn reserve(&mut self, spec: &ExportSpec, disk: &Arc<DiskEntry>) -> Result<()> {
        self.check_up()?;
        self.still(disk)?;
        self.check_vacant(spec)?;
        disk.watched.check_exportable(&spec.disk)?;
        let readonly = spec.refuses_writes() || disk.disk.readonly();
        if let Some(writer) = self.writer(&spec.disk)
            && !readonly
        {
            let remedy = match spec.kind {
                ExportKind::VhostUserBlk => "give readonly=on",
                ExportKind::Fuse => "leave out writable=on",
                ExportKind::VhostUserNet | ExportKind::Uplink => unreachable!("it is of no disk"),
            };
            return Err(Error::busy(format!(
                "disk {} is written by export {writer} already; {remedy}, or remove that export",
                spec.disk
            )));
        }
        let entry = ExportEntry { disk: spec.disk.clone(), nets: vec![], readonly, phase: Phase::Making };
        self.exports.insert(spec.name.clone(), entry);
        Ok(())
    }

    /// Whether an export's name is free.
    pub(super) fn check_vacant(&self, spec: &ExportSpec) -> Result<()> {
        match self.exports.contains_key(&spec.name) {
            true => Err(Error::exists(format!("there is an export {} already", spec.name))),
            false if self.has_job(&spec.name) => {
                Err(Error::exists(format!("there is a job {} already, whose queue has that name", spec.name)))
            }
            false if self.exports.len() >= EXPORTS_MAX => Err(Error::limit(format!(
                "there are {EXPORTS_MAX} exports already, which is the most; remove one with 'export remove NAME'"
            ))),
            false => Ok(()),
        }
    }

    /// Changes the phase from `Serving` to `Removing`. The caller then calls `Daemon::end`.
    pub(super) fn mark_removing(&mut self, name: &str) -> Arc<Export> {
        let entry = self.exports.get_mut(name).expect("the caller saw it under the same lock");
        let Phase::Serving(export) = entry.phase.clone() else { unreachable!("seen under the same lock") };
        entry.phase = Phase::Removing(export.clone());
        export
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.exports.is_empty() && self.untold == 0
    }

    pub(super) fn users(&self, disk: &str) -> Vec<String> {
        self.exports.iter().filter(|(_, e)| e.disk == disk).map(|(name, _)| name.clone()).collect()
    }
}

pub(super) fn no_disk(name: &str) -> Error {
    Error::not_found(format!("there is no disk {name}; 'disk list' shows those that are there"))
}

pub(super) fn no_export(name: &str) -> Error {
    Error::not_found(format!("there is no export {name}; 'export list' shows those that are there"))
}

pub(super) fn no_net(name: &str) -> Error {
    Error::not_found(format!("there is no network {name}; 'net list' shows those that are there"))
}

#[cfg(test)]
mod tests {
    use vshunt_types::error::Kind;

    use super::*;

    #[test]
    fn no_more_exports_than_the_constant_says() {
        let mut registry = Registry::default();
        for at in 0..EXPORTS_MAX {
            registry.exports.insert(format!("e{at}"), ExportEntry::of_nets(Vec::new()));
        }
        let spec = ExportSpec { name: "more".into(), ..ExportSpec::default() };
        let error = registry.check_vacant(&spec).unwrap_err();
        assert_eq!(error.kind(), Kind::Limit);
        assert!(error.to_string().contains("export remove"), "{error}");
        registry.exports.remove("e7");
        registry.check_vacant(&spec).unwrap();
    }
}
