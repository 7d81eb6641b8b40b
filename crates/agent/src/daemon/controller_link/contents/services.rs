//! Services of this host on which others rely.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use engine::evacuation::HostServices;
use host::config::AgentRole;
use rustix::io::Errno;

use super::is_in_own_namespace;

/// Programs that serve names of VMs, by the names of their processes.
const DNS_SERVERS: [&str; 5] = ["named", "pdns_server", "knotd", "nsd", "coredns"];
/// Programs that serve storage to other hosts. The kernel keeps 15 characters of a name.
const STORAGE_SERVERS: [&str; 9] = [
    "ganesha.nfsd",
    "smbd",
    "nbd-server",
    "nbdkit",
    "qemu-nbd",
    "qemu-storage-da",
    "tgtd",
    "ceph-osd",
    "glusterfsd",
];
/// The process of a member of etcd.
const ETCD: &str = "etcd";

/// Returns the services of this host; adds parts that cannot be examined to `unknown`.
pub(super) fn services(
    role: AgentRole,
    namespaces_are_hosts: bool,
    unknown: &mut Vec<String>,
) -> HostServices {
    let processes = running_programs(namespaces_are_hosts).unwrap_or_else(|error| {
        unknown.push(format!("services: {error}"));
        BTreeSet::new()
    });
    let runs = |name: &str| processes.iter().any(|process| process.name == name);
    let mut storage_exports = storage_exports(Path::new("/"), unknown);
    storage_exports.extend(STORAGE_SERVERS.into_iter().filter(|name| runs(name)).map(str::to_owned));
    HostServices {
        witness: role == AgentRole::Witness,
        etcd_member: runs(ETCD),
        controller: processes.iter().any(|process| process.is_controller),
        dns: DNS_SERVERS.iter().any(|name| runs(name)),
        storage_exports: storage_exports.into_iter().collect(),
    }
}

/// Program that runs on this host.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RunningProgram {
    /// Name of the process, as the kernel shows it.
    name: String,
    /// True if it is a controller of this program.
    is_controller: bool,
}

fn running_programs(namespaces_are_hosts: bool) -> io::Result<BTreeSet<RunningProgram>> {
    let entries = fs::read_dir("/proc")?;
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let here = pids.filter(|pid| !namespaces_are_hosts || is_in_own_namespace(*pid));
    here.filter_map(|pid| program(pid).transpose()).collect()
}

/// Returns the program of a process; none if the process has ended, or is a part of this agent.
fn program(pid: u32) -> io::Result<Option<RunningProgram>> {
    let read = |what: &str| there(fs::read(format!("/proc/{pid}/{what}")));
    let Some(name) = read("comm")? else { return Ok(None) };
    let name = String::from_utf8_lossy(&name).trim_end().to_owned();
    // The agent itself reads and writes images by it.
    if name == "qemu-nbd" && parent(&read("stat")?.unwrap_or_default()) == Some(std::process::id()) {
        return Ok(None);
    }
    let line = if name == "whimbrel" { read("cmdline")?.unwrap_or_default() } else { Vec::new() };
    let is_controller = line.split(|byte| *byte == 0).any(|word| word == b"controller");
    Ok(Some(RunningProgram { name, is_controller }))
}

/// Returns the parent in /proc/PID/stat. The name before it may have any characters.
fn parent(stat: &[u8]) -> Option<u32> {
    let stat = String::from_utf8_lossy(stat);
    stat.rsplit_once(") ")?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Returns none for what is not there, or whose process has ended.
fn there<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::SRCH) => Ok(None),
            _ => Err(error),
        },
    }
}

/// Returns the storage that this kernel exports: directories by NFS, and targets of iSCSI and other fabrics. `root` is the
/// root of the file system.
fn storage_exports(root: &Path, unknown: &mut Vec<String>) -> BTreeSet<String> {
    let mut exports = BTreeSet::new();
    if let Err(error) = add_nfs(root, &mut exports) {
        unknown.push(format!("exports by NFS: {error}"));
    }
    if let Err(error) = add_targets(&root.join("sys/kernel/config/target"), &mut exports) {
        unknown.push(format!("exported block devices: {error}"));
    }
    exports
}

