//! Facts of a host, gathered from `/proc` and `/sys`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::ram::{RamBlock, RamKind};

/// Memory features of this kernel that may apply to one kind of memory and not to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryFeatures {
    /// True if anonymous memory gets transparent huge pages where QEMU advises it, as it does for guest
    /// memory.
    pub huge_pages_anonymous: bool,
    /// True if shared memory gets them as well.
    pub huge_pages_shared: bool,
    /// True if equal pages of anonymous memory are merged.
    pub ksm: bool,
}

impl MemoryFeatures {
    /// Reads the features of this host. A feature that cannot be read counts as absent.
    pub fn gather() -> Self {
        Self::read(Path::new("/sys/kernel/mm"))
    }

    fn read(mm: &Path) -> Self {
        let read = |name: &str| std::fs::read_to_string(mm.join(name)).unwrap_or_default();
        // Since Linux 6.8 each size has a setting of its own, which may refer to the common one.
        let chosen = |name: &str| {
            let common = selected_word(&read(&format!("transparent_hugepage/{name}")));
            let bytes: u64 = read("transparent_hugepage/hpage_pmd_size").trim().parse().unwrap_or(0);
            let own = format!("transparent_hugepage/hugepages-{}kB/{name}", bytes >> 10);
            match selected_word(&read(&own)) {
                own if own.is_empty() || own == "inherit" || common == "deny" || common == "force" => common,
                own => own,
            }
        };
        Self {
            huge_pages_anonymous: ["always", "madvise"].contains(&chosen("enabled").as_str()),
            huge_pages_shared: ["always", "within_size", "advise", "force"]
                .contains(&chosen("shmem_enabled").as_str()),
            ksm: read("ksm/run").trim() == "1",
        }
    }
}

/// Returns the word in brackets among several.
fn selected_word(words: &str) -> String {
    let inside = words.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(String::new(), |(word, _)| word.to_owned())
}

/// Facts of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Release of the kernel, e.g. `6.18.0`.
    pub kernel: String,
    /// Processor's vendor, model and stepping in one line.
    pub cpu: String,
    /// Flags of the processor.
    pub cpu_flags: BTreeSet<String>,
    /// True if `/dev/kvm` can be opened. That alone does not prove that guests run on it.
    pub kvm: bool,
    /// Memory that is available without swapping, in bytes.
    pub memory_available_bytes: u64,
    /// Free huge pages: page size to free bytes.
    pub hugepages_free_bytes: BTreeMap<u64, u64>,
}

impl HostFacts {
    /// Gathers the facts of this host. A value that cannot be read is empty or zero.
    pub fn gather() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.split(':').next().map(str::trim) == Some(name));
            line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
        };
        let names = ["vendor_id", "model name", "cpu family", "model", "stepping"];
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu: names.map(field).join(" "),
            cpu_flags: field("flags").split_whitespace().map(str::to_owned).collect(),
            kvm: std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok(),
            memory_available_bytes: available(&read("/proc/meminfo")),
            hugepages_free_bytes: hugepages(),
        }
    }
}

fn available(meminfo: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn hugepages() -> BTreeMap<u64, u64> {
    let mut found = BTreeMap::new();
    let count = |path: std::path::PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    for entry in std::fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let kib =
            name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB")?.parse::<u64>().ok());
        // Pages that a mapping has reserved but not touched yet are counted as free, but are not
        // available.
        let reserved = count(entry.path().join("resv_hugepages")).unwrap_or(0);
        if let (Some(kib), Some(free)) = (kib, count(entry.path().join("free_hugepages"))) {
            let free = free.saturating_sub(reserved);
            found.insert(kib * 1024, free.saturating_mul(kib * 1024));
        }
    }
    found
}

/// Other processes that map the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mappers {
    /// Processes other than QEMU that map it, as human-readable text.
    pub found: Vec<String>,
    /// Processes that could not be inspected. If there are any, `found` may be incomplete.
    pub unreadable: Vec<String>,
}

