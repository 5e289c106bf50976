//! Sizes, times and CPU lists as people write them.

use std::time::Duration;

/// Parses bytes in powers of 1024: `4k`, `1M`, `512`, `2GiB`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 =
        text[..digits].parse().map_err(|_| format!("{text:?} is not a size: try 4k, 1M or 2G"))?;
    let shift = match text[digits..].to_ascii_lowercase().trim_end_matches("ib") {
        "" | "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("{text:?} is not a size: its unit is one of k, M, G, T")),
    };
    number.checked_shl(shift).filter(|v| v >> shift == number).ok_or_else(|| format!("{text:?} is too large"))
}

/// Parses a time: `5s`, `500ms`, `2m`, `20us`, `1.5s`. A bare number is seconds.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let unit = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let bad = || format!("{text:?} is not a time: try 5s, 500ms or 2m");
    let number: f64 = text[..unit].parse().map_err(|_| bad())?;
    let seconds = match &text[unit..] {
        "" | "s" => number,
        "ms" => number / 1e3,
        "us" => number / 1e6,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(bad()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

/// Parses numbers of CPUs: `0,2-3`.
pub fn parse_cpus(text: &str) -> Result<Vec<usize>, String> {
    let bad = |_| format!("{text:?} is not a list of CPUs: try 0,2-3");
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().map_err(bad)?, last.parse().map_err(bad)?);
        if last < first || last >= 1024 {
            return Err(format!("{part:?} is not a range of CPUs"));
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

/// Formats bytes in short form: `4k`, `1M`, `1536`.
pub fn show_size(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "k")] {
        if bytes >> shift != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Formats requests per second in short form: `3.21M`, `84.0k`, `17`.
pub fn show_rate(rate: f64) -> String {
    match rate {
        r if r >= 1e6 => format!("{:.2}M", r / 1e6),
        r if r >= 1e3 => format!("{:.1}k", r / 1e3),
        r => format!("{r:.0}"),
    }
}

/// Formats nanoseconds in short form: `850 ns`, `12.3 µs`, `4.56 ms`, `1.20 s`.
pub fn show_nanos(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("1MiB"), Ok(1 << 20));
        assert_eq!(parse_size("2G"), Ok(2 << 30));
        assert!(parse_size("").is_err());
        assert!(parse_size("4x").is_err());
        assert!(parse_size("99999999T").is_err());
        assert_eq!(show_size(4096), "4k");
        assert_eq!(show_size(1536), "1536");
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("5"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_time("20us"), Ok(Duration::from_micros(20)));
        assert_eq!(parse_time("2m"), Ok(Duration::from_secs(120)));
        assert!(parse_time("soon").is_err());
        assert!(parse_time("-1s").is_err());
    }

    #[test]
    fn cpus() {
        assert_eq!(parse_cpus("0,2-3"), Ok(vec![0, 2, 3]));
        assert!(parse_cpus("3-1").is_err());
        assert!(parse_cpus("a").is_err());
    }
}
