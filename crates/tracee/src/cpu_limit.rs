//! A limit on the processor time of some threads of another process.
//!
//! The kernel keeps it, by control groups: the threads go into a group of their own, below the one in which they are, so
//! that whatever limits they have already hold as before. Control groups of either version, with threads in different
//! groups too: each of these gets a group below it, and its part of the limit.
//!
//! A limited thread runs for a while and waits for a while. Both together take [`PERIOD`], or twice that where the kernel
//! looks too late and the thread has to make up for it, so nobody stands still for long.
//!
//! The threads go back where they were when the limit is dropped. When this process dies they stay where they are, held
//! to the last limit, until another one calls [`CpuLimit::end_left`].

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Process, ProcessError};

/// How often the kernel gives a limited thread new time.
pub const PERIOD: Duration = Duration::from_millis(20);

/// The kernel gives no less in a period.
const LEAST_QUOTA_US: u64 = 1_000;

/// Groups of this crate's have this before the number of the process.
const NAME: &str = "whimbrel-cpu-";

/// Why threads cannot be limited.
#[derive(Debug, thiserror::Error)]
pub enum CpuLimitError {
    /// The process could not be looked at.
    #[error("cannot find out in which control groups the threads are")]
    Process(#[from] ProcessError),
    /// No control group limits processors here.
    #[error(
        "no control group of this host limits processors (controller `cpu`), or its file system is not mounted"
    )]
    Unsupported,
    /// A thread is in a group that is not seen from here: in another namespace of control groups.
    #[error("the control group {group} of thread {thread} is not seen from here")]
    Hidden {
        /// The thread.
        thread: u32,
        /// Its group, by the kernel's word.
        group: String,
    },
    /// The kernel does not do what it was told.
    #[error("cannot {action} {path}", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
}

/// The two kinds of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// The file that lists a group's threads.
    fn threads(self) -> &'static str {
        match self {
            Self::One => "tasks",
            Self::Two => "cgroup.threads",
        }
    }
}

/// Threads of another process that are held to a limit.
#[derive(Debug)]
pub struct CpuLimit {
    groups: Vec<Group>,
    /// How many threads there are in all of them.
    threads: u64,
}

/// A group that was made here.
#[derive(Debug)]
struct Group {
    version: Version,
    path: PathBuf,
    threads: u64,
}

impl CpuLimit {
    /// Puts threads of a process into groups of their own. They are not limited yet.
    ///
    /// # Errors
    /// The threads are where they were then.
    pub fn begin(process: &Process, threads: &[u32]) -> Result<Self, CpuLimitError> {
        let mounts = Mounts::of_this_process()?;
        let mut homes: BTreeMap<PathBuf, (Version, Vec<u32>)> = BTreeMap::new();
        for &thread in threads {
            let (version, group) = mounts.group_of(process, thread)?;
            homes.entry(group).or_insert_with(|| (version, Vec::new())).1.push(thread);
        }
        // Dropped after an error, it puts back who has been moved.
        let mut this = Self { groups: Vec::new(), threads: threads.len() as u64 };
        for (home, (version, threads)) in homes {
            let path = home.join(format!("{NAME}{}", process.pid()));
            make_directory(&path)?;
            this.groups.push(Group { version, path: path.clone(), threads: threads.len() as u64 });
            match version {
                Version::One => {
                    write(&path.join("cpu.cfs_period_us"), &PERIOD.as_micros().to_string())?;
                }
                Version::Two => {
                    // The group above may have threads itself only if these are all that those below have.
                    write(&path.join("cgroup.type"), "threaded")?;
                    write(&home.join("cgroup.subtree_control"), "+cpu")?;
                }
            }
            for thread in threads {
                write(&path.join(version.threads()), &thread.to_string())?;
            }
        }
        Ok(this)
    }

    /// Gives all threads together so much processor time, in microseconds per second; none for as much as they like.
    pub fn set(&self, us_per_s: Option<u64>) -> Result<(), CpuLimitError> {
        for group in &self.groups {
            let of = |all: u64| all.saturating_mul(group.threads) / self.threads.max(1);
            let quota_us = us_per_s.map(|all| {
                let period_us = PERIOD.as_micros() as u64;
                (of(all).saturating_mul(period_us) / 1_000_000).max(LEAST_QUOTA_US)
            });
            group.set(quota_us)?;
        }
        Ok(())
    }

