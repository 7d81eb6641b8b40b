//! Metrics in the text format of Prometheus.

use std::fmt::{Display, Write as _};

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Value that rises and falls.
    Gauge,
    /// Value that only rises, until the daemon is restarted.
    Counter,
}

/// Text that grows metric by metric.
#[derive(Debug, Default)]
pub struct MetricsText {
    text: String,
    /// Name of the metric whose samples follow.
    name: &'static str,
}

impl MetricsText {
    /// Begins a metric. Its name has the unit at its end, and `_total` if it only rises.
    pub fn metric(&mut self, name: &'static str, kind: MetricKind, help: &str) -> &mut Self {
        let kind = match kind {
            MetricKind::Gauge => "gauge",
            MetricKind::Counter => "counter",
        };
        self.name = name;
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
        self
    }

    /// Adds a sample to the metric that was begun last.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        let labels: Vec<_> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let name = self.name;
        self.line(format_args!("{name}{labels} {value}"));
        self
    }

    /// Adds what any daemon has: its version, its CPU time and its memory.
    pub fn process(&mut self, info: &'static str, labels: &[(&str, &str)]) {
        self.metric(info, MetricKind::Gauge, "Always 1; the labels describe the daemon.").sample(labels, 1);
        let cpu_s = cpu_seconds(&std::fs::read_to_string("/proc/self/stat").unwrap_or_default());
        self.metric("process_cpu_seconds_total", MetricKind::Counter, "CPU time of the daemon.")
            .sample(&[], format_args!("{cpu_s:.2}"));
        let bytes = resident_bytes(&std::fs::read_to_string("/proc/self/statm").unwrap_or_default());
        self.metric("process_resident_memory_bytes", MetricKind::Gauge, "Memory of the daemon.")
            .sample(&[], bytes);
    }

    /// Returns the whole text.
    pub fn finish(self) -> String {
        self.text
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{line}");
    }
}

/// Returns a label's value as the format wants it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Returns the CPU time of /proc/PID/stat, in seconds.
fn cpu_seconds(stat: &str) -> f64 {
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks: u64 =
        fields.split_ascii_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    // A hundredth of a second on all architectures.
    ticks as f64 / 100.0
}

/// Returns the resident memory of /proc/PID/statm, in bytes.
fn resident_bytes(statm: &str) -> u64 {
    let pages: u64 = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4096
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_that_of_prometheus() {
        let mut text = MetricsText::default();
        text.metric("x_vms", MetricKind::Gauge, "VMs.")
            .sample(&[("host", "a"), ("state", "a \"b\"\n\\")], 3)
            .sample(&[], 0.5);
        assert_eq!(
            text.finish(),
            "# HELP x_vms VMs.\n# TYPE x_vms gauge\nx_vms{host=\"a\",state=\"a \\\"b\\\"\\n\\\\\"} 3\nx_vms 0.5\n"
        );
        assert_eq!(resident_bytes("100 7 3 1 0 50 0"), 7 * 4096);
        assert!((cpu_seconds("1 (a b) S 1 1 1 0 -1 0 0 0 0 0 150 50 0") - 2.0).abs() < 1e-9);
    }
}
