//! Section of compression.

use serde::{Deserialize, Serialize};

use crate::report::Report;
use crate::report::numbers::{bytes, seconds};

/// Statistics of compression. Data is the content of pages without zero pages, holes and page references.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Compression {
    /// The requested compression (`auto`, `lz4`, `zstd:3`).
    pub wanted: String,
    /// All data, in bytes.
    pub data_bytes: u64,
    /// The part of the data that was sent compressed, in bytes before compression; compressing the rest was not
    /// worthwhile.
    pub compressed_bytes: u64,
    /// Bytes that were sent for all of the data.
    pub wire_bytes: u64,
    /// CPU time of compression, and of trying levels, in microseconds.
    pub compression_cpu_us: u64,
    /// The part of the data that was sent before `auto` could choose a level, in bytes; it was compressed as the link
    /// required.
    pub opening_bytes: u64,
    /// The first hundred choices of `auto`, with their times.
    pub ways: Vec<LevelChoice>,
}

/// A compression level that `auto` chose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LevelChoice {
    /// Time since the request for the migration, in microseconds.
    pub at_us: u64,
    /// Name of the level (`none`, `lz4`, `zstd:3`).
    pub way: String,
    /// Estimated rate of the link, in bytes per second.
    pub link_bytes_per_s: u64,
}

/// Returns the line of the report's text.
pub(super) fn summary(report: &Report) -> Option<String> {
    report.compression.as_ref().map(|compression| format!("compressed  {}", compressed(compression)))
}

/// Returns the line of the explanation.
pub(super) fn explanation(report: &Report) -> Option<String> {
    let compression = report.compression.as_ref()?;
    let spared = compression.data_bytes.saturating_sub(compression.wire_bytes);
    let cpu = seconds(compression.compression_cpu_us);
    Some(format!("compression saved {} in {cpu} of CPU", bytes(spared)))
}

/// Formats the statistics of compression in a line.
fn compressed(compression: &Compression) -> String {
    let Compression {
        wanted,
        data_bytes,
        compressed_bytes,
        wire_bytes,
        compression_cpu_us,
        opening_bytes,
        ways,
    } = compression;
    if *compressed_bytes == 0 {
        return format!("nothing of {} ({wanted})", bytes(*data_bytes));
    }
    let plain = data_bytes.saturating_sub(*compressed_bytes);
    let opening = (*opening_bytes > 0).then(|| format!("as the link took it for {}", bytes(*opening_bytes)));
    let ways = ways.iter().map(|LevelChoice { at_us, way, .. }| format!("{way} from {} on", seconds(*at_us)));
    let picked: Vec<_> = opening.into_iter().chain(ways).collect();
    let picked = if picked.is_empty() { String::new() } else { format!(": {}", picked.join(", ")) };
    format!(
        "{} of {} to {} in {} of CPU ({wanted}{picked})",
        bytes(*compressed_bytes),
        bytes(*data_bytes),
        bytes(wire_bytes.saturating_sub(plain)),
        seconds(*compression_cpu_us)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_compression_did_is_one_line() {
        let mut compression = Compression {
            wanted: "auto".into(),
            data_bytes: 700 << 20,
            wire_bytes: 700 << 20,
            ..Compression::default()
        };
        assert_eq!(compressed(&compression), "nothing of 700.0 MiB (auto)");
        let picked = |at_us, way: &str| LevelChoice { at_us, way: way.into(), link_bytes_per_s: 1 };
        compression.ways = vec![picked(210_000, "lz4"), picked(1_000_000, "zstd:3")];
        (compression.compressed_bytes, compression.wire_bytes) = (500 << 20, 330 << 20);
        compression.compression_cpu_us = 1_500_000;
        compression.opening_bytes = 6 << 20;
        assert_eq!(
            compressed(&compression),
            "500.0 MiB of 700.0 MiB to 130.0 MiB in 1.500 s of CPU (auto: as the link took it for 6.0 MiB, lz4 from 0.210 s on, zstd:3 from 1.000 s on)"
        );
    }
}