/// Returns processes other than `pid` that map a file of the guest's memory. Their writes go
/// through their own page tables, so QEMU's dirty marks do not record them.
pub fn other_mappers(pid: u32, blocks: &[RamBlock]) -> Mappers {
    let files: BTreeSet<((u32, u32), u64)> = blocks
        .iter()
        .filter_map(|block| match &block.kind {
            RamKind::SharedFile(file) => Some((file.device, file.inode)),
            RamKind::Anonymous | RamKind::PrivateFile(_) => None,
        })
        .collect();
    let mut mappers = Mappers::default();
    if files.is_empty() {
        return mappers;
    }
    let ours = [pid, std::process::id()];
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for other in pids.filter(|other| !ours.contains(other)) {
        match crate::maps::Maps::of(other) {
            Ok(maps) if maps.iter().any(|one| files.contains(&(one.device, one.inode))) => {
                mappers.found.push(process_label(other));
            }
            Ok(_) => {}
            // The process has ended in the meantime.
            Err(_) if !Path::new(&format!("/proc/{other}")).exists() => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
            Err(_) => mappers.unreadable.push(process_label(other)),
        }
    }
    mappers
}

/// Returns the name and number of a process as human-readable text.
pub fn process_label(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{} (process {pid})", name.trim())
}

/// Returns the process that debugs `pid`, 0 for none.
pub fn tracer_pid(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:")?.trim().parse().ok());
    tracer.unwrap_or(0)
}

/// User and groups of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub user: u32,
    /// Primary group id.
    pub group: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
}

/// Returns the effective user and groups of a process.
pub fn account(pid: u32) -> Option<Account> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = |name: &str| -> Option<Vec<u32>> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().map(|number| number.parse().ok()).collect()
    };
    // The fields are real, effective, saved, and file system id.
    let effective = |name| numbers(name)?.get(1).copied();
    Some(Account { user: effective("Uid:")?, group: effective("Gid:")?, groups: numbers("Groups:")? })
}

/// Returns the effective user id of a process.
pub fn user(pid: u32) -> Option<u32> {
    Some(account(pid)?.user)
}

/// Returns the OOM score adjustment of a process.
pub fn oom_score_adj(pid: u32) -> i32 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Returns true if KVM has run nested guests of this guest: `nested_run` of its processors in
/// debugfs; `None` if that cannot be read.
pub fn nested_guests(pid: u32) -> Option<bool> {
    let start = format!("{pid}-");
    let mut seen = None;
    for vm in std::fs::read_dir("/sys/kernel/debug/kvm").ok()?.flatten() {
        if !vm.file_name().to_string_lossy().starts_with(&start) {
            continue;
        }
        for vcpu in std::fs::read_dir(vm.path()).ok()?.flatten() {
            if let Ok(text) = std::fs::read_to_string(vcpu.path().join("nested_run")) {
                let runs: u64 = text.trim().parse().unwrap_or(0);
                seen = Some(seen.unwrap_or(false) || runs > 0);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_facts() {
        let facts = HostFacts::gather();
        assert!(!facts.kernel.is_empty() && facts.memory_available_bytes > 0);
        assert!(!facts.cpu_flags.is_empty());
        assert_eq!(tracer_pid(std::process::id()), 0);
        let account = account(std::process::id()).unwrap();
        assert_eq!(account.user, rustix::process::geteuid().as_raw());
        assert_eq!(account.group, rustix::process::getegid().as_raw());
    }

    #[test]
    fn memory_features_of_the_kernel_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let read = || {
            let MemoryFeatures { huge_pages_anonymous, huge_pages_shared, ksm } =
                MemoryFeatures::read(folder.path());
            (huge_pages_anonymous, huge_pages_shared, ksm)
        };
        assert_eq!(read(), (false, false, false));
        write("transparent_hugepage/enabled", "always [madvise] never\n");
        write("transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n");
        write("ksm/run", "1\n");
        assert_eq!(read(), (true, false, true));
        write("transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n");
        write("ksm/run", "2\n");
        assert_eq!(read(), (true, true, false));
        write("transparent_hugepage/hpage_pmd_size", "2097152\n");
        write("transparent_hugepage/hugepages-2048kB/enabled", "always [inherit] madvise never\n");
        write(
            "transparent_hugepage/hugepages-2048kB/shmem_enabled",
            "always inherit within_size advise [never]\n",
        );
        assert_eq!(read(), (true, false, false));
        write("transparent_hugepage/shmem_enabled", "always within_size advise never deny [force]\n");
        assert_eq!(read(), (true, true, false));
        write("transparent_hugepage/enabled", "[always] madvise never\n");
        write("transparent_hugepage/hugepages-2048kB/enabled", "always inherit madvise [never]\n");
        assert_eq!(read(), (false, true, false));
    }
}
