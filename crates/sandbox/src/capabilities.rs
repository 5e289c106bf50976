//! Gives up capabilities (capabilities(7)) of one thread.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

/// Gives up all capabilities of the calling thread except these. Programs that it runs get no
/// others either.
///
/// # Errors
/// The system's.
pub(super) fn keep(wanted: CapabilitySet) -> io::Result<()> {
    let own = capabilities(None)?;
    if own.permitted.is_empty() {
        return Ok(());
    }
    for capability in CapabilitySet::all().difference(wanted).iter() {
        // This needs CAP_SETPCAP. Without it the bounding set stays, and `no_new_privs` keeps
        // programs from gaining from it.
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

/// Names of capabilities in small letters, without `CAP_`.
pub(super) fn names(set: CapabilitySet) -> Vec<String> {
    set.iter_names().map(|(name, _)| name.to_lowercase()).collect()
}
