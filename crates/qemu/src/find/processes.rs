//! Processes of this host, and their programs.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Returns the processes that run a virtual machine by KVM and are no QEMUs by their names. All descriptors of all
/// processes are read for that.
pub fn other_kvm_processes() -> Vec<u32> {
    let runs_kvm = |pid: u32| {
        let links = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        links
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|link| link == Path::new("anon_inode:kvm-vm"))
    };
    // A QEMU that is just ending has lost its name: it is not counted.
    let is_other = |pid: u32| matches!(try_program(pid), Ok(Some(program)) if !is_qemu_program(&program));
    all_processes().unwrap_or_default().into_iter().filter(|pid| is_other(*pid) && runs_kvm(*pid)).collect()
}

/// Returns all process ids, sorted.
pub(super) fn all_processes() -> io::Result<Vec<u32>> {
    let entries = std::fs::read_dir("/proc")?;
    let mut pids: Vec<u32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    Ok(pids)
}

/// Returns the path of a process's program; none for a thread of the kernel, and for a process that has ended.
pub(super) fn try_program(pid: u32) -> io::Result<Option<PathBuf>> {
    let binary = there(std::fs::read_link(format!("/proc/{pid}/exe")))?;
    Ok(binary.map(|binary| {
        // The program's file was upgraded in the meantime.
        let text = binary.to_string_lossy();
        PathBuf::from(text.strip_suffix(" (deleted)").unwrap_or(&text))
    }))
}

/// Returns true if a program is a QEMU by its name. Some distributions hide the program behind a script.
pub(super) fn is_qemu_program(binary: &Path) -> bool {
    let program = binary.file_name().unwrap_or_default().to_string_lossy();
    program.trim_start_matches('.').starts_with("qemu-system-") || program == "qemu-kvm" || program == "kvm"
}

/// Returns none for what a process does not have, and for all of a process that has ended.
pub(super) fn there<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::SRCH) => Ok(None),
            _ => Err(error),
        },
    }
}
