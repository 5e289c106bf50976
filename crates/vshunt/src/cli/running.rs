//! What `vshunt serve FILE…` says if the user's daemon runs already: that it serves the image, or
//! the commands by which it does so, too.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use vshunt_types::spec::{DiskInfo, DiskSpec, ExportInfo, NetInfo};

use super::call::{call, started};
use super::client::Client;
use crate::config::images::numbered;
use crate::config::{Setup, control_path};
use crate::outcome::Outcome;
use crate::serve::paste;

/// What the running daemon has.
struct Running {
    disks: Vec<DiskInfo>,
    exports: Vec<ExportInfo>,
    /// Names of disks and networks, which share their names.
    taken: Vec<String>,
}

/// Returns the remedy: the end of the message, and commands, each for a line of its own. Empty if
/// no image was given without keys.
pub(super) fn remedy(setup: &Setup) -> (String, Vec<String>) {
    let running = ask().unwrap_or(Running { disks: Vec::new(), exports: Vec::new(), taken: Vec::new() });
    text(setup, running)
}

fn ask() -> Option<Running> {
    let mut client = Client::connect_to_own(&control_path(None)?).ok()?;
    let asked = |client: &mut Client| -> Outcome<Running> {
        let disks: Vec<DiskInfo> = call(client, "query-disks", json!({}))?;
        let nets: Vec<NetInfo> = call(client, "query-nets", json!({}))?;
        let taken = disks.iter().map(|disk| &disk.spec.name).chain(nets.iter().map(|net| &net.spec.name));
        let taken = taken.cloned().collect();
        Ok(Running { disks, exports: started(client, "query-exports")?, taken })
    };
    asked(&mut client).ok()
}

fn text(setup: &Setup, mut running: Running) -> (String, Vec<String>) {
    let (mut served, mut commands) = (String::new(), Vec::new());
    for export in setup.exports.iter().filter(|export| setup.images.contains(&export.name)) {
        let disk = setup.disks.iter().find(|disk| disk.name == export.disk);
        let (Some(disk), Some(socket)) = (disk, &export.socket) else { continue };
        let Some(file) = disk.file.as_deref() else { continue };
        match running.disks.iter().find(|other| is_same(file, other)) {
            Some(other) => {
                served.push_str(&format!(
                    ". That one serves {} already{}",
                    file.display(),
                    at(other, &running)
                ));
            }
            None => {
                let (name, socket) = running.free(&disk.name, socket);
                running.taken.push(name.clone());
                let disk = DiskSpec { name, ..disk.clone() };
                let file = std::path::absolute(file).unwrap_or_else(|_| file.into());
                commands.extend(paste::commands(&disk, &file, &socket));
            }
        }
    }
    if !commands.is_empty() {
        served.push_str(". To let that one serve the image, too:");
    }
    (served, commands)
}

impl Running {
    /// Returns a name that no disk, network or export has, and a socket that no export has.
    fn free(&self, name: &str, socket: &Path) -> (String, PathBuf) {
        let own = |name: &str| socket.with_file_name(format!("{name}.sock"));
        let is_free = |name: &str| {
            let uses = |e: &ExportInfo| e.spec.name == name || e.spec.socket.as_deref() == Some(&own(name));
            !self.taken.iter().any(|taken| taken == name) && !self.exports.iter().any(uses)
        };
        let name = numbered(name, is_free);
        let socket = own(&name);
        (name, socket)
    }
}

/// Returns whether a disk of the daemon is in this file, under any name.
fn is_same(file: &Path, disk: &DiskInfo) -> bool {
    let id = |meta: Metadata| (meta.dev(), meta.ino());
    let of = |path: &Path| std::fs::metadata(path).ok().map(id);
    disk.spec.file.as_deref().is_some_and(|other| of(other).is_some() && of(other) == of(file))
}

/// Returns where a disk is served, or the command that serves it.
fn at(disk: &DiskInfo, running: &Running) -> String {
    let name = &disk.spec.name;
    let of_disk = running.exports.iter().filter(|export| export.spec.disk == *name);
    let places: Vec<String> = of_disk.filter_map(|export| export.spec.place()).collect();
    match places.is_empty() {
        true => format!(" as disk {name}, without an export: vshunt export add disk={name}"),
        false => format!(" as disk {name} on {}", places.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use vshunt_types::spec::ExportSpec;

    use super::*;

    fn running(disks: &[(&str, &Path)], exports: &[(&str, &str, &str)]) -> Running {
        let disk = |(name, file): &(&str, &Path)| -> DiskInfo {
            let value = json!({ "name": name, "file": file, "size-bytes": 512, "path": "ring",
                "direct-in-use": false, "exports": [] });
            serde_json::from_value(value).unwrap()
        };
        let export = |(name, disk, socket): &(&str, &str, &str)| -> ExportInfo {
            let value: Value = json!({ "type": "vhost-user-blk", "name": name, "disk": disk, "socket": socket,
                "engine": "user", "connected": false, "features": [], "queue-list": [] });
            serde_json::from_value(value).unwrap()
        };
        Running {
            disks: disks.iter().map(disk).collect(),
            exports: exports.iter().map(export).collect(),
            taken: disks.iter().map(|(name, _)| (*name).to_owned()).collect(),
        }
    }

    fn whole(setup: &Setup, running: Running) -> String {
        let (more, commands) = text(setup, running);
        more + &commands.concat()
    }

    #[test]
    fn an_image_that_is_served_is_named_and_another_gets_a_free_name() {
        let dir = tempfile::tempdir().unwrap();
        let (file, other) = (dir.path().join("disk.img"), dir.path().join("other.img"));
        std::fs::write(&file, "").unwrap();
        std::fs::write(&other, "").unwrap();
        let setup = Setup {
            images: vec!["disk".into()],
            disks: vec![DiskSpec { name: "disk".into(), file: Some(file.clone()), ..DiskSpec::default() }],
            exports: vec![ExportSpec {
                name: "disk".into(),
                disk: "disk".into(),
                socket: Some("/run/disk.sock".into()),
                ..ExportSpec::default()
            }],
            ..Setup::default()
        };
        let said = whole(&setup, running(&[("d0", &file)], &[("vm0", "d0", "/s")]));
        assert_eq!(said, format!(". That one serves {} already as disk d0 on /s", file.display()));
        let said = whole(&setup, running(&[("d0", &file)], &[]));
        assert!(said.ends_with("already as disk d0, without an export: vshunt export add disk=d0"), "{said}");
        let said = whole(&setup, running(&[("disk", &other)], &[("disk-2", "disk", "/s")]));
        assert!(
            said.contains("disk add name=disk-3,file=") && said.contains("socket=/run/disk-3.sock"),
            "{said}"
        );
        let said = whole(&setup, running(&[("d", &other)], &[("vm0", "d", "/run/disk.sock")]));
        assert!(
            said.contains("disk add name=disk-2,file=") && said.contains("socket=/run/disk-2.sock"),
            "{said}"
        );
        assert_eq!(whole(&Setup::default(), running(&[], &[])), "");
    }
}