/// Adds exports by NFS. The kernel has a cache only, of what clients have lately asked for; the table of `exportfs` has
/// all.
fn add_nfs(root: &Path, exports: &mut BTreeSet<String>) -> io::Result<()> {
    let read = |path: &str| there(fs::read_to_string(root.join(path)));
    let threads = read("proc/fs/nfsd/threads")?.and_then(|text| text.trim().parse::<u64>().ok());
    let cache = read("proc/fs/nfsd/exports")?.unwrap_or_default();
    let table = read("var/lib/nfs/etab")?;
    if table.is_none() && threads.is_some_and(|threads| threads > 0) {
        return Err(io::Error::other("the server runs, and /var/lib/nfs/etab is missing"));
    }
    // The table stays behind when a server is stopped.
    let table = table.filter(|_| threads != Some(0)).unwrap_or_default();
    let lines = cache.lines().chain(table.lines()).filter(|line| !line.starts_with('#'));
    exports.extend(lines.filter_map(|line| line.split_ascii_whitespace().next()).map(str::to_owned));
    Ok(())
}

/// Adds the targets of the kernel.
fn add_targets(targets: &Path, exports: &mut BTreeSet<String>) -> io::Result<()> {
    for fabric in there(fs::read_dir(targets))?.into_iter().flatten() {
        let fabric = fabric?;
        // "core" has back ends, not targets.
        if fabric.file_name() == "core" || !fabric.path().is_dir() {
            continue;
        }
        for target in there(fs::read_dir(fabric.path()))?.into_iter().flatten() {
            let target = target?;
            if target.path().is_dir() && target.file_name() != "discovery_auth" {
                exports.insert(target.file_name().to_string_lossy().into_owned());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::symlink;
    use std::process::{Command, Stdio};

    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn exports(root: &Path) -> (Vec<String>, Vec<String>) {
        let mut unknown = Vec::new();
        let exports = storage_exports(root, &mut unknown);
        (exports.into_iter().collect(), unknown)
    }

    #[test]
    fn exported_storage_is_named_once() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(exports(root), (vec![], vec![]), "a kernel without servers");
        let cache = "# Version 1.1\n# Path Client(Flags)\n/srv/vms\t10.0.0.1(rw)\n/srv/vms\t10.0.0.2(rw)\n";
        write(root, "proc/fs/nfsd/exports", cache);
        for name in ["core/iblock_0", "iscsi/iqn.2026.example:vms", "iscsi/discovery_auth"] {
            fs::create_dir_all(root.join("sys/kernel/config/target").join(name)).unwrap();
        }
        let expected = vec!["/srv/vms".to_owned(), "iqn.2026.example:vms".to_owned()];
        assert_eq!(exports(root), (expected, vec![]));
    }

    #[test]
    fn an_idle_nfs_server_exports_what_its_table_has() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "proc/fs/nfsd/threads", "8\n");
        write(root, "proc/fs/nfsd/exports", "# Version 1.1\n");
        assert_eq!(exports(root).1.len(), 1, "nothing shows what it exports");
        write(root, "var/lib/nfs/etab", "/srv/vms\t*(rw,sync)\n");
        assert_eq!(exports(root), (vec!["/srv/vms".to_owned()], vec![]));
        write(root, "proc/fs/nfsd/threads", "0\n");
        assert_eq!(exports(root), (vec![], vec![]), "it was stopped");
    }

    #[test]
    fn what_cannot_be_read_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("var/lib/nfs/etab")).unwrap();
        write(root, "sys/kernel/config/target", "no directory");
        let (found, unknown) = exports(root);
        assert_eq!((found.len(), unknown.len()), (0, 2), "{unknown:?}");
    }

    #[test]
    fn a_controller_is_known_by_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("whimbrel");
        symlink("/bin/sh", &path).unwrap();
        for word in ["controller", "agent"] {
            let mut command = Command::new(&path);
            command.args(["-c", "echo; read line", word]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            // The kernel names it, and then gives it its words, while it begins: it runs once it has written.
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let found = program(child.id()).unwrap().unwrap();
            assert_eq!((&*found.name, found.is_controller), ("whimbrel", word == "controller"));
            let stat = fs::read(format!("/proc/{}/stat", child.id())).unwrap();
            assert_eq!(parent(&stat), Some(std::process::id()));
            // The end of its input ends it.
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert!(running_programs(true).is_ok_and(|programs| !programs.is_empty()));
        assert!(program(u32::MAX).unwrap().is_none(), "there is no such process");
    }
}
