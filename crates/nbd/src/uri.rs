//! NBD URIs: `nbd://host:port/export`, `nbd+unix:///export?socket=/path`, and with TLS `nbds://`,
//! `nbds+unix://` (doc/uri.md).

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;

use super::STRING_BYTES_MAX;

/// The port of NBD servers (IANA).
pub const PORT: u16 = 10809;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// A host, by name or address, and a TCP port.
    Tcp {
        /// The name or address. An IPv6 address has no brackets here.
        host: String,
        /// The port.
        port: u16,
    },
    /// A UNIX socket in the file system.
    Unix(PathBuf),
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// How a server with TLS is verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The folder with the certificates: `tls-certificates=`. None: the authorities that the
    /// system trusts.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate has, if it is not the host: `tls-hostname=`.
    pub hostname: Option<String>,
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Where the server is.
    pub server: Server,
    /// The name of the export. The empty name is the server's default export.
    pub export: String,
    /// With TLS, for `nbds` and `nbds+unix`.
    pub tls: Option<Tls>,
}

/// Why a text is no NBD URI that this client takes: a clause that begins with a verb, and the
/// remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UriError(String);

impl fmt::Display for UriError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UriError {}

fn refuse<T>(why: impl Into<String>) -> Result<T, UriError> {
    Err(UriError(why.into()))
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let forms = "write nbd://host:port/export or nbd+unix:///export?socket=/path";
        let Some((scheme, rest)) = text.split_once("://") else {
            return refuse(format!("is no NBD URI: {forms}"));
        };
        let (unix, mut tls) = match scheme {
            "nbd" => (false, None),
            "nbd+unix" => (true, None),
            "nbds" => (false, Some(Tls::default())),
            "nbds+unix" => (true, Some(Tls::default())),
            _ => return refuse(format!("has the scheme {scheme}, which is none of NBD: {forms}")),
        };
        if rest.contains('#') {
            return refuse("has a fragment (#), which NBD URIs do not have: write %23 for a # in a name");
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = text_of(path, "export name")?;
        if export.len() > STRING_BYTES_MAX {
            return refuse(format!("has an export name of more than {STRING_BYTES_MAX} bytes"));
        }
        let mut socket = None;
        for parameter in query.split('&').filter(|p| !p.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let again = match (name, &mut tls) {
                ("socket", _) if unix => socket.replace(decoded(value)?).is_some(),
                ("tls-certificates", Some(tls)) => tls.certificates.replace(folder(value)?).is_some(),
                ("tls-hostname", Some(tls)) => tls.hostname.replace(text_of(value, name)?).is_some(),
                ("tls-certificates" | "tls-hostname", None) => {
                    return refuse(format!("has {name}=, which is for TLS: write nbds:// or nbds+unix://"));
                }
                ("tls-psk-file", _) => {
                    return refuse(
                        "has tls-psk-file=, and vshunt verifies servers by certificates only: write \
                         tls-certificates=FOLDER",
                    );
                }
                _ => {
                    return refuse(format!("has the parameter {name}, which vshunt does not know: {forms}"));
                }
            };
            if again {
                return refuse(format!("has {name}= twice"));
            }
        }
        let server = if unix {
            if !authority.is_empty() {
                return refuse(format!(
                    "names the host {authority}, but a UNIX socket has none: write nbd+unix:///export?socket=/path"
                ));
            }
            match socket {
                // The daemon runs in another folder than the commands that name a URI.
                Some(path) if !path.is_empty() && !path.starts_with(b"/") => {
                    return refuse("has socket= without an absolute path: write socket=/run/nbd.sock, say");
                }
                Some(path) if !path.is_empty() => Server::Unix(PathBuf::from(OsString::from_vec(path))),
                _ => return refuse("names no socket: write nbd+unix:///export?socket=/path"),
            }
        } else {
            tcp(authority)?
        };
        Ok(Self { server, export, tls })
    }
}

/// Reads `host:port`.
fn tcp(authority: &str) -> Result<Server, UriError> {
    if authority.contains('@') {
        return refuse(
            "names a user, which is for TLS with a shared key, and vshunt has certificates only: leave it out",
        );
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(literal) => match literal.split_once(']') {
            Some((host, port)) if host.parse::<std::net::Ipv6Addr>().is_ok() => (host.to_owned(), port),
            _ => {
                return refuse(
                    "has brackets around something that is no IPv6 address: write [::1]:10809, say",
                );
            }
        },
        None => {
            let end = authority.find(':').unwrap_or(authority.len());
            let (host, port) = authority.split_at(end);
            if port.matches(':').count() > 1 {
                return refuse("has an IPv6 address without brackets: write [::1]:10809, say");
            }
            (text_of(host, "host")?, port)
        }
    };
    if host.is_empty() {
        return refuse("names no host: write nbd://host:port/export, or nbd+unix:///export?socket=/path");
    }
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => PORT,
        Some("") => PORT,
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => match digits.parse() {
            Ok(port) if port > 0 => port,
            _ => return refuse(format!("has the port {digits}: ports are from 1 to 65535")),
        },
        _ => return refuse(format!("has `{port}` where a port should be: write host:10809, say")),
    };
    Ok(Server::Tcp { host, port })
}

