//! The lists of a daemon, and the choice of a part of them by names.

use std::collections::HashSet;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::call::{call, started};
use super::super::client::Client;
use crate::outcome::{Failure, Outcome};

/// The lists as the daemon sent them. A key that this program does not know stays in the JSON.
pub(super) struct Lists {
    pub(super) disks: Vec<Value>,
    pub(super) nets: Vec<Value>,
    pub(super) exports: Vec<Value>,
    pub(super) jobs: Vec<Value>,
    pub(super) queues: Vec<Value>,
    pub(super) workers: Vec<Value>,
}

impl Lists {
    /// Asks the daemon. `brief`: without the many queues that never started.
    pub(super) fn ask(client: &mut Client, brief: bool) -> Outcome<Self> {
        let mut ask = |command| match brief && ["query-exports", "query-queues"].contains(&command) {
            true => started(client, command),
            false => call(client, command, json!({})),
        };
        Ok(Self {
            disks: ask("query-disks")?,
            nets: ask("query-nets")?,
            exports: ask("query-exports")?,
            jobs: ask("query-jobs")?,
            queues: ask("query-queues")?,
            workers: ask("query-workers")?,
        })
    }

    /// Keeps exports, disks, networks and jobs of these names, with the disk and the network of an
    /// export, the exports of a disk or a network, and the jobs of a disk. Keeps their queues, and
    /// the workers of these.
    ///
    /// # Errors
    /// There is nothing of one of the names.
    pub(super) fn keep(&mut self, names: &[String]) -> Outcome {
        let of =
            |list: &[Value], key| list.iter().map(|item| text(item, key).to_owned()).collect::<HashSet<_>>();
        let (disks, nets) = (of(&self.disks, "name"), of(&self.nets, "name"));
        let (exports, jobs) = (of(&self.exports, "name"), of(&self.jobs, "id"));
        let known = |name: &&String| [&disks, &nets, &exports, &jobs].iter().any(|of| of.contains(*name));
        if let Some(name) = names.iter().find(|name| !known(name)) {
            return Err(match name.as_str() {
                "" => Failure::Usage(
                    "an empty name; leave it out to see all exports, disks and networks".into(),
                ),
                _ => Failure::Failed(format!(
                    "there is no export, disk, network or job {name}; see `vshunt status`"
                )),
            });
        }
        let is_named = |item: &Value, key| names.iter().any(|name| *name == text(item, key));
        // An export that is named itself shows what it is of, but not the other exports of that.
        let shown = |e: &Value, key| is_named(e, "name").then(|| text(e, key).to_owned());
        let used = |key| self.exports.iter().filter_map(|e| shown(e, key)).collect::<HashSet<_>>();
        let (used_disks, used_nets) = (used("disk"), used("net"));
        self.disks.retain(|d| is_named(d, "name") || used_disks.contains(text(d, "name")));
        self.nets.retain(|n| is_named(n, "name") || used_nets.contains(text(n, "name")));
        let disks = of(&self.disks, "name");
        self.exports.retain(|e| is_named(e, "name") || is_named(e, "disk") || is_named(e, "net"));
        self.jobs.retain(|j| is_named(j, "id") || disks.contains(text(j, "disk")));
        let owners = &of(&self.exports, "name") | &of(&self.jobs, "id");
        self.queues.retain(|q| owners.contains(text(q, "export")));
        // An export may have more queues than were asked for.
        let is_of = |queue: &Value| {
            let name = queue.as_str().unwrap_or_default();
            owners.contains(name.rsplit_once(':').map_or(name, |(owner, _)| owner))
        };
        self.workers.retain(|w| w["queues"].as_array().is_some_and(|queues| queues.iter().any(is_of)));
        Ok(())
    }

    /// Returns all lists as one object.
    pub(super) fn into_json(self, sandbox: Value) -> Value {
        json!({
            "disks": self.disks,
            "nets": self.nets,
            "exports": self.exports,
            "jobs": self.jobs,
            "queues": self.queues,
            "sandbox": sandbox,
            "workers": self.workers,
        })
    }
}

