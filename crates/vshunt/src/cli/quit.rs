//! `vshunt quit`. The command asks before it takes a device from a guest or a file from a program.
//! Command `quit` of the control protocol and signals do not ask.

use std::time::{Duration, Instant};

use serde_json::Map;
use vshunt_types::spec::{ExportInfo, ExportKind};

use super::call::started;
use super::client::Client;
use crate::outcome::{Failure, Outcome, print_line};

/// The time limit for the end of the daemon.
const QUIT_TIME: Duration = Duration::from_secs(60);
/// The daemon notices within this time that a file was closed. Scripts close it and end the daemon,
/// one after the other.
const NOTICED: Duration = Duration::from_secs(1);
const QUERY_INTERVAL: Duration = Duration::from_millis(50);

pub(super) fn run(mut client: Client, force: bool) -> Outcome {
    let start = Instant::now();
    let users = loop {
        let users = Users::of(&started::<Vec<ExportInfo>>(&mut client, "query-exports")?);
        match users.refusal() {
            Some(why) if !force && start.elapsed() >= NOTICED => return Err(Failure::Failed(why)),
            Some(_) if !force => std::thread::sleep(QUERY_INTERVAL),
            _ => break users,
        }
    };
    client.execute("quit", Map::new())?;
    if !client.wait_closed(QUIT_TIME) {
        return Err(Failure::Failed("the daemon was told to quit and has not ended yet".into()));
    }
    match users.connected.as_slice() {
        [] => Ok(()),
        names => print_line(&format!("disconnected: {}", names.join(", "))),
    }
}

/// The exports that are in use.
struct Users {
    /// With a front end or clients.
    connected: Vec<String>,
    /// What is connected to them: to one, to several.
    by: [&'static str; 2],
    /// A mounted file that is open, and its path.
    open: Option<(String, String)>,
}

impl Users {
    fn of(exports: &[ExportInfo]) -> Self {
        let in_use = |e: &&ExportInfo| e.connected && !e.leaving && !e.removing;
        let of = |kinds: &[ExportKind]| -> Vec<String> {
            let of_kinds = exports.iter().filter(in_use).filter(|e| kinds.contains(&e.spec.kind));
            of_kinds.map(|e| e.spec.name.clone()).collect()
        };
        let of_vmm = of(&[ExportKind::VhostUserBlk, ExportKind::VhostUserNet]);
        let of_client = of(&[ExportKind::Nbd]);
        let by = match (of_vmm.is_empty(), of_client.is_empty()) {
            (_, true) => ["a front end (VMM)", "front ends (VMMs)"],
            (true, false) => ["NBD clients"; 2],
            (false, false) => ["front ends (VMMs) and NBD clients"; 2],
        };
        let open = exports.iter().find(|e| e.mount.as_ref().is_some_and(|m| m.open_files > 0));
        let path = |e: &ExportInfo| e.spec.mountpoint.as_ref().map(|p| p.display().to_string());
        Self {
            connected: [of_vmm, of_client].concat(),
            by,
            open: open.map(|e| (e.spec.name.clone(), path(e).unwrap_or_default())),
        }
    }

    /// Returns why `quit` needs `--force`.
    fn refusal(&self) -> Option<String> {
        if let Some((name, at)) = &self.open {
            return Some(format!(
                "export {name} is in use (fuser -v {at} names its users, loop devices do not show there: losetup -j {at}); \
                 close it first, or give --force and they lose it"
            ));
        }
        let [by, by_all] = self.by;
        let which = match self.connected.as_slice() {
            [] => return None,
            [name] => format!("export {name} has {by} connected, which would lose it"),
            names => format!("exports {} have {by_all} connected, which would lose them", names.join(", ")),
        };
        Some(format!(
            "{which}; end them first, or give --force: with reconnect a guest waits for the next daemon"
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn export(name: &str, kind: &str, more: Value) -> ExportInfo {
        let mut value = json!({ "type": kind, "name": name, "disk": "d0", "engine": "user", "connected": true,
            "features": [], "queue-list": [] });
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_exports_in_use_are_named() {
        let none = json!({});
        let waiting = export("w", "vhost-user-blk", json!({ "connected": false }));
        let leaving = export("l", "vhost-user-blk", json!({ "leaving": true }));
        let removing = export("r", "vhost-user-blk", json!({ "removing": true }));
        let uplink = export("u", "uplink", none.clone());
        let idle = [waiting, leaving, removing, uplink];
        assert_eq!(Users::of(&idle).refusal(), None);
        let [blk, net] =
            [export("vm0", "vhost-user-blk", none.clone()), export("nic0", "vhost-user-net", none)];
        let one = Users::of(&[&idle[..], std::slice::from_ref(&blk)].concat()).refusal().unwrap();
        assert!(one.starts_with("export vm0 has a front end (VMM)") && one.contains("--force"), "{one}");
        let two = Users::of(&[blk.clone(), net]).refusal().unwrap();
        assert!(two.starts_with("exports vm0, nic0 have front ends"), "{two}");
        let nbd = export("n", "nbd", json!({}));
        let three = Users::of(std::slice::from_ref(&nbd)).refusal().unwrap();
        assert!(three.starts_with("export n has NBD clients connected"), "{three}");
        let four = Users::of(&[nbd, blk]).refusal().unwrap();
        assert!(four.starts_with("exports vm0, n have front ends (VMMs) and NBD clients"), "{four}");
    }
}
