//! Makes the kernel reclaim its page cache.

use std::fs;
use std::io;
use std::path::Path;

use crate::pages::{KernelMemory, PageUse};
use crate::protocol::Cache;

const PAGE_BYTES: u64 = 4096;

/// Makes the kernel reclaim the page cache, or its cold part. Mapped pages and pages not yet written to their disk
/// stay, and so do pages that the kernel does not reclaim. `root` is `/` except in tests.
///
/// # Errors
/// Fails if the kernel has no interface for this, or refuses.
pub fn give_back(root: &Path, kernel: &KernelMemory, cache: Cache) -> io::Result<()> {
    match cache {
        Cache::None => Ok(()),
        Cache::All => write(root, "proc/sys/vm/drop_caches", "1"),
        Cache::Cold => reclaim(root, cold_bytes(kernel)?),
    }
}

fn cold_bytes(kernel: &KernelMemory) -> io::Result<u64> {
    let mut pages = 0;
    kernel.scan(|run, used| {
        if used == (PageUse::Cache { cold: true }) {
            pages += run.end - run.start;
        }
        Ok(())
    })?;
    Ok(pages * PAGE_BYTES)
}

/// Makes the kernel reclaim `bytes` as if memory were short: cold pages first. Nothing may be swapped out for that.
fn reclaim(root: &Path, bytes: u64) -> io::Result<()> {
    const RECLAIM: &str = "sys/fs/cgroup/memory.reclaim";
    if bytes == 0 {
        return Ok(());
    }
    if !root.join(RECLAIM).exists() {
        let error = "there is no memory.reclaim: freeing cold page cache requires Linux 5.19 and cgroup 2";
        return Err(io::Error::new(io::ErrorKind::Unsupported, error));
    }
    // Newer kernels accept an option to leave programs' memory alone; with others there must be no swap space.
    match write(root, RECLAIM, &format!("{bytes} swappiness=0")) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            if swaps(&fs::read_to_string(root.join("proc/swaps")).unwrap_or_default()) {
                let error = "memory.reclaim of this kernel would swap out programs' memory";
                return Err(io::Error::new(io::ErrorKind::Unsupported, error));
            }
            accept_less(write(root, RECLAIM, &bytes.to_string()))
        }
        other => accept_less(other),
    }
}

/// Accepts a smaller amount than requested as success: the kernel returns `EAGAIN` then.
fn accept_less(reclaimed: io::Result<()>) -> io::Result<()> {
    match reclaimed {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        other => other,
    }
}

/// Returns true if there is any swap space: a line after the headings.
fn swaps(swaps: &str) -> bool {
    swaps.lines().count() > 1
}

fn write(root: &Path, name: &str, text: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(root.join(name)).and_then(|mut file| {
        use std::io::Write as _;
        // In one piece: each write is a command of its own.
        file.write_all(text.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        for directory in ["proc/sys/vm", "sys/fs/cgroup"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        let put = |name: &str, text: &[u8]| fs::write(root.path().join(name), text).unwrap();
        let read = |name: &str| fs::read_to_string(root.path().join(name)).unwrap();
        put("proc/iomem", b"00000000-00003fff : System RAM\n");
        put("proc/cmdline", b"quiet\n");
        let cold: u64 = 1 << 5 | 1 << 3;
        let flags: Vec<u8> =
            [0, cold, cold, cold | 1 << 6].iter().flat_map(|flags: &u64| flags.to_le_bytes()).collect();
        put("proc/kpageflags", &flags);
        let kernel = KernelMemory::open(root.path()).unwrap();
        let give = |cache| give_back(root.path(), &kernel, cache);
        give(Cache::None).unwrap();
        assert_eq!(give(Cache::All).unwrap_err().kind(), io::ErrorKind::NotFound);
        put("proc/sys/vm/drop_caches", b"");
        give(Cache::All).unwrap();
        assert_eq!(read("proc/sys/vm/drop_caches"), "1");
        assert!(give(Cache::Cold).unwrap_err().to_string().contains("5.19"));
        put("sys/fs/cgroup/memory.reclaim", b"");
        give(Cache::Cold).unwrap();
        assert_eq!(read("sys/fs/cgroup/memory.reclaim"), "8192 swappiness=0");
        assert!(swaps("Filename Type\n/dev/vdb partition\n") && !swaps("Filename Type\n") && !swaps(""));
        assert!(accept_less(Err(io::ErrorKind::WouldBlock.into())).is_ok());
        assert!(accept_less(Err(io::ErrorKind::PermissionDenied.into())).is_err());
    }
}
