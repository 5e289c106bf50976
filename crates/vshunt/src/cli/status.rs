//! `vshunt status`: everything that a daemon has, or a part of it, once or again and again.

mod lists;
mod watch;

use std::path::PathBuf;

use serde_json::Value;
use vshunt_types::spec::{DiskInfo, WorkerInfo};

use self::lists::Lists;
use super::args::status::StatusArgs;
use super::call::{connect, query};
use super::client::Client;
use super::show;
use crate::outcome::{Outcome, print};

pub(super) fn run(control: Option<PathBuf>, args: StatusArgs) -> Outcome {
    let mut client = connect(control.as_ref())?;
    let StatusArgs { names, watch, json } = args;
    let mut report = Report { names, json, before: Vec::new() };
    match watch {
        None => print(&report.next(&mut client)?),
        Some(interval) => watch::run(interval, move || report.next(&mut client)),
    }
}

/// What is printed, time after time.
struct Report {
    /// The names that are shown; all if it is empty.
    names: Vec<String>,
    json: bool,
    /// The workers at the last time.
    before: Vec<WorkerInfo>,
}

impl Report {
    /// Asks the daemon, and returns the text.
    fn next(&mut self, client: &mut Client) -> Outcome<String> {
        let mut lists = Lists::ask(client, !self.json)?;
        if !self.names.is_empty() {
            lists.keep(&self.names)?;
        }
        let sandbox = match self.json || self.names.is_empty() {
            true => query(client, "query-sandbox")?,
            false => Value::Null,
        };
        if self.json {
            return Ok(format!("{:#}\n", lists.into_json(sandbox)));
        }
        self.tables(lists, sandbox)
    }

    fn tables(&mut self, lists: Lists, sandbox: Value) -> Outcome<String> {
        let [nets, jobs] = [&lists.nets, &lists.jobs].map(|list| !list.is_empty());
        let disks: Vec<DiskInfo> = lists::typed(lists.disks)?;
        let exports = lists::typed(lists.exports)?;
        let queues = lists::typed(lists.queues)?;
        let workers: Vec<WorkerInfo> = lists::typed(lists.workers)?;
        let lately = workers.iter().map(|w| since(&self.before, w)).collect::<Vec<_>>();
        // Tables without rows are left out.
        let tables = [
            (!disks.is_empty()).then(|| show::disks(&disks)),
            show::connections(&disks),
            nets.then(|| lists::typed(lists.nets).map(|n| show::nets(&n))).transpose()?,
            (!exports.is_empty()).then(|| show::exports(&exports)),
            show::choices(&exports),
            show::ports(&exports),
            show::limits(&exports),
            show::balance(&exports),
            jobs.then(|| lists::typed(lists.jobs).map(|j| show::jobs(&j))).transpose()?,
            show::queues(&queues, &exports),
            show::latencies(&exports),
            (!workers.is_empty()).then(|| show::workers(&lately)),
            show::drops(&queues),
            (!sandbox.is_null()).then(|| lists::one(sandbox).map(|info| show::sandbox(&info))).transpose()?,
        ];
        self.before = workers;
        Ok(tables.into_iter().flatten().collect::<Vec<_>>().join("\n"))
    }
}

/// Returns a worker with its times since it was `before`.
fn since(before: &[WorkerInfo], now: &WorkerInfo) -> WorkerInfo {
    let mut since = now.clone();
    if let Some(old) = before.iter().find(|old| (old.id, old.tid) == (now.id, now.tid)) {
        since.busy_us = now.busy_us.saturating_sub(old.busy_us);
        since.polling_us = now.polling_us.saturating_sub(old.polling_us);
        since.sleeping_us = now.sleeping_us.saturating_sub(old.sleeping_us);
    }
    since
}