/// Reads the path of a folder.
fn folder(text: &str) -> Result<PathBuf, UriError> {
    match PathBuf::from(OsString::from_vec(decoded(text)?)) {
        path if path.is_absolute() => Ok(path),
        _ => refuse(
            "has tls-certificates= without an absolute path: write tls-certificates=/etc/pki/vshunt, say",
        ),
    }
}

/// Replaces `%41` and the like by the byte.
fn decoded(text: &str) -> Result<Vec<u8>, UriError> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digit =
            |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16)).and_then(|d| u8::try_from(d).ok());
        let (Some(high), Some(low)) = (digit(bytes.next()), digit(bytes.next())) else {
            return refuse("has a % that two hexadecimal digits do not follow: write %25 for a %");
        };
        out.push(high << 4 | low);
    }
    if out.contains(&0) {
        return refuse("has a zero byte (%00), which no name has");
    }
    Ok(out)
}

fn text_of(text: &str, what: &str) -> Result<String, UriError> {
    String::from_utf8(decoded(text)?).or_else(|_| refuse(format!("has a {what} that is not UTF-8")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16, export: &str) -> Uri {
        Uri { server: Server::Tcp { host: host.into(), port }, export: export.into(), tls: None }
    }

    #[test]
    fn uris_of_the_specification_are_read() {
        for (text, uri) in [
            ("nbd://example.com", tcp("example.com", 10809, "")),
            ("nbd://example.com/", tcp("example.com", 10809, "")),
            ("nbd://h:1/a", tcp("h", 1, "a")),
            ("nbd://h:/a/b", tcp("h", 10809, "a/b")),
            ("nbd://127.0.0.1//a", tcp("127.0.0.1", 10809, "/a")),
            ("nbd://[::1]:65535/x%20y%25", tcp("::1", 65535, "x y%")),
            ("nbd://[fe80::1]", tcp("fe80::1", 10809, "")),
        ] {
            assert_eq!(text.parse(), Ok(uri), "{text}");
        }
        let unix = |socket: &str, export: &str| Uri {
            server: Server::Unix(socket.into()),
            export: export.into(),
            tls: None,
        };
        for (text, uri) in [
            ("nbd+unix:///?socket=/run/nbd.sock", unix("/run/nbd.sock", "")),
            ("nbd+unix://?socket=/nbd.sock", unix("/nbd.sock", "")),
            ("nbd+unix:///disk?socket=/a%2Cb%3f", unix("/a,b?", "disk")),
        ] {
            assert_eq!(text.parse(), Ok(uri), "{text}");
        }
        let secure: Uri = "nbds://h/x?tls-certificates=/a%20b&tls-hostname=other".parse().unwrap();
        let tls = Tls { certificates: Some("/a b".into()), hostname: Some("other".into()) };
        assert_eq!(secure, Uri { tls: Some(tls), ..tcp("h", 10809, "x") });
        let secure: Uri = "nbds+unix:///x?socket=/s".parse().unwrap();
        assert_eq!(secure, Uri { tls: Some(Tls::default()), ..unix("/s", "x") });
        assert_eq!("nbd://[::1]".parse::<Uri>().unwrap().server.to_string(), "[::1]:10809");
        assert_eq!("nbd://h".parse::<Uri>().unwrap().server.to_string(), "h:10809");
    }

    #[test]
    fn what_is_no_uri_is_refused_with_the_remedy() {
        for (text, words) in [
            ("disk.img", "no NBD URI"),
            ("http://h/", "the scheme http"),
            ("nbds://h/?socket=/s", "the parameter socket"),
            ("nbds+unix:///", "names no socket"),
            ("nbds://h/?tls-psk-file=/s", "by certificates only"),
            ("nbds://h/?tls-certificates=pki", "an absolute path"),
            ("nbds://h/?tls-hostname=a&tls-hostname=b", "tls-hostname= twice"),
            ("nbds://h/?tls-verify-peer=false", "the parameter tls-verify-peer"),
            ("nbd:///x", "names no host"),
            ("nbd://h:0", "from 1 to 65535"),
            ("nbd://h:65536", "from 1 to 65535"),
            ("nbd://h:+1", "where a port"),
            ("nbd://::1", "without brackets"),
            ("nbd://[h]", "no IPv6 address"),
            ("nbd://[::1", "no IPv6 address"),
            ("nbd://[::1]x", "where a port"),
            ("nbd://u@h/", "names a user"),
            ("nbd://h/?socket=/s", "the parameter socket"),
            ("nbd://h/?tls-hostname=x", "is for TLS"),
            ("nbd://h/#a", "a fragment"),
            ("nbd://h/%4", "hexadecimal"),
            ("nbd://h/%+1", "hexadecimal"),
            ("nbd://h/%00", "zero byte"),
            ("nbd://h/%ff", "not UTF-8"),
            ("nbd+unix://h/?socket=/s", "names the host h"),
            ("nbd+unix:///x", "names no socket"),
            ("nbd+unix:///x?socket=", "names no socket"),
            ("nbd+unix:///x?socket=nbd.sock", "an absolute path"),
            ("nbd+unix:///x?socket=/a&socket=/b", "twice"),
        ] {
            let e = text.parse::<Uri>().unwrap_err().to_string();
            assert!(e.contains(words), "{text}: {e}");
        }
        let long = format!("nbd://h/{}", "x".repeat(STRING_BYTES_MAX + 1));
        assert!(long.parse::<Uri>().unwrap_err().to_string().contains("more than 4096"));
        assert!(long[..long.len() - 1].parse::<Uri>().is_ok());
    }
}