/// Reads the items of a list.
pub(super) fn typed<T: DeserializeOwned>(list: Vec<Value>) -> Outcome<Vec<T>> {
    one(Value::Array(list))
}

/// Reads a part of an answer.
pub(super) fn one<T: DeserializeOwned>(value: Value) -> Outcome<T> {
    serde_json::from_value(value).map_err(|e| {
        Failure::Failed(format!("the daemon's answer is not understood ({e}); is it another version?"))
    })
}

fn text<'a>(item: &'a Value, key: &str) -> &'a str {
    item[key].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists() -> Lists {
        let list = |value: Value| value.as_array().unwrap().clone();
        Lists {
            disks: list(json!([{ "name": "d0" }, { "name": "d1" }])),
            nets: list(json!([{ "name": "n0" }])),
            exports: list(json!([
                { "name": "vm0", "disk": "d0" }, { "name": "f0", "disk": "d0" }, { "name": "vm1", "disk": "d1" },
                { "name": "nic", "net": "n0" },
            ])),
            jobs: list(json!([{ "id": "j0", "disk": "d1" }])),
            queues: list(json!([
                { "export": "vm0" }, { "export": "f0" }, { "export": "vm1" }, { "export": "nic" }, { "export": "j0" },
            ])),
            workers: list(json!([
                { "id": 0, "queues": ["vm0:0", "vm1:0"] }, { "id": 1, "queues": ["f0:0"] },
                { "id": 2, "queues": [] }, { "id": 3, "queues": ["j0", "nic:12"] },
            ])),
        }
    }

    fn kept(names: &[&str]) -> Vec<Vec<String>> {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut lists = lists();
        lists.keep(&names).unwrap();
        let of = |list: &[Value], key: &str| {
            list.iter().map(|item| item[key].as_str().map_or(item[key].to_string(), str::to_owned)).collect()
        };
        vec![
            of(&lists.disks, "name"),
            of(&lists.nets, "name"),
            of(&lists.exports, "name"),
            of(&lists.jobs, "id"),
            of(&lists.queues, "export"),
            of(&lists.workers, "id"),
        ]
    }

    #[test]
    fn a_name_keeps_what_belongs_to_it() {
        type Kept<'a> = [&'a [&'a str]; 6];
        let cases: [(&[&str], Kept<'_>); 5] = [
            (&["vm0"], [&["d0"], &[], &["vm0"], &[], &["vm0"], &["0"]]),
            (&["d0"], [&["d0"], &[], &["vm0", "f0"], &[], &["vm0", "f0"], &["0", "1"]]),
            (&["vm1"], [&["d1"], &[], &["vm1"], &["j0"], &["vm1", "j0"], &["0", "3"]]),
            (&["n0"], [&[], &["n0"], &["nic"], &[], &["nic"], &["3"]]),
            (&["nic", "f0"], [&["d0"], &["n0"], &["f0", "nic"], &[], &["f0", "nic"], &["1", "3"]]),
        ];
        for (names, want) in cases {
            let want: Vec<Vec<String>> =
                want.iter().map(|list| list.iter().map(|s| (*s).to_owned()).collect()).collect();
            assert_eq!(kept(names), want, "{names:?}");
        }
    }

    #[test]
    fn a_job_of_that_name_is_kept() {
        assert_eq!(kept(&["j0"])[3..], [vec!["j0".to_owned()], vec!["j0".to_owned()], vec!["3".to_owned()]]);
    }

    #[test]
    fn a_name_of_nothing_is_an_error() {
        let Err(Failure::Failed(why)) = lists().keep(&["vm0".into(), "vm9".into()]) else { panic!("kept") };
        assert!(why.contains("no export, disk, network or job vm9"), "{why}");
    }
}
