//! Who may connect to a socket that the daemon makes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The modes that a socket can have. Connecting needs the write permission, so a class of users has
/// either both permissions or none. The owner always has them.
const MODES: [u32; 4] = [0o600, 0o660, 0o606, 0o666];

/// The permissions of a socket: 0600, 0660, 0606 or 0666.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// The owner may connect.
    pub const OWNER: Self = Self(0o600);
    /// The owner and the group may connect.
    pub const GROUP: Self = Self(0o660);

    /// Returns the bits, as for chmod(2).
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Returns whether users other than the owner and the group may connect.
    pub fn is_for_all(self) -> bool {
        self.0 & 0o006 != 0
    }
}

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let octal = text.len() <= 5 && text.bytes().all(|b| b.is_ascii_digit());
        let bits = octal.then(|| u32::from_str_radix(text, 8).ok()).flatten();
        let found = MODES.into_iter().find(|mode| Some(*mode) == bits);
        found.map(Self).ok_or_else(|| {
            format!(
                "`{text}` is no mode of a socket; it is 0600, 0660, 0606 or 0666: connecting needs the write \
                 permission, and a socket is not executed"
            )
        })
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl Serialize for SocketMode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SocketMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Octal;

        impl de::Visitor<'_> for Octal {
            type Value = SocketMode;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mode in octal digits as a string, for example \"0660\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<SocketMode, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Octal)
    }
}

/// The owner, the group and the mode of a socket that the daemon makes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// The user, by name or number. Absent: that of the daemon.
    pub owner: Option<String>,
    /// The group, by name or number. Absent: that of the daemon.
    pub group: Option<String>,
    /// The mode. Absent: see [`mode`](Self::mode).
    pub mode: Option<SocketMode>,
}

impl SocketAccess {
    /// Returns the mode that was given. Without one, a group that was given may connect.
    pub fn mode(&self) -> Option<SocketMode> {
        self.mode.or(self.group.as_ref().map(|_| SocketMode::GROUP))
    }

    /// Returns the first key that is given, if there is one.
    pub fn first_key(&self) -> Option<&'static str> {
        let keys =
            [("owner", self.owner.is_some()), ("group", self.group.is_some()), ("mode", self.mode.is_some())];
        keys.into_iter().find(|(_, given)| *given).map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_that_let_a_class_connect_or_not() {
        for (text, shown) in [("0660", "0660"), ("600", "0600"), ("00666", "0666"), ("606", "0606")] {
            assert_eq!(text.parse::<SocketMode>().unwrap().to_string(), shown);
        }
        let wrong =
            ["0770", "0640", "0060", "0000", "1660", "07777777777", "660 ", "-600", "rw", "", "0o660"];
        for text in wrong {
            let why = text.parse::<SocketMode>().unwrap_err();
            assert!(why.contains(&format!("`{text}`")) && why.contains("0600, 0660, 0606 or 0666"), "{why}");
        }
    }

    #[test]
    fn a_mode_is_a_string_of_octal_digits() {
        let mode: SocketMode = serde_json::from_str("\"0660\"").unwrap();
        assert_eq!((mode, serde_json::to_string(&mode).unwrap().as_str()), (SocketMode::GROUP, "\"0660\""));
        let why = serde_json::from_str::<SocketMode>("660").unwrap_err().to_string();
        assert!(why.contains("integer `660`, expected a mode in octal digits as a string"), "{why}");
    }

    #[test]
    fn a_group_alone_may_connect() {
        let of = |group: Option<&str>, mode| SocketAccess { group: group.map(Into::into), mode, owner: None };
        assert_eq!(of(None, None).mode(), None);
        assert_eq!(of(Some("kvm"), None).mode(), Some(SocketMode::GROUP));
        assert_eq!(of(Some("kvm"), Some(SocketMode::OWNER)).mode(), Some(SocketMode::OWNER));
        assert_eq!((of(None, None).first_key(), of(Some("kvm"), None).first_key()), (None, Some("group")));
    }
}
