//! The limits of exports, and the groups that share them.
//!
//! Control threads call it. The queues of an export see its limits through its [`LimitCell`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use vshunt_engine::{LimitCell, LimitGroup, LimitMember, LimitRate, LimitRateSet, LimitRates};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Burst, ExportKind, LimitKind, LimitsSpec};
use vshunt_types::sync::Locked;

use crate::check::MAX_QUEUES;

/// All groups. Each export is in one group at most.
#[derive(Default)]
pub(crate) struct LimitGroups {
    /// Guards the groups and the order of changes. Held for changes of pointers only.
    groups: Mutex<BTreeMap<Key, Group>>,
}

/// The name of a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// A group that a user named.
    Named(String),
    /// The limits that an export has for itself.
    Own(String),
}

struct Group {
    /// What its members serve. Operations of disks and packets of networks have no common limits.
    kind: Option<LimitKind>,
    /// The limits, without the name of the group.
    spec: LimitsSpec,
    /// Their buckets.
    buckets: Arc<LimitGroup>,
    /// The members by the names of their exports.
    members: BTreeMap<String, Arc<LimitCell>>,
}

impl Group {
    fn new(kind: Option<LimitKind>, spec: LimitsSpec) -> Self {
        let buckets = LimitGroup::new(&rates(&spec), false);
        Self { kind, spec, buckets, members: BTreeMap::new() }
    }

    /// Sets the limits. The levels of the buckets stay, so that limits that are set again and again
    /// give no burst each time.
    fn change(&mut self, spec: LimitsSpec) {
        let new = rates(&spec);
        if new != rates(&self.spec) {
            self.buckets = self.buckets.changed(&new, self.members.values());
        }
        self.spec = spec;
    }

    /// Makes an export a member, unless it is one.
    fn join(&mut self, export: &str, cell: &Arc<LimitCell>) {
        if !self.members.contains_key(export) {
            cell.set(Some(LimitMember::new(self.buckets.clone(), MAX_QUEUES)));
            self.members.insert(export.to_owned(), cell.clone());
            self.buckets.set_shared(self.members.len() > 1);
        }
    }

    /// Ends the membership of an export. The others may use more then. What it owes goes with it.
    fn leave(&mut self, export: &str) {
        if let Some(cell) = self.members.remove(export) {
            cell.set(None);
            self.buckets.set_shared(self.members.len() > 1);
        }
    }
}

impl LimitGroups {
    /// Sets the limits of an export, in place of those that it has. A group without limits is
    /// joined as it is. `cell` is the same for all calls for an export until its limits are lifted.
    ///
    /// # Errors
    /// Such a group does not exist, or is of another kind.
    pub(crate) fn set(
        &self,
        export: &str,
        kind: ExportKind,
        cell: &Arc<LimitCell>,
        spec: &LimitsSpec,
    ) -> Result<()> {
        let mut groups = self.groups.locked();
        let kind = kind.limits();
        let key = match &spec.group {
            Some(name) => Key::Named(name.clone()),
            None => Key::Own(export.to_owned()),
        };
        if let (Key::Named(name), Some(of)) = (&key, groups.get(&key).and_then(|group| group.kind))
            && kind != Some(of)
        {
            return Err(Error::invalid(format!(
                "export {export}: group {name} is of {}; give another name for a group (--group)",
                of.plural()
            )));
        }
        let known = groups.get(&key).map(|group| group.spec.clone());
        let limits = match known {
            Some(known) if spec.is_empty() => known,
            None if spec.is_empty() => {
                let name = spec.group.as_deref().unwrap_or_default();
                return Err(Error::not_found(format!(
                    "export {export}: there is no group {name} of limits; give its limits, too ({}, --bps)",
                    if kind == Some(LimitKind::Network) { "--pps" } else { "--iops" }
                )));
            }
            _ => LimitsSpec { group: None, ..spec.clone() },
        };
        Self::leave(&mut groups, export, Some(&key));
        let group = groups.entry(key).or_insert_with(|| Group::new(kind, limits.clone()));
        group.change(limits);
        group.join(export, cell);
        Ok(())
    }

    /// Lifts the limits of an export. Does nothing if it has none.
    pub(crate) fn lift(&self, export: &str) {
        Self::leave(&mut self.groups.locked(), export, None);
    }

    /// Takes an export out of its group, unless that is `but`. A group without members is gone.
    fn leave(groups: &mut BTreeMap<Key, Group>, export: &str, but: Option<&Key>) {
        let Some(key) = groups.iter().find(|(_, group)| group.members.contains_key(export)) else { return };
        let key = key.0.clone();
        if Some(&key) == but {
            return;
        }
        let Some(group) = groups.get_mut(&key) else { return };
        group.leave(export);
        if group.members.is_empty() {
            groups.remove(&key);
        }
    }

    /// Returns the limits of an export, as they are now.
    pub(crate) fn of(&self, export: &str) -> Option<LimitsSpec> {
        let groups = self.groups.locked();
        let (key, group) = groups.iter().find(|(_, group)| group.members.contains_key(export))?;
        let name = match key {
            Key::Named(name) => Some(name.clone()),
            Key::Own(_) => None,
        };
        Some(LimitsSpec { group: name, ..group.spec.clone() })
    }
}

