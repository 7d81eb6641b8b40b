//! Limit on the processor time of some threads of another process.
//!
//! The kernel enforces it with control groups: each thread is moved to a group of its own, below its current one, so
//! that existing limits still apply. This works with control groups of either version, even with threads in different
//! groups. One group for several threads would make some of them wait for many periods, because the kernel grants time
//! in the order of requests.
//!
//! A limited thread alternates between running and waiting. Both together last one [`PERIOD`]. The kernel checks at its
//! timer ticks whether a thread has used its time up, so a thread may run too long, which it has to make up for: within
//! one more period if each period grants as much as the kernel can be late, 4 ms with 250 ticks a second. Then no
//! thread stands still for long.
//!
//! The threads return to their original groups when the limit is dropped. If this process dies they keep the last limit
//! until another process calls [`CpuLimit::end_leftover`], which several may do at once.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Process, ProcessError};

/// Interval at which the kernel grants a limited thread new time.
pub const PERIOD: Duration = Duration::from_millis(24);

/// Minimum time in a period that the kernel accepts, in microseconds.
const MIN_QUOTA_US: u64 = 1_000;

/// Prefix of the names of this crate's groups; the numbers of the process and of the thread follow.
const GROUP_PREFIX: &str = "whimbrel-cpu-";
/// Suffix of the names if the controller was enabled in the group above, and has to be disabled there.
const ENABLED_SUFFIX: &str = "-on";

/// Maximum number of passes that move threads back, because threads in the group may have started others in the
/// meantime.
const MAX_PASSES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// Error: threads cannot be limited.
#[derive(Debug, thiserror::Error)]
pub enum CpuLimitError {
    /// The process could not be inspected.
    #[error("cannot determine the control groups of the threads")]
    Process(#[from] ProcessError),
    /// No control group limits processors on this host.
    #[error("no control group of this host has the `cpu` controller, or its file system is not mounted")]
    Unsupported,
    /// A thread's group is not visible from here: it is in another namespace of control groups.
    #[error("the control group {group} of thread {thread} is not visible from here")]
    Hidden {
        /// Thread id.
        thread: u32,
        /// Group of the thread, as the kernel reports it.
        group: String,
    },
    /// The parent group does not delegate the controller.
    #[error(
        "the control group {group} does not have the `cpu` controller; with systemd, give the unit of QEMU, \
         and its slice, a `CPUWeight=`"
    )]
    NoController {
        /// Group of the threads.
        group: PathBuf,
    },
    /// The kernel refuses a change.
    #[error("cannot {action} {path}", path = path.display())]
    Io {
        /// Attempted action.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Versions of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

impl CgroupVersion {
    /// Returns the name of the file that lists a group's threads.
    fn threads(self) -> &'static str {
        match self {
            Self::One => "tasks",
            Self::Two => "cgroup.threads",
        }
    }
}

/// Limit on some threads of another process.
#[derive(Debug)]
pub struct CpuLimit {
    /// One group for each thread.
    groups: Vec<LimitGroup>,
}

/// A group that this process created for one thread.
#[derive(Debug)]
struct LimitGroup {
    version: CgroupVersion,
    path: PathBuf,
}

impl CpuLimit {
    /// Moves threads of a process into groups of their own. They are not limited yet.
    ///
    /// # Errors
    /// The threads are in their original groups then.
    pub fn begin(process: &Process, threads: &[u32]) -> Result<Self, CpuLimitError> {
        let mounts = Mounts::of_this_process()?;
        let homes = threads.iter().map(|thread| mounts.group_of(process, *thread));
        let homes = homes.collect::<Result<Vec<_>, _>>()?;
        // Dropped after an error, it moves the threads back.
        let mut this = Self { groups: Vec::new() };
        for (thread, (version, home)) in threads.iter().zip(homes) {
            let group = LimitGroup::make(version, &home, &format!("{}{thread}", group_prefix(process)))?;
            let list = group.path.join(version.threads());
            this.groups.push(group);
            write(&list, &thread.to_string())?;
        }
        Ok(this)
    }

    /// Limits each thread to this processor time, in microseconds per second; none means no limit.
    pub fn set(&self, us_per_s: Option<u64>) -> Result<(), CpuLimitError> {
        let period_us = PERIOD.as_micros() as u64;
        let quota_us = us_per_s.map(|us| (us.saturating_mul(period_us) / 1_000_000).max(MIN_QUOTA_US));
        self.groups.iter().try_for_each(|group| group.set(quota_us))
    }

