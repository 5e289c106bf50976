//! `vshunt limit`: shows, sets and lifts the limits of an export.

use serde_json::json;
use vshunt_types::spec::{ExportInfo, LimitsSpec};

use super::args::limit::LimitArgs;
use super::call::{call, print_json, send};
use super::client::Client;
use super::show;
use crate::outcome::{Failure, Outcome, print, print_line};

pub(super) fn run(client: &mut Client, args: LimitArgs) -> Outcome {
    let LimitArgs { export, off, json, limits } = args;
    if off {
        return send(client, "export-limit", json!({ "name": export }));
    }
    if let Some(limits) = limits.into_spec() {
        limits.check().map_err(|why| Failure::Usage(in_flags(&limits, why)))?;
        vshunt_daemon::check_limits(&export, None, &limits).map_err(|e| Failure::Usage(e.to_string()))?;
        return send(client, "export-limit", json!({ "name": export, "limits": limits }));
    }
    let exports: Vec<ExportInfo> = call(client, "query-exports", json!({}))?;
    let Some(found) = exports.iter().find(|e| e.spec.name == export) else {
        return Err(Failure::Failed(format!("there is no export {export}; see `vshunt export list`")));
    };
    if json {
        return print_json(&json!(found.spec.limits));
    }
    match show::limits(std::slice::from_ref(found)) {
        Some(table) => print(&table),
        None => print_line(&format!("{export} has no limits")),
    }
}

/// Writes the keys of a message as flags.
fn in_flags(limits: &LimitsSpec, why: String) -> String {
    let mut why = why;
    for (key, ..) in limits.rates() {
        for key in [format!("burst-{key}"), key.to_owned()] {
            why = why.replace(&format!(" {key}="), &format!(" --{key} "));
            why = match why.strip_prefix(&format!("{key}=")) {
                Some(rest) => format!("--{key} {rest}"),
                None => why,
            };
            why = why.replace(&format!("give {key} too"), &format!("give --{key} too"));
        }
    }
    for (key, of, _) in limits.sizes() {
        if let Some(rest) = why.strip_prefix(&format!("{key}=")) {
            return format!(
                "--{key} {}",
                rest.replace(&format!("give {of} too"), &format!("give --{of} too"))
            );
        }
    }
    why
}
