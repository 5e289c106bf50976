//! Units of sizes and rates.

/// Returns the power of two that a unit stands for. Units are powers of 1024: K, KB and KiB are the
/// same, in capital letters or not. No unit and B are 0. None: there is no such unit.
pub fn power_of(unit: &str) -> Option<u32> {
    match unit.to_ascii_uppercase().as_str() {
        "" | "B" => Some(0),
        "K" | "KB" | "KIB" => Some(10),
        "M" | "MB" | "MIB" => Some(20),
        "G" | "GB" | "GIB" => Some(30),
        "T" | "TB" | "TIB" => Some(40),
        "P" | "PB" | "PIB" => Some(50),
        "E" | "EB" | "EIB" => Some(60),
        _ => None,
    }
}