    /// Ends limits that another process has left: moves the process's threads back to their original groups. Returns
    /// true if there were any.
    pub fn end_leftover(process: &Process) -> Result<bool, CpuLimitError> {
        let Ok(mounts) = Mounts::of_this_process() else { return Ok(false) };
        let name = group_prefix(process);
        let is_ours =
            |path: &Path| path.file_name().is_some_and(|last| last.to_string_lossy().starts_with(&name));
        let mut homes = BTreeMap::new();
        for thread in process.threads()? {
            // A thread that ends in the meantime has no group.
            if let Ok((version, mut path)) = mounts.group_of(process, thread) {
                if is_ours(&path) {
                    path.pop();
                }
                homes.insert(path, version);
            }
        }
        // Also the groups without threads.
        let groups: Vec<_> = homes
            .into_iter()
            .flat_map(|(home, version)| {
                let paths: Vec<_> = groups_in(&home).map(|name| home.join(name)).collect();
                paths.into_iter().map(move |path| LimitGroup { version, path })
            })
            .filter(|group| is_ours(&group.path))
            .collect();
        // First all limits are lifted; an error with one group does not prevent the handling of the others.
        let lifted = groups.iter().map(|group| ignore_gone(group.set(None))).fold(Ok(()), Result::and);
        let ended = groups.iter().map(|group| ignore_gone(group.end())).fold(Ok(()), Result::and);
        lifted.and(ended)?;
        Ok(!groups.is_empty())
    }
}

impl Drop for CpuLimit {
    /// Errors are ignored; [`CpuLimit::end_leftover`] reports them.
    fn drop(&mut self) {
        for group in &self.groups {
            let _ = group.set(None);
            let _ = group.end();
        }
    }
}

impl LimitGroup {
    /// Creates a group below another one, or reuses one that was left there, without a limit.
    fn make(version: CgroupVersion, home: &Path, name: &str) -> Result<Self, CpuLimitError> {
        let mut name = name.to_owned();
        if version == CgroupVersion::Two {
            let has_cpu = |file: &str| {
                let words = fs::read_to_string(home.join(file)).unwrap_or_default();
                words.split_whitespace().any(|word| word == "cpu")
            };
            if !has_cpu("cgroup.controllers") {
                return Err(CpuLimitError::NoController { group: home.to_owned() });
            }
            // The last of several guests that share the group disables it, whichever that is.
            if !has_cpu("cgroup.subtree_control")
                || groups_in(home).any(|name| name.ends_with(ENABLED_SUFFIX))
            {
                name += ENABLED_SUFFIX;
            }
        }
        let group = Self { version, path: home.join(name) };
        make_directory(&group.path)?;
        let made = match version {
            CgroupVersion::One => {
                write(&group.path.join("cpu.cfs_period_us"), &PERIOD.as_micros().to_string())
            }
            // A group that has threads itself may have only threaded groups below it.
            CgroupVersion::Two => write(&group.path.join("cgroup.type"), "threaded")
                .and_then(|()| write(&home.join("cgroup.subtree_control"), "+cpu")),
        };
        match made.and_then(|()| group.set(None)) {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.end();
                Err(error)
            }
        }
    }

    fn set(&self, quota_us: Option<u64>) -> Result<(), CpuLimitError> {
        let (file, limited, unlimited) = match self.version {
            CgroupVersion::One => ("cpu.cfs_quota_us", quota_us.map(|us| us.to_string()), "-1"),
            CgroupVersion::Two => {
                ("cpu.max", quota_us.map(|us| format!("{us} {}", PERIOD.as_micros())), "max")
            }
        };
        let path = self.path.join(file);
        match write(&path, limited.as_deref().unwrap_or(unlimited)) {
            // A group of version one may not have a higher limit than its parent, whose limit applies anyway.
            Err(CpuLimitError::Io { source, .. })
                if limited.is_some() && source.raw_os_error() == Some(nix::libc::EINVAL) =>
            {
                write(&path, unlimited)
            }
            done => done,
        }
    }

    /// Moves the threads back, and removes the group.
    fn end(&self) -> Result<(), CpuLimitError> {
        let Some(home) = self.path.parent() else { return Ok(()) };
        let list = self.path.join(self.version.threads());
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| CpuLimitError::Io { action, path, source }
        };
        // Threads that were started by those in the group are in it as well, maybe since it was read; and a thread
        // that is ending stays.
        for round in 0..MAX_PASSES {
            let threads = fs::read_to_string(&list).map_err(failed("read", &list))?;
            if threads.trim().is_empty() {
                break;
            }
            if round > 0 {
                std::thread::sleep(PAUSE);
            }
            for thread in threads.lines() {
                match write(&home.join(self.version.threads()), thread) {
                    // The thread has ended.
                    Err(CpuLimitError::Io { source, .. })
                        if source.raw_os_error() == Some(nix::libc::ESRCH) => {}
                    done => done?,
                }
            }
        }
        fs::remove_dir(&self.path).map_err(failed("remove", &self.path))?;
        if self.path.to_string_lossy().ends_with(ENABLED_SUFFIX) {
            disable_controller(home);
        }
        Ok(())
    }
}

