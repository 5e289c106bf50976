//! Giving up capabilities (capabilities(7)), one thread at a time.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

/// Gives up all capabilities of the calling thread but these; programs that it runs get no others either.
pub(super) fn keep(wanted: CapabilitySet) -> io::Result<()> {
    let own = capabilities(None)?;
    if own.permitted.is_empty() {
        return Ok(());
    }
    for capability in CapabilitySet::all().difference(wanted).iter() {
        // Needs CAP_SETPCAP. Without it the set stays, and `no_new_privs` keeps programs from gaining any of it.
        let _ = remove_capability_from_bounding_set(capability);
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: own.effective & wanted,
            permitted: own.permitted & wanted,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(())
}

/// The calling thread's effective capabilities.
pub(super) fn own() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// Their names in small letters, without `CAP_`.
pub(super) fn names(set: CapabilitySet) -> Vec<String> {
    set.iter_names().map(|(name, _)| name.to_lowercase()).collect()
}
