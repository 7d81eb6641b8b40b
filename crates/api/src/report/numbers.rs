//! Numbers as people read them.

/// Formats a number of bytes with a binary unit, as `1.5 MiB`.
pub fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be printed as 1024.0 of the smaller unit.
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}

/// Formats a rate, as `1.5 MiB/s`.
pub fn rate(bytes_per_s: u64) -> String {
    format!("{}/s", bytes(bytes_per_s))
}

/// Removes the fraction of a second from a time (RFC 3339, UTC), as `2026-01-31T23:59:59Z`.
pub fn to_the_second(moment: &str) -> String {
    moment.split_once('.').map_or_else(|| moment.to_owned(), |(second, _)| format!("{second}Z"))
}

/// Formats a duration in milliseconds, as `12.3 ms`.
pub fn milliseconds(us: u64) -> String {
    format!("{:.1} ms", us as f64 / 1e3)
}

/// Formats a duration in seconds, as `1.234 s`.
pub fn seconds(us: u64) -> String {
    format!("{:.3} s", us as f64 / 1e6)
}
