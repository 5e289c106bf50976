//! Commands for qemu-img, for messages.

use std::fmt::Display;

use ::nbd::{Server, Uri};

/// Returns the words by which qemu-img finds a qcow2 image on a server. It takes URIs without TLS.
pub(super) fn image_of(uri: &str) -> String {
    let Ok(Uri { server, export, tls: Some(tls) }) = uri.parse() else {
        return format!("-f qcow2 {}", quoted(uri));
    };
    // A comma is written twice.
    let value = |text: &dyn Display| text.to_string().replace(',', ",,");
    let folder = match &tls.certificates {
        Some(folder) => value(&folder.display()),
        None => "FOLDER-WITH-ca-cert.pem".to_owned(),
    };
    let server = match &server {
        Server::Tcp { host, port } => {
            format!("type=inet,file.server.host={},file.server.port={port}", value(host))
        }
        Server::Unix(path) => format!("type=unix,file.server.path={}", value(&path.display())),
    };
    let mut options = format!("driver=qcow2,file.driver=nbd,file.server.{server},file.tls-creds=tls");
    if !export.is_empty() {
        options += &format!(",file.export={}", value(&export));
    }
    if let Some(name) = &tls.hostname {
        options += &format!(",file.tls-hostname={}", value(name));
    }
    let object = format!("tls-creds-x509,id=tls,endpoint=client,dir={folder}");
    format!("--object {} --image-opts {}", quoted(&object), quoted(&options))
}

/// Returns a word as a shell reads it. With double quotes, because messages have single ones around
/// a command.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "+,-./:=@_".contains(c);
    if word.chars().all(is_plain) {
        return word.to_owned();
    }
    let mut text = String::from('"');
    for c in word.chars() {
        if matches!(c, '"' | '$' | '`' | '\\') {
            text.push('\\');
        }
        text.push(c);
    }
    text + "\""
}

#[cfg(test)]
mod tests {
    use super::image_of;

    #[test]
    fn images_on_servers_are_found() {
        for (uri, words) in [
            ("nbd://h/x%20y", "-f qcow2 \"nbd://h/x%20y\""),
            ("nbd://[::1]:1/x", "-f qcow2 \"nbd://[::1]:1/x\""),
            ("nbd+unix:///x?socket=/s", "-f qcow2 \"nbd+unix:///x?socket=/s\""),
            (
                "nbds://h/x?tls-certificates=/c,d&tls-hostname=n",
                "--object tls-creds-x509,id=tls,endpoint=client,dir=/c,,d --image-opts \
                 driver=qcow2,file.driver=nbd,file.server.type=inet,file.server.host=h,file.server.port=10809,\
                 file.tls-creds=tls,file.export=x,file.tls-hostname=n",
            ),
            (
                "nbds+unix:///?socket=/a%20b&tls-certificates=/c",
                "--object tls-creds-x509,id=tls,endpoint=client,dir=/c --image-opts \
                 \"driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path=/a b,file.tls-creds=tls\"",
            ),
        ] {
            assert_eq!(image_of(uri), words);
        }
    }
}
