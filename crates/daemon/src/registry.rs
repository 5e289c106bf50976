//! The registry of the daemon: disks, exports, networks and jobs, each with its name.

mod jobs;
mod nets;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, ExportKind, ExportSpec};

use crate::disk_entry::DiskEntry;
use crate::export::Export;
use crate::job::Job;
use crate::net::NetEntry;

/// Disks at most, including overlays that wait for their snapshot. Each uses descriptors and memory
/// for its map. The limit keeps one client from using up all resources.
pub(super) const DISKS_MAX: usize = 1024;
/// Networks at most, for the same reason.
pub(super) const NETS_MAX: usize = 1024;
/// Exports at most, for the same reason: each uses a thread.
pub(super) const EXPORTS_MAX: usize = 1024;

#[derive(Default)]
pub(super) struct Registry {
    pub(super) disks: BTreeMap<String, Arc<DiskEntry>>,
    /// Overlays that wait for their snapshot. No disk has their name.
    pub(super) overlays: BTreeMap<String, WaitingOverlay>,
    /// Running jobs, and concluded jobs that were not dismissed.
    pub(super) jobs: BTreeMap<String, Arc<Job>>,
    /// Names of jobs that are being started, and are not in the list yet.
    pub(super) starting: BTreeSet<String>,
    /// Number of jobs that have ended.
    pub(super) jobs_ended: u64,
    pub(super) nets: BTreeMap<String, Arc<NetEntry>>,
    pub(super) exports: BTreeMap<String, ExportEntry>,
    /// Exports that were removed from the map, and whose listeners were not called yet.
    pub(super) untold: usize,
    pub(super) shut: bool,
}

/// An overlay that waits for its snapshot.
pub(super) struct WaitingOverlay {
    pub(super) spec: DiskSpec,
    /// Size of its disk, bytes.
    pub(super) size_bytes: u64,
    /// Device number and inode number of its file.
    pub(super) id: Option<(u64, u64)>,
}

pub(super) struct ExportEntry {
    /// The disk; empty for an export of networks.
    disk: String,
    /// The network; for an uplink also the tap.
    pub(super) nets: Vec<String>,
    readonly: bool,
    pub(super) phase: Phase,
}

impl ExportEntry {
    /// Makes an entry for an export of networks that is being made.
    pub(super) fn of_nets(nets: Vec<String>) -> Self {
        Self { disk: String::new(), nets, readonly: false, phase: Phase::Making }
    }
}

/// The phase of an export. Its name and its disk are in use from the first phase to the end of the
/// last.
#[derive(Clone)]
pub(super) enum Phase {
    /// The name is reserved, and the export is being made without the lock. It is not shown.
    Making,
    Serving(Arc<Export>),
    /// It is being disconnected and drained. It is shown, and cannot be removed again.
    Removing(Arc<Export>),
}

impl Phase {
    /// Returns the export, if it is made already.
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

    /// Checks that a new disk or overlay may have that name.
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

    /// Checks that a disk still exists, after waiting for its `op_lock`.
    fn still(&self, entry: &Arc<DiskEntry>) -> Result<()> {
        let name = &entry.name;
        match self.disks.get(name) {
            Some(there) if Arc::ptr_eq(there, entry) => Ok(()),
            _ => Err(no_disk(name)),
        }
    }

    /// Returns the exports of a disk, after waiting for its `op_lock`.
    ///
    /// # Errors
    /// The disk does not exist any more.
    pub(super) fn exports_of(&self, disk: &Arc<DiskEntry>) -> Result<Vec<Arc<Export>>> {
        self.still(disk)?;
        let of = self.exports.values().filter(|e| e.disk == disk.name);
        Ok(of.filter_map(|e| e.phase.export().cloned()).collect())
    }

    /// Returns the disk of an export, and the other exports of that disk.
    pub(super) fn disk_and_others(&self, export: &str) -> Option<(String, Vec<Arc<Export>>)> {
        let disk = &self.exports.get(export)?.disk;
        let others = self.exports.iter().filter(|(name, e)| e.disk == *disk && *name != export);
        Some((disk.clone(), others.filter_map(|(_, e)| e.phase.export().cloned()).collect()))
    }

    pub(super) fn phase(&self, export: &str) -> Result<Phase> {
        self.exports.get(export).map(|e| e.phase.clone()).ok_or_else(|| no_export(export))
    }

    /// Returns the export that writes to a disk.
    pub(super) fn writer(&self, disk: &str) -> Option<&str> {
        self.exports.iter().find(|(_, e)| e.disk == disk && !e.readonly).map(|(name, _)| name.as_str())
    }

    /// Reserves the name of a new export, if it may be made.
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
                ExportKind::Fuse | ExportKind::Nbd => "leave out writable=on",
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

    /// Checks that the name of an export is free.
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
    Error::not_found(format!("there is no disk {name}; see `vshunt disk list`"))
}

pub(super) fn no_export(name: &str) -> Error {
    Error::not_found(format!("there is no export {name}; see `vshunt export list`"))
}

pub(super) fn no_net(name: &str) -> Error {
    Error::not_found(format!("there is no network {name}; see `vshunt net list`"))
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