/// Returns the prefix of the names of a process's groups.
fn group_prefix(process: &Process) -> String {
    format!("{GROUP_PREFIX}{}-", process.pid())
}

/// Returns the names of this crate's groups below one.
fn groups_in(home: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(home).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(GROUP_PREFIX))
}

/// Stops the delegation of the controller by the parent group, unless another guest's group needs it: its limit would
/// be lost, and the kernel would not report it.
fn disable_controller(home: &Path) {
    if groups_in(home).next().is_none() {
        let _ = write(&home.join("cgroup.subtree_control"), "-cpu");
    }
}

/// Mount point of the file system of control groups.
struct Mounts {
    version: CgroupVersion,
    /// Group that is visible at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl Mounts {
    fn of_this_process() -> Result<Self, CpuLimitError> {
        let path = PathBuf::from("/proc/self/mountinfo");
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text).ok_or(CpuLimitError::Unsupported),
            Err(source) => Err(CpuLimitError::Io { action: "read", path, source }),
        }
    }

    /// Returns the mount that limits processors: that of version one, if there is one, because a controller exists in
    /// one version only.
    fn parse(mountinfo: &str) -> Option<Self> {
        let mounts = mountinfo.lines().filter_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mut place = place.split(' ').skip(3).map(unescaped);
            let (root, point) = (place.next()?, place.next()?);
            let mut kind = kind.split(' ');
            let (kind, options) = (kind.next()?, kind.nth(1)?);
            let version = match kind {
                "cgroup" if options.split(',').any(|option| option == "cpu") => CgroupVersion::One,
                "cgroup2" => CgroupVersion::Two,
                _ => return None,
            };
            Some(Self { version, root: root.into(), point: point.into() })
        });
        mounts.min_by_key(|mount| mount.version != CgroupVersion::One)
    }

    /// Returns the directory of a thread's group.
    fn group_of(&self, process: &Process, thread: u32) -> Result<(CgroupVersion, PathBuf), CpuLimitError> {
        let file = process.path(&format!("task/{thread}/cgroup"));
        let text = fs::read_to_string(&file).map_err(|source| CpuLimitError::Io {
            action: "read",
            path: file,
            source,
        })?;
        let group = parse_group(&text, self.version).ok_or(CpuLimitError::Unsupported)?;
        let below = Path::new(group)
            .strip_prefix(&self.root)
            .ok()
            .filter(|below| !below.components().any(|part| part.as_os_str() == ".."));
        let below = below.ok_or_else(|| CpuLimitError::Hidden { thread, group: group.to_owned() })?;
        let path = if below.as_os_str().is_empty() { self.point.clone() } else { self.point.join(below) };
        Ok((self.version, path))
    }
}

/// Returns the group that `/proc/PID/cgroup` names: `9:cpu,cpuacct:/a` of version one, `0::/a` of version two.
fn parse_group(text: &str, version: CgroupVersion) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let is_it = match version {
            CgroupVersion::One => controllers.split(',').any(|controller| controller == "cpu"),
            CgroupVersion::Two => controllers.is_empty(),
        };
        is_it.then_some(group)
    })
}

/// Decodes spaces and similar characters, which `mountinfo` writes as a backslash and three octal digits.
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

/// Ignores the error that a group is gone: another process has removed it at the same time.
fn ignore_gone(done: Result<(), CpuLimitError>) -> Result<(), CpuLimitError> {
    let gone = [Some(nix::libc::ENOENT), Some(nix::libc::ENODEV)];
    match done {
        Err(CpuLimitError::Io { source, .. }) if gone.contains(&source.raw_os_error()) => Ok(()),
        done => done,
    }
}