    /// Ends what another one has left: puts the process's threads back where they were. Returns whether there were any.
    pub fn end_left(process: &Process) -> Result<bool, CpuLimitError> {
        let Ok(mounts) = Mounts::of_this_process() else { return Ok(false) };
        let name = format!("{NAME}{}", process.pid());
        let mut found = BTreeMap::new();
        for thread in process.threads()? {
            // One that ends meanwhile is in no group.
            if let Ok((version, path)) = mounts.group_of(process, thread)
                && path.file_name().is_some_and(|last| *last == *name)
            {
                found.insert(path, version);
            }
        }
        let left = !found.is_empty();
        for (path, version) in found {
            Group { version, path, threads: 0 }.end()?;
        }
        Ok(left)
    }
}

impl Drop for CpuLimit {
    /// What does not work here, [`CpuLimit::end_left`] tells.
    fn drop(&mut self) {
        for group in &self.groups {
            let _ = group.set(None);
            let _ = group.end();
        }
    }
}

impl Group {
    fn set(&self, quota_us: Option<u64>) -> Result<(), CpuLimitError> {
        let (file, limited, unlimited) = match self.version {
            Version::One => ("cpu.cfs_quota_us", quota_us.map(|us| us.to_string()), "-1"),
            Version::Two => ("cpu.max", quota_us.map(|us| format!("{us} {}", PERIOD.as_micros())), "max"),
        };
        let path = self.path.join(file);
        match write(&path, limited.as_deref().unwrap_or(unlimited)) {
            // A group of version one may not be given more than the one above it, which then holds it anyway.
            Err(CpuLimitError::Io { source, .. })
                if limited.is_some() && source.raw_os_error() == Some(nix::libc::EINVAL) =>
            {
                write(&path, unlimited)
            }
            done => done,
        }
    }

    /// Puts the threads back, and removes the group.
    fn end(&self) -> Result<(), CpuLimitError> {
        let Some(home) = self.path.parent() else { return Ok(()) };
        let list = self.path.join(self.version.threads());
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| CpuLimitError::Io { action, path, source }
        };
        // Threads that those in it have started are in it as well, maybe since it was read.
        loop {
            let threads = fs::read_to_string(&list).map_err(failed("read", &list))?;
            if threads.trim().is_empty() {
                break;
            }
            for thread in threads.lines() {
                match write(&home.join(self.version.threads()), thread) {
                    // It has ended.
                    Err(CpuLimitError::Io { source, .. })
                        if source.raw_os_error() == Some(nix::libc::ESRCH) => {}
                    done => done?,
                }
            }
        }
        fs::remove_dir(&self.path).map_err(failed("remove", &self.path))
    }
}

/// Where the file systems of control groups are.
struct Mounts {
    version: Version,
    /// The group that is seen at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl Mounts {
    fn of_this_process() -> Result<Self, CpuLimitError> {
        let path = PathBuf::from("/proc/self/mountinfo");
        match fs::read_to_string(&path) {
            Ok(text) => Self::among(&text).ok_or(CpuLimitError::Unsupported),
            Err(source) => Err(CpuLimitError::Io { action: "read", path, source }),
        }
    }

    /// The one that limits processors: that of version one, where there is one, for a controller is in one place only.
    fn among(mountinfo: &str) -> Option<Self> {
        let mounts = mountinfo.lines().filter_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mut place = place.split(' ').skip(3).map(unescaped);
            let (root, point) = (place.next()?, place.next()?);
            let mut kind = kind.split(' ');
            let (kind, options) = (kind.next()?, kind.nth(1)?);
            let version = match kind {
                "cgroup" if options.split(',').any(|option| option == "cpu") => Version::One,
                "cgroup2" => Version::Two,
                _ => return None,
            };
            Some(Self { version, root: root.into(), point: point.into() })
        });
        mounts.min_by_key(|mount| mount.version != Version::One)
    }

    /// The directory of the group in which a thread is.
    fn group_of(&self, process: &Process, thread: u32) -> Result<(Version, PathBuf), CpuLimitError> {
        let file = process.path(&format!("task/{thread}/cgroup"));
        let text = fs::read_to_string(&file).map_err(|source| CpuLimitError::Io {
            action: "read",
            path: file,
            source,
        })?;
        let group = group_among(&text, self.version).ok_or(CpuLimitError::Unsupported)?;
        let below = Path::new(group)
            .strip_prefix(&self.root)
            .ok()
            .filter(|below| !below.components().any(|part| part.as_os_str() == ".."));
        let below = below.ok_or_else(|| CpuLimitError::Hidden { thread, group: group.to_owned() })?;
        let path = if below.as_os_str().is_empty() { self.point.clone() } else { self.point.join(below) };
        Ok((self.version, path))
    }
}

