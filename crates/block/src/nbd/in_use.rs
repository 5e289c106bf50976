//! The exports that this daemon uses.
//!
//! The protocol of NBD has no locks, so this daemon at least does not write an export twice: not
//! while a disk is being added, nor while one that was removed still writes.

use std::collections::BTreeMap;
use std::sync::Mutex;

use ::nbd::{Server, Uri};
use vshunt_types::error::{Error, Result};
use vshunt_types::sync::Locked;

/// The exports that are open, by their places: whether one is written, and the number of users.
/// Guards itself alone; held for a look or a change.
static IN_USE: Mutex<BTreeMap<String, (bool, u32)>> = Mutex::new(BTreeMap::new());

/// An entry of [`IN_USE`]: a lock on an export.
pub(super) struct InUse(String);

impl InUse {
    /// Locks the export of a disk.
    ///
    /// # Errors
    /// `Busy`: it is open, and one of the two writes.
    pub(super) fn enter(uri: &str, readonly: bool) -> Result<Self> {
        let place = place_of(uri);
        let mut all = IN_USE.locked();
        match all.get_mut(&place) {
            Some((false, users)) if readonly => *users += 1,
            Some(_) => {
                return Err(Error::busy(format!(
                    "{uri} is open in this daemon, or requests of a disk that was removed have not ended yet: wait, or \
                     restart the daemon if its server is gone"
                )));
            }
            None => _ = all.insert(place.clone(), (!readonly, 1)),
        }
        Ok(Self(place))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut all = IN_USE.locked();
        if let Some((_, users)) = all.get_mut(&self.0) {
            *users -= 1;
            if *users == 0 {
                all.remove(&self.0);
            }
        }
    }
}

/// Returns a text that is the same for all URIs of one export, as far as their text tells.
pub(crate) fn place_of(uri: &str) -> String {
    match uri.parse::<Uri>() {
        Ok(Uri { server: Server::Tcp { host, port }, export, .. }) => {
            format!("{} {port} {export}", host.to_ascii_lowercase())
        }
        Ok(Uri { server: Server::Unix(path), export, .. }) => format!("{} {export}", path.display()),
        Err(_) => uri.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::place_of;

    #[test]
    fn forms_of_one_uri_are_one_place() {
        for forms in [
            &["nbd://host/x", "nbd://HOST:10809/x", "nbd://host:/x", "nbds://host/%78"][..],
            &["nbd://[::1]/x", "nbd://[::1]:10809/x"],
            &["nbd+unix:///x?socket=/a/s", "nbds+unix:///x?socket=/a/s&tls-hostname=h"],
        ] {
            for form in forms {
                assert_eq!(place_of(form), place_of(forms[0]), "{form}");
            }
        }
        assert_ne!(place_of("nbd://host/x"), place_of("nbd://host/X"));
        assert_ne!(place_of("nbd+unix:///x?socket=/a"), place_of("nbd+unix:///x?socket=/A"));
    }
}
