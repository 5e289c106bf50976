//! `vshunt latency`: shows the service times of exports, and resets them.

use serde_json::json;
use vshunt_types::spec::ExportInfo;

use super::args::latency::LatencyArgs;
use super::call::{narrowed, print_json, send};
use super::client::Client;
use super::show;
use crate::outcome::{Failure, Outcome, print, print_line};

pub(super) fn run(client: &mut Client, args: LatencyArgs) -> Outcome {
    let LatencyArgs { exports: names, reset, json } = args;
    let mut exports: Vec<ExportInfo> =
        narrowed(client, "query-exports", json!({ "started-only": true, "histograms": json }))?;
    if let Some(name) = names.iter().find(|name| !exports.iter().any(|e| e.spec.name == **name)) {
        return Err(Failure::Failed(format!("there is no export {name}; see `vshunt export list`")));
    }
    let is_asked = |e: &ExportInfo| match names.is_empty() {
        true => e.service_times.is_some(),
        false => names.contains(&e.spec.name),
    };
    exports.retain(is_asked);
    if reset {
        let all = exports.iter().map(|e| json!({ "name": e.spec.name }));
        return all.into_iter().try_for_each(|export| send(client, "export-latency-reset", export));
    }
    if json {
        let of = |e: &ExportInfo| json!({ "export": e.spec.name, "service-times": e.service_times });
        return print_json(&exports.iter().map(of).collect());
    }
    match show::latencies(&exports) {
        Some(table) => print(&table),
        None => print_line("no request was measured"),
    }
}