/// The group that `/proc/PID/cgroup` names: `9:cpu,cpuacct:/a` of version one, `0::/a` of version two.
fn group_among(text: &str, version: Version) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let is_it = match version {
            Version::One => controllers.split(',').any(|controller| controller == "cpu"),
            Version::Two => controllers.is_empty(),
        };
        is_it.then_some(group)
    })
}

/// `mountinfo` has blanks and the like as three octal digits behind a backslash.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if let Some(byte) = part.get(..3).and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            plain.push(char::from(byte));
            plain.push_str(&part[3..]);
        } else {
            plain.push('\\');
            plain.push_str(part);
        }
    }
    plain
}

/// One that is there already was left by somebody.
fn make_directory(path: &Path) -> Result<(), CpuLimitError> {
    match fs::create_dir(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            Err(CpuLimitError::Io { action: "make", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), CpuLimitError> {
    // Not created: the kernel's files are there.
    let written = fs::OpenOptions::new().write(true).open(path).and_then(|mut file| {
        use io::Write as _;
        file.write_all(text.as_bytes())
    });
    written.map_err(|source| CpuLimitError::Io { action: "write to", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "24 1 0:21 / /proc rw - proc proc rw\n\
        30 24 0:26 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n\
        31 24 0:27 / /sys/fs/cgroup/cpu\\040and\\040acct rw - cgroup cgroup rw,cpu,cpuacct\n\
        32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_version_that_has_the_controller_is_found() {
        let one = Mounts::among(BOTH).unwrap();
        assert_eq!((one.version, one.point), (Version::One, "/sys/fs/cgroup/cpu and acct".into()));
        let two = Mounts::among("32 24 0:28 /a /sys/fs/cgroup rw - cgroup2 cgroup2 rw").unwrap();
        assert_eq!((two.version, two.root, two.point), (Version::Two, "/a".into(), "/sys/fs/cgroup".into()));
        assert!(Mounts::among("24 1 0:21 / /proc rw - proc proc rw\nnonsense").is_none());
    }

    #[test]
    fn a_thread_s_group_is_found() {
        let text = "9:name=systemd:/\n4:cpuset:/x\n3:cpu,cpuacct:/machine/a:b\n0::/y\n";
        assert_eq!(group_among(text, Version::One), Some("/machine/a:b"));
        assert_eq!(group_among(text, Version::Two), Some("/y"));
        assert_eq!(group_among("4:cpuset:/x\n", Version::One), None);
        assert_eq!(group_among("", Version::Two), None);
    }

    #[test]
    fn escapes_are_read() {
        assert_eq!(unescaped("a\\040b\\134"), "a b\\");
        assert_eq!(unescaped("\\9x\\"), "\\9x\\");
    }

    /// Groups of version two as files: what the kernel would be told.
    #[test]
    fn groups_of_version_two_are_told_what_they_have_to_be() {
        let directory = tempfile::tempdir().unwrap();
        let group = Group { version: Version::Two, path: directory.path().join("group"), threads: 1 };
        fs::create_dir(&group.path).unwrap();
        fs::write(group.path.join("cpu.max"), "").unwrap();
        let says = || fs::read_to_string(group.path.join("cpu.max")).unwrap();
        group.set(Some(5_000)).unwrap();
        assert_eq!(says(), "5000 20000");
        fs::write(group.path.join("cpu.max"), "").unwrap();
        group.set(None).unwrap();
        assert_eq!(says(), "max");
    }
}
