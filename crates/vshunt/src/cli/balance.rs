//! `vshunt balance`: shows and sets whether queues follow load.

use serde_json::{Value, json};
use vshunt_types::spec::{BalanceMode, ExportInfo};

use super::args::balance::{BalanceArgs, Mode};
use super::call::{call, print_json, send};
use super::client::Client;
use super::show;
use crate::outcome::{Failure, Outcome, print};

pub(super) fn run(client: &mut Client, args: BalanceArgs) -> Outcome {
    let BalanceArgs { mode, export, json } = args;
    if let Some(Mode(mode)) = mode {
        let mut arguments = json!({});
        match (&export, mode) {
            (None, None) => {
                return Err(Failure::Usage(
                    "`default` is the mode of the daemon for an export; name it: --export".into(),
                ));
            }
            (Some(export), _) => arguments["export"] = export.clone().into(),
            (None, Some(_)) => {}
        }
        if let Some(mode) = mode {
            arguments["mode"] = mode.name().into();
        }
        return send(client, "balance-set", arguments);
    }
    let found: Value = call(client, "query-balance", json!({}))?;
    let exports: Vec<ExportInfo> = call(client, "query-exports", json!({ "started-only": true }))?;
    let listed: Vec<_> =
        exports.into_iter().filter(|e| export.as_ref().is_none_or(|name| *name == e.spec.name)).collect();
    if let Some(name) = export.filter(|_| listed.is_empty()) {
        return Err(Failure::Failed(format!("there is no export {name}; see `vshunt export list`")));
    }
    if json {
        let of = |e: &ExportInfo| (e.spec.name.clone(), json!(e.balancing));
        let exports: serde_json::Map<String, Value> = listed.iter().map(of).collect();
        return print_json(&json!({ "mode": found["mode"], "exports": exports }));
    }
    let mode: BalanceMode = serde_json::from_value(found["mode"].clone()).unwrap_or_default();
    let table = show::balance(&listed).map_or_else(String::new, |table| format!("\n{table}"));
    print(&format!("balance is {mode}, except for exports with a mode of their own\n{table}"))
}
