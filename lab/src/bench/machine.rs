use std::fs;

/// Describes this machine in a few words.
pub(super) fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let after = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let model = after(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".to_owned());
    let memory = after(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
    let gib = memory.trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0) / f64::from(1 << 20);
    let release = read("/proc/sys/kernel/osrelease");
    format!("{cpus} processors ({model}), {gib:.0} GiB, Linux {}", release.trim())
}
