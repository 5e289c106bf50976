//! The dashboard for Grafana, made from the table of metrics: a panel for each metric that has a
//! value besides 1, in rows by the object that has it.

use serde_json::{Value, json};

/// The rows of the dashboard: a title, and the start of the names of the metrics in it. The first
/// row whose start fits has the metric.
const ROWS: [(&str, &str); 8] = [
    ("Program", "vshunt_sandbox"),
    ("Disks", "vshunt_disk"),
    ("Bitmaps", "vshunt_bitmap"),
    ("Networks", "vshunt_net"),
    ("Exports", "vshunt_export"),
    ("Queues", "vshunt_queue"),
    ("Workers", "vshunt_worker"),
    ("Jobs", "vshunt_job"),
];

/// Grafana's grid has 24 columns; three panels lie side by side.
const PANEL_WIDTH: usize = 8;
const PANELS_IN_A_ROW: usize = 24 / PANEL_WIDTH;
const PANEL_HEIGHT: usize = 7;

/// Returns the dashboard as JSON. `metrics`: the rows of the page of metrics (name, type, labels,
/// meaning).
pub(super) fn dashboard(metrics: &[[String; 4]]) -> String {
    let mut panels = Vec::new();
    let mut y = 0;
    for (title, start) in ROWS {
        let of_row: Vec<_> =
            metrics.iter().filter(|m| has_panel(m) && plain(&m[0]).starts_with(start)).collect();
        panels.push(json!({
            "id": panels.len() + 1, "type": "row", "title": title, "collapsed": false, "panels": [],
            "gridPos": { "h": 1, "w": 24, "x": 0, "y": y },
        }));
        y += 1;
        for (at, metric) in of_row.iter().enumerate() {
            let (x, down) = (at % PANELS_IN_A_ROW * PANEL_WIDTH, at / PANELS_IN_A_ROW * PANEL_HEIGHT);
            let place = json!({ "h": PANEL_HEIGHT, "w": PANEL_WIDTH, "x": x, "y": y + down });
            panels.push(panel(panels.len() + 1, metric, place));
        }
        y += of_row.len().div_ceil(PANELS_IN_A_ROW) * PANEL_HEIGHT;
    }
    let variable = |name: &str, label: &str, query: &str| {
        json!({
            "name": name, "label": label, "type": "query", "query": query, "refresh": 2, "multi": true,
            "includeAll": true, "allValue": ".*", "current": { "text": "All", "value": "$__all" },
            "datasource": { "type": "prometheus", "uid": "${source}" },
        })
    };
    let whole = json!({
        "title": "vshunt", "uid": "vshunt", "schemaVersion": 38, "editable": true, "refresh": "10s",
        "time": { "from": "now-1h", "to": "now" }, "tags": ["vshunt"],
        "templating": { "list": [
            { "name": "source", "label": "Data source", "type": "datasource", "query": "prometheus" },
            variable("instance", "Instance", "label_values(vshunt_build_info, instance)"),
            variable("export", "Export", "label_values(vshunt_export_info, export)"),
        ] },
        "panels": panels,
    });
    let mut text = serde_json::to_string_pretty(&whole).unwrap_or_default();
    text.push('\n');
    text
}

fn plain(name: &str) -> &str {
    name.trim_matches('`')
}

/// Metrics that end in `_info` have the value 1 and say something by their labels.
fn has_panel(metric: &[String; 4]) -> bool {
    !plain(&metric[0]).ends_with("_info")
}

fn panel(id: usize, [name, kind, labels, meaning]: &[String; 4], place: Value) -> Value {
    let name = plain(name);
    // Prometheus has a label `job` of its own, and renames that of a metric.
    let labels: Vec<_> = labels
        .split(", ")
        .map(plain)
        .filter(|l| !l.is_empty())
        .map(|l| if l == "job" { "exported_job" } else { l })
        .collect();
    let mut chosen = String::from("instance=~\"$instance\"");
    if labels.contains(&"export") {
        chosen.push_str(", export=~\"$export\"");
    }
    let series = format!("{name}{{{chosen}}}");
    let is_counter = kind == "counter";
    let query = match kind.as_str() {
        "counter" => format!("rate({series}[$__rate_interval])"),
        "histogram" => format!(
            "histogram_quantile(0.99, sum by (instance, {}, le) (rate({name}_bucket{{{chosen}}}[$__rate_interval])))",
            labels.join(", ")
        ),
        _ => series,
    };
    let legend: Vec<_> = std::iter::once("instance").chain(labels).map(|l| format!("{{{{{l}}}}}")).collect();
    let of_unit = |unit: &str| name.ends_with(unit) || name.ends_with(&format!("{unit}_total"));
    let unit = match (of_unit("_bytes"), of_unit("_seconds"), is_counter) {
        (true, _, true) => "Bps",
        (true, _, false) => "bytes",
        // Seconds in each second are a share of a CPU.
        (_, true, true) => "percentunit",
        (_, true, false) => "s",
        (_, _, true) => "ops",
        _ => "short",
    };
    json!({
        "id": id, "type": "timeseries",
        "title": if kind == "histogram" { format!("{meaning}, 99th percentile") } else { meaning.clone() }, "gridPos": place,
        "datasource": { "type": "prometheus", "uid": "${source}" },
        "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        "targets": [{ "refId": "A", "expr": query, "legendFormat": legend.join(" ") }],
    })
}

/// Every metric has a panel or is one of information, and the rules for alerts name metrics that
/// there are.
#[test]
fn the_dashboard_and_the_alerts_name_the_metrics_that_there_are() {
    let metrics = crate::metrics::families::tests::rows();
    let text = dashboard(&metrics);
    for metric in metrics.iter().filter(|m| has_panel(m)) {
        let suffix = if metric[1] == "histogram" { "_bucket" } else { "" };
        assert!(text.contains(&format!("{}{suffix}{{", plain(&metric[0]))), "no panel for {}", metric[0]);
    }
    let rules = std::fs::read_to_string(super::root().join("packaging/prometheus/vshunt.rules.yml")).unwrap();
    let expressions: String = rules.lines().filter(|l| l.trim_start().starts_with("expr:")).collect();
    let named = expressions
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|w| w.starts_with("vshunt_"));
    let mut count = 0;
    for name in named {
        assert!(metrics.iter().any(|m| plain(&m[0]) == name), "no metric {name}");
        count += 1;
    }
    assert!(count > 5, "{expressions}");
}
