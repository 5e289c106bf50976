//! The table of service times.

use vshunt_types::spec::{ExportInfo, LatencyMode};

use super::table;

/// Returns the table of the service times of exports, by the kind of requests. None if none was
/// measured.
pub(crate) fn latencies(exports: &[ExportInfo]) -> Option<String> {
    let mut rows = Vec::new();
    for export in exports {
        let Some(latency) = &export.service_times else { continue };
        for (kind, figures) in latency.each() {
            let Some(figures) = figures else { continue };
            let name = match latency.mode {
                LatencyMode::Sampled => format!("{kind}, sampled"),
                LatencyMode::On | LatencyMode::Off => kind.to_owned(),
            };
            rows.push([
                export.spec.name.clone(),
                name,
                figures.count.to_string(),
                time(figures.total_ns / figures.count.max(1)),
                time(figures.p50_ns),
                time(figures.p99_ns),
                time(figures.max_ns),
            ]);
        }
    }
    let titles = ["EXPORT", "LATENCY OF", ">REQUESTS", ">MEAN", ">P50", ">P99", ">MAX"];
    (!rows.is_empty()).then(|| table(titles, rows.into_iter()))
}

/// Formats nanoseconds with three digits: 125ns, 12.5us, 1.50ms, 67.1s.
pub(crate) fn time(ns: u64) -> String {
    const UNITS: [&str; 4] = ["ns", "us", "ms", "s"];
    let (mut value, mut unit) = (ns as f64, 0);
    // 999.5 would be rounded to 1000.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match (unit, value) {
        // The limit of the last bin.
        _ if ns == u64::MAX => ">67s".to_owned(),
        (1.., value) if value < 9.995 => format!("{value:.2}{}", UNITS[unit]),
        (1.., value) if value < 99.95 => format!("{value:.1}{}", UNITS[unit]),
        _ => format!("{value:.0}{}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vshunt_types::spec::LatencyFigures;

    use super::*;

    #[test]
    fn times_have_three_digits() {
        let cases = [
            (0, "0ns"),
            (125, "125ns"),
            (999, "999ns"),
            (1000, "1.00us"),
            (12_345, "12.3us"),
            (999_600, "1.00ms"),
            (67_108_864_000, "67.1s"),
            (300_000_000_000, "300s"),
            (u64::MAX, ">67s"),
        ];
        for (ns, want) in cases {
            assert_eq!(time(ns), want, "{ns}");
        }
    }

    #[test]
    fn the_table_has_a_row_for_each_kind_and_fits_a_terminal() {
        let export = |name: &str, mode: &str| -> ExportInfo {
            let figures =
                LatencyFigures::new(vec![(12_000, 9_999_999), (4_000_000, 400_000)], 7 << 40, 3_900_000);
            let value = json!({ "type": "vhost-user-blk", "name": name, "disk": "d0", "engine": "user",
                "connected": true, "features": [], "queue-list": [],
                "service-times": { "mode": mode, "read": figures, "flush": figures } });
            serde_json::from_value(value).unwrap()
        };
        let text = latencies(&[export("vm0", "on"), export("a-longer-name", "sampled")]).unwrap();
        let want = "\
EXPORT         LATENCY OF      REQUESTS   MEAN     P50     P99     MAX
vm0            read            10399999  740us  12.0us  3.90ms  3.90ms
vm0            flush           10399999  740us  12.0us  3.90ms  3.90ms
a-longer-name  read, sampled   10399999  740us  12.0us  3.90ms  3.90ms
a-longer-name  flush, sampled  10399999  740us  12.0us  3.90ms  3.90ms
";
        assert_eq!(text, want);
        assert_eq!(latencies(&[]), None);
    }
}
