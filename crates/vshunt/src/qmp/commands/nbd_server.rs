//! The server of a node of driver `nbd`, with QEMU's names (SocketAddress).

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer};

/// Where an NBD server is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum NbdServer {
    /// A TCP port.
    Inet {
        /// The name or the address of the host.
        host: String,
        /// The port: QEMU's type is a string.
        #[serde(deserialize_with = "port")]
        port: u16,
    },
    /// A UNIX socket.
    Unix {
        /// The path of the socket.
        path: PathBuf,
    },
}

/// Reads a port, as a number or as a string.
fn port<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a port is wanted: a number from 1 to 65535")]
    enum Port {
        Number(u16),
        Text(String),
    }
    match Port::deserialize(from)? {
        Port::Number(port) => Ok(port),
        Port::Text(text) => text.parse().map_err(|_| {
            serde::de::Error::custom(format!("'port' is {text}; it has to be a number from 1 to 65535"))
        }),
    }
}

impl NbdServer {
    /// Returns the URI of an export, as the key `uri` of a disk has it.
    pub(super) fn uri(&self, export: &str) -> String {
        let export = encoded(export.as_bytes());
        match self {
            Self::Inet { host, port } if host.contains(':') => format!("nbd://[{host}]:{port}/{export}"),
            Self::Inet { host, port } => format!("nbd://{host}:{port}/{export}"),
            Self::Unix { path } => {
                format!("nbd+unix:///{export}?socket={}", encoded(path.as_os_str().as_bytes()))
            }
        }
    }
}

/// Writes bytes as a part of a URI (RFC 3986, section 2.3: unreserved characters, and the slash).
fn encoded(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(*byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_becomes_a_uri_that_is_read_as_the_same() {
        let inet = |host: &str| NbdServer::Inet { host: host.to_owned(), port: 10809 };
        assert_eq!(inet("a.example").uri(""), "nbd://a.example:10809/");
        assert_eq!(inet("::1").uri("x"), "nbd://[::1]:10809/x");
        let unix = NbdServer::Unix { path: "/run/a b?.sock".into() };
        assert_eq!(unix.uri("a/b#%c"), "nbd+unix:///a/b%23%25c?socket=/run/a%20b%3F.sock");
        let read = |text: &str| serde_json::from_str::<NbdServer>(text);
        assert_eq!(read(r#"{"type": "inet", "host": "::1", "port": "10809"}"#).unwrap(), inet("::1"));
        assert!(read(r#"{"type": "inet", "host": "a", "port": "0x"}"#).is_err());
        assert!(read(r#"{"type": "inet", "host": "a", "port": 65536}"#).is_err());
    }
}