/// Returns limits as the engine has them: what the guest receives is read, and what it sends is
/// written. A group has limits of one kind.
pub(crate) fn rates(spec: &LimitsSpec) -> LimitRates {
    let rate = |average: Option<u64>, burst: Option<Burst>| {
        average.map(|average| LimitRate {
            average,
            burst: burst.map_or(0, |burst| burst.rate),
            burst_seconds: burst.map_or(0, |burst| burst.seconds),
        })
    };
    LimitRates {
        operations: LimitRateSet {
            total: rate(spec.iops.or(spec.pps), spec.burst_iops.or(spec.burst_pps)),
            read: rate(spec.iops_read.or(spec.pps_rx), spec.burst_iops_read.or(spec.burst_pps_rx)),
            write: rate(spec.iops_write.or(spec.pps_tx), spec.burst_iops_write.or(spec.burst_pps_tx)),
        },
        bytes: LimitRateSet {
            total: rate(spec.bps, spec.burst_bps),
            read: rate(spec.bps_read.or(spec.bps_rx), spec.burst_bps_read.or(spec.burst_bps_rx)),
            write: rate(spec.bps_write.or(spec.bps_tx), spec.burst_bps_write.or(spec.burst_bps_tx)),
        },
        operation_bytes: spec.iops_size.or(spec.pps_size).unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: ExportKind = ExportKind::VhostUserBlk;

    fn limits(iops: Option<u64>, group: Option<&str>) -> LimitsSpec {
        LimitsSpec { iops, group: group.map(str::to_owned), ..LimitsSpec::default() }
    }

    #[test]
    fn a_group_has_the_limits_that_a_member_was_given_last() {
        let (groups, cell) = (LimitGroups::default(), Arc::new(LimitCell::default()));
        let error = groups.set("a", DISK, &cell, &limits(None, Some("g"))).unwrap_err();
        assert!(error.to_string().contains("no group g"), "{error}");
        groups.set("a", DISK, &cell, &limits(Some(5), Some("g"))).unwrap();
        groups.set("b", DISK, &cell, &limits(None, Some("g"))).unwrap();
        assert_eq!(groups.of("b"), Some(limits(Some(5), Some("g"))));
        groups.set("b", DISK, &cell, &limits(Some(7), Some("g"))).unwrap();
        assert_eq!(groups.of("a"), Some(limits(Some(7), Some("g"))));
        groups.set("a", DISK, &cell, &limits(Some(9), None)).unwrap();
        assert_eq!(groups.of("a"), Some(limits(Some(9), None)));
        assert_eq!(groups.of("b"), Some(limits(Some(7), Some("g"))));
        groups.lift("b");
        assert_eq!(groups.of("b"), None);
        groups.set("b", DISK, &cell, &limits(None, Some("g"))).unwrap_err();
        // An export of the name of a group is not that group.
        groups.set("c", DISK, &cell, &limits(None, Some("a"))).unwrap_err();
        groups.lift("a");
        groups.lift("a");
        assert!(groups.groups.locked().is_empty());
    }

    #[test]
    fn buckets_stay_while_the_limits_do() {
        let groups = LimitGroups::default();
        let (one, two) = (Arc::new(LimitCell::default()), Arc::new(LimitCell::default()));
        let buckets = || groups.groups.locked().values().next().unwrap().buckets.clone();
        groups.set("a", DISK, &one, &limits(Some(5), Some("g"))).unwrap();
        let first = buckets();
        for _ in 0..2 {
            groups.set("b", DISK, &two, &limits(None, Some("g"))).unwrap();
            groups.set("b", DISK, &two, &limits(Some(5), Some("g"))).unwrap();
            groups.set("a", DISK, &one, &limits(Some(5), Some("g"))).unwrap();
            groups.set("a", DISK, &one, &limits(None, Some("g"))).unwrap();
            groups.lift("b");
            assert!(Arc::ptr_eq(&first, &buckets()));
        }
        groups.set("a", DISK, &one, &limits(Some(6), Some("g"))).unwrap();
        assert!(!Arc::ptr_eq(&first, &buckets()));
    }

    #[test]
    fn a_group_is_of_disks_or_of_networks() {
        let (groups, cell) = (LimitGroups::default(), Arc::new(LimitCell::default()));
        let limits = LimitsSpec { bps: Some(5), group: Some("g".to_owned()), ..LimitsSpec::default() };
        let net = ExportKind::VhostUserNet;
        groups.set("n", net, &cell, &limits).unwrap();
        for spec in [&limits, &LimitsSpec { bps: None, ..limits.clone() }] {
            groups.set("m", net, &cell, spec).unwrap();
            let error = groups.set("d", DISK, &cell, spec).unwrap_err();
            assert!(error.to_string().contains("group g is of networks"), "{error}");
        }
        // An export may have limits of its own, whatever the groups are called.
        groups.set("g", DISK, &cell, &LimitsSpec { group: None, ..limits }).unwrap();
    }
}
