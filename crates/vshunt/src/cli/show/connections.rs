//! The table of disks whose workers do not all have a connection of their own to the NBD server.

use vshunt_types::spec::DiskInfo;

use super::{or_dash, table};

/// Returns the table. None if there is no such disk.
pub(crate) fn connections(disks: &[DiskInfo]) -> Option<String> {
    let rows: Vec<_> = disks
        .iter()
        .filter_map(|disk| {
            let c = disk.connections.as_ref().filter(|c| c.refused.is_some() || !c.shared)?;
            Some([
                disk.spec.name.clone(),
                c.own.to_string(),
                c.sharing.to_string(),
                if c.shared { "up" } else { "lost" }.to_owned(),
                or_dash(c.refused.clone().unwrap_or_default()),
            ])
        })
        .collect();
    let titles = ["DISK", ">OWN CONNECTIONS", ">WORKERS THAT SHARE", "SHARED", "NO MORE BECAUSE"];
    (!rows.is_empty()).then(|| table(titles, rows.into_iter()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn disks_whose_server_gives_no_more_are_shown() {
        let disk = |name: &str, connections: Value| -> DiskInfo {
            let mut value = json!({ "name": name, "uri": "nbd://h/x", "size-bytes": 512, "path": "ring",
                "direct-in-use": false, "exports": [] });
            value["connections"] = connections;
            serde_json::from_value(value).unwrap()
        };
        let well = disk("well", json!({ "own": 2, "sharing": 0, "shared": true }));
        assert_eq!(connections(&[well.clone(), disk("other", Value::Null)]), None);
        let few = disk(
            "few",
            json!({ "own": 1, "sharing": 3, "shared": true, "refused": "the server refuses: no" }),
        );
        let lost = disk("lost", json!({ "own": 0, "sharing": 1, "shared": false }));
        assert_eq!(
            connections(&[well, few, lost]).unwrap(),
            "DISK  OWN CONNECTIONS  WORKERS THAT SHARE  SHARED  NO MORE BECAUSE\n\
             few                 1                   3  up      the server refuses: no\n\
             lost                0                   1  lost    -\n"
        );
    }
}
