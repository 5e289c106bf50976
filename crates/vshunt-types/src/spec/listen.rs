//! Where a server listens, as users write it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An address: `unix:PATH`, `ADDRESS:PORT`, or `PORT` of 127.0.0.1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A TCP port of an address of this machine. The port is not 0.
    Tcp(SocketAddr),
}

impl ListenAddress {
    /// Reads an address. Port 0 is one. `port`: the usual port, for messages. `examples`: what a
    /// user may write instead.
    ///
    /// # Errors
    /// It is no address: a sentence for the user.
    pub fn read(text: &str, port: u16, examples: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("`unix:` names no path; write unix:PATH".into()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        let loopback = |port: &str| Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port.parse().ok()?));
        let local = text.strip_prefix("localhost:").unwrap_or(text);
        if let Some(address) = loopback(local).or_else(|| text.parse().ok()) {
            return Ok(Self::Tcp(address));
        }
        Err(match (text.strip_prefix(':').and_then(loopback), text.parse::<IpAddr>()) {
            (Some(local), _) => format!(
                "`{text}` names no address; write {local}, or 0.0.0.0{text} for all clients that reach this machine"
            ),
            (None, Ok(ip)) => format!("`{text}` names no port; write {}", SocketAddr::new(ip, port)),
            (None, Err(_)) => format!("`{text}` is no address; write for example {examples}"),
        })
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match Self::read(text, 10809, "unix:/run/d0.nbd or 127.0.0.1:10809")? {
            Self::Tcp(address) if address.port() == 0 => {
                Err(format!("`{text}` has port 0; name the port, usually 10809"))
            }
            address => Ok(address),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl Serialize for ListenAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ListenAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A port alone may be written as a number.
        let text: Option<String> = super::net::text_or_number(deserializer)?;
        text.unwrap_or_default().parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_to_write_it() {
        let tcp = |text: &str| ListenAddress::Tcp(text.parse().unwrap());
        for (text, want, shown) in [
            ("unix:/a:b", ListenAddress::Unix("/a:b".into()), "unix:/a:b"),
            ("10809", tcp("127.0.0.1:10809"), "127.0.0.1:10809"),
            ("localhost:1", tcp("127.0.0.1:1"), "127.0.0.1:1"),
            ("[::]:10809", tcp("[::]:10809"), "[::]:10809"),
        ] {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!((address.to_string().as_str(), address), (shown, want));
        }
        for (text, want) in [
            ("unix:", "names no path"),
            ("0", "name the port"),
            ("[::1]:0", "name the port"),
            (":10809", "write 127.0.0.1:10809, or 0.0.0.0:10809"),
            ("::1", "write [::1]:10809"),
            ("/run/d0", "is no address"),
            ("host:1", "is no address"),
            ("", "is no address"),
        ] {
            let said = text.parse::<ListenAddress>().unwrap_err();
            assert!(said.contains(want), "{text}: {said}");
        }
    }
}
