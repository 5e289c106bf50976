//! Numbers in the format of qemu-img.

/// Formats bytes with three digits, in the largest unit in which the number is below 1000: `196
/// KiB`, `1.5 GiB`.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    // The next unit starts at 1000, not at 1024.
    while unit + 1 < UNITS.len() && (bytes >> (10 * unit)) >= 1000 {
        unit += 1;
    }
    let value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    let whole = if value < 1.0 { 0 } else { value.log10() as usize };
    let digits = if value > 0.0 && value < 1.0 { 3 } else { 2usize.saturating_sub(whole) };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", UNITS[unit])
}

/// Formats nanoseconds as hours, minutes and seconds: `0000:01:02.003`.
pub(super) fn clock(ns: u64) -> String {
    let s = ns / 1_000_000_000;
    format!("{:04}:{:02}:{:02}.{:03}", s / 3600, s / 60 % 60, s % 60, ns / 1_000_000 % 1000)
}

/// Formats seconds since 1970 in local time: `2026-11-21 19:50:12`.
pub(super) fn date(seconds: u32) -> String {
    let time = libc::time_t::from(seconds);
    // SAFETY: struct tm consists of numbers and a pointer, for which zero is valid.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: localtime_r reads `time` and fills `tm`. Both are local and outlive the call.
    let known = !unsafe { libc::localtime_r(&time, &mut tm) }.is_null();
    if !known {
        return seconds.to_string();
    }
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        tm.tm_year + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times() {
        for (bytes, want) in [
            (0, "0 B"),
            (512, "512 B"),
            (1000, "0.977 KiB"),
            (200704, "196 KiB"),
            (328192, "320 KiB"),
            (1 << 30, "1 GiB"),
            (3 << 29, "1.5 GiB"),
            (10485760, "10 MiB"),
            (1u64 << 40, "1 TiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(size(bytes), want);
        }
        assert_eq!(clock(3_723_004_000_000), "0001:02:03.004");
        assert_eq!(date(0).len(), "1970-01-01 00:00:00".len());
    }
}