/// Creates a directory; an existing one was left by an earlier process.
fn make_directory(path: &Path) -> Result<(), CpuLimitError> {
    match fs::create_dir(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            Err(CpuLimitError::Io { action: "make", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), CpuLimitError> {
    // The file is not created: the kernel provides it.
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
        let one = Mounts::parse(BOTH).unwrap();
        assert_eq!((one.version, one.point), (CgroupVersion::One, "/sys/fs/cgroup/cpu and acct".into()));
        let two = Mounts::parse("32 24 0:28 /a /sys/fs/cgroup rw - cgroup2 cgroup2 rw").unwrap();
        assert_eq!(
            (two.version, two.root, two.point),
            (CgroupVersion::Two, "/a".into(), "/sys/fs/cgroup".into())
        );
        assert!(Mounts::parse("24 1 0:21 / /proc rw - proc proc rw\nnonsense").is_none());
    }

    #[test]
    fn a_thread_s_group_is_found() {
        let text = "9:name=systemd:/\n4:cpuset:/x\n3:cpu,cpuacct:/machine/a:b\n0::/y\n";
        assert_eq!(parse_group(text, CgroupVersion::One), Some("/machine/a:b"));
        assert_eq!(parse_group(text, CgroupVersion::Two), Some("/y"));
        assert_eq!(parse_group("4:cpuset:/x\n", CgroupVersion::One), None);
        assert_eq!(parse_group("", CgroupVersion::Two), None);
    }

    #[test]
    fn escapes_are_read() {
        assert_eq!(unescaped("a\\040b\\134"), "a b\\");
        assert_eq!(unescaped("\\9x\\"), "\\9x\\");
    }

    /// Checks the writes to a group of version two, on plain files. `tests/cpu_limit` tests a real one.
    #[test]
    fn groups_of_version_two_get_the_right_settings() {
        let home = tempfile::tempdir().unwrap();
        let path = |name: &str| home.path().join(name);
        let group = path("whimbrel-cpu-7-9-on");
        fs::create_dir(&group).unwrap();
        for file in ["cgroup.controllers", "cgroup.subtree_control"] {
            fs::write(path(file), "memory pids\n").unwrap();
        }
        for file in ["cgroup.type", "cpu.max", "cgroup.threads"] {
            fs::write(group.join(file), "").unwrap();
        }
        let make = || LimitGroup::make(CgroupVersion::Two, home.path(), "whimbrel-cpu-7-9");
        assert!(matches!(make(), Err(CpuLimitError::NoController { .. })));
        fs::write(path("cgroup.controllers"), "cpu memory pids\n").unwrap();
        let made = make().unwrap();
        assert_eq!(made.path, group);
        let content_of = |path: PathBuf| fs::read_to_string(path).unwrap();
        assert_eq!(content_of(group.join("cgroup.type")), "threaded");
        assert_eq!(content_of(path("cgroup.subtree_control")), "+cpury pids\n");
        assert_eq!(content_of(group.join("cpu.max")), "max");
        made.set(Some(4_000)).unwrap();
        assert_eq!(content_of(group.join("cpu.max")), "4000 24000");
        // The kernel's files are removed together with the directory.
        for file in ["cgroup.type", "cpu.max"] {
            fs::remove_file(group.join(file)).unwrap();
        }
        assert!(made.end().is_err(), "a file is left in it");
        // Then another guest's group is the last one, and its name records that.
        fs::write(path("cgroup.subtree_control"), "cpu\n").unwrap();
        for file in ["cgroup.type", "cgroup.threads", "cpu.max"] {
            fs::create_dir_all(path("whimbrel-cpu-8-8-on")).unwrap();
            fs::write(path("whimbrel-cpu-8-8-on").join(file), "").unwrap();
        }
        let another = LimitGroup::make(CgroupVersion::Two, home.path(), "whimbrel-cpu-8-8").unwrap();
        assert_eq!(another.path, path("whimbrel-cpu-8-8-on"));
        fs::remove_dir_all(&group).unwrap();
        fs::write(path("cgroup.subtree_control"), "cpu\n").unwrap();
        disable_controller(home.path());
        assert_eq!(content_of(path("cgroup.subtree_control")), "cpu\n");
        fs::remove_dir_all(another.path).unwrap();
        disable_controller(home.path());
        assert_eq!(content_of(path("cgroup.subtree_control")), "-cpu");
    }
}
