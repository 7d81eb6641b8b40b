//! Facts about this host, for the controller.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use host::preflight;
use proto::message::{CpuFacts, HostFacts, HostLoad};
use tracing::warn;

use crate::daemon::Daemon;

/// Returns the facts that rarely change.
pub(super) fn host_facts(daemon: &Arc<Daemon>) -> HostFacts {
    let context = &daemon.context;
    let config = &context.config;
    let (kernel, features) = preflight::kernel();
    let cordoned = context.journal.is_cordoned().unwrap_or_else(|error| {
        warn!(error = crate::chain(&error), "cannot read the cordon");
        // A host of which that is not known gets no VMs.
        true
    });
    HostFacts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        role: config.role.as_str().to_owned(),
        address: config.listen.to_string(),
        boot_id: context.boot_id.clone(),
        peers: config.peers().cloned().collect(),
        cordoned,
        cpu: cpu_facts(&read("/proc/cpuinfo")),
        memory_bytes: meminfo_bytes(&read("/proc/meminfo"), "MemTotal:").unwrap_or(0),
        numa_bytes: numa_bytes(Path::new("/sys/devices/system/node")),
        qemu_versions: context.emulators.versions(&config.qemu.binaries),
        kernel,
        kernel_lacks: features.into_iter().filter(|one| !one.present).map(|one| one.name).collect(),
        kvm: fs::File::options().read(true).write(true).open("/dev/kvm").is_ok(),
    }
}

/// Meter of this host's use.
#[derive(Debug, Default)]
pub(super) struct LoadMeter {
    /// Time of the processors at the last look, in clock ticks.
    last: Option<ProcessorTicks>,
}

/// Time of all processors since boot, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessorTicks {
    busy: u64,
    all: u64,
}

impl LoadMeter {
    /// Returns the use of this host since the last look; at first since boot.
    pub(super) fn measure(&mut self, pool_free_bytes: u64) -> HostLoad {
        let now = processor_ticks(&read("/proc/stat"));
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let busy_milli = now.map_or(0, |now| busy_milli(self.last, now, processors));
        self.last = now;
        let available_bytes = meminfo_bytes(&read("/proc/meminfo"), "MemAvailable:").unwrap_or(0);
        HostLoad { busy_milli, available_bytes, pool_free_bytes }
    }
}

/// Returns the processors that were in use between two looks, in thousandths of one.
fn busy_milli(last: Option<ProcessorTicks>, now: ProcessorTicks, processors: u64) -> u64 {
    let last = last.unwrap_or(ProcessorTicks { busy: 0, all: 0 });
    let all = now.all.saturating_sub(last.all);
    let busy = now.busy.saturating_sub(last.busy);
    (busy * processors * 1000).checked_div(all).unwrap_or(0)
}

/// Parses the first line of /proc/stat. Time of guests is part of user time there.
fn processor_ticks(stat: &str) -> Option<ProcessorTicks> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> =
        fields.split_ascii_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = ticks.get(3)? + ticks.get(4)?;
    let all: u64 = ticks.iter().sum();
    Some(ProcessorTicks { busy: all.saturating_sub(idle), all })
}

/// Returns a value of /proc/meminfo or of a NUMA node's, in bytes.
fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.split_once(key).map(|(_, value)| value))?;
    let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// Returns the memory of each NUMA node; none if there is only one.
fn numa_bytes(nodes: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(nodes) else { return Vec::new() };
    let number = |name: &str| name.strip_prefix("node")?.parse::<u32>().ok();
    let mut found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path())))
        .collect();
    found.sort_unstable();
    if found.len() < 2 {
        return Vec::new();
    }
    let memory = |path: &Path| meminfo_bytes(&read(path.join("meminfo")), "MemTotal:").unwrap_or(0);
    found.iter().map(|(_, path)| memory(path)).collect()
}

/// Parses /proc/cpuinfo.
fn cpu_facts(text: &str) -> CpuFacts {
    let value = |key: &str| {
        let line = text.lines().find(|line| line.split(':').next().is_some_and(|found| found.trim() == key));
        line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
    };
    CpuFacts {
        processors: text.lines().filter(|line| line.starts_with("processor")).count() as u32,
        vendor: value("vendor_id").to_owned(),
        model: value("model name").to_owned(),
        features: value("flags").split_ascii_whitespace().map(str::to_owned).collect(),
    }
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_found_in_the_kernels_texts() {
        let cpuinfo = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 106\nmodel name\t: Xeon(R) Gold\n\
                       flags\t\t: fpu aes avx2\n\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n";
        let cpu = cpu_facts(cpuinfo);
        assert_eq!((cpu.processors, &*cpu.vendor, &*cpu.model), (2, "GenuineIntel", "Xeon(R) Gold"));
        assert_eq!(cpu.features, ["fpu", "aes", "avx2"]);
        let meminfo = "MemTotal:       8000 kB\nMemFree:        100 kB\nMemAvailable:   4000 kB\n";
        assert_eq!(meminfo_bytes(meminfo, "MemAvailable:"), Some(4000 << 10));
        assert_eq!(meminfo_bytes("Node 1 MemTotal:       16 kB\n", "MemTotal:"), Some(16 << 10));
        assert_eq!(meminfo_bytes("", "MemTotal:"), None);
        assert!(cpu_facts(&read("/proc/cpuinfo")).processors > 0);
    }

    #[test]
    fn load_is_that_since_the_last_look() {
        let first = processor_ticks("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1\n").unwrap();
        assert_eq!(first, ProcessorTicks { busy: 200, all: 1000 });
        assert_eq!(busy_milli(None, first, 4), 800);
        let later = ProcessorTicks { busy: 300, all: 1200 };
        assert_eq!(busy_milli(Some(first), later, 4), 2000, "half of four processors");
        assert_eq!(busy_milli(Some(later), later, 4), 0);
        assert_eq!(processor_ticks("intr 5"), None);
    }

    #[test]
    fn nodes_are_in_the_order_of_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        for (node, kib) in [(10, 3), (2, 2)] {
            let node = folder.path().join(format!("node{node}"));
            fs::create_dir(&node).unwrap();
            fs::write(node.join("meminfo"), format!("Node 0 MemTotal: {kib} kB\n")).unwrap();
            if kib == 3 {
                assert!(numa_bytes(folder.path()).is_empty(), "one node is no NUMA");
            }
        }
        assert_eq!(numa_bytes(folder.path()), [2 << 10, 3 << 10]);
    }
}
