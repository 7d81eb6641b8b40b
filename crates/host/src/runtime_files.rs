//! Runtime files that a QEMU made for itself and leaves behind when it is killed: sockets, its process file, its
//! directory.
//!
//! Paths are QEMU's: its mount namespace, root and working directory may differ from the agent's, where the same path
//! may be another VM's monitor. And while the VM moves, another QEMU may reuse a path. So each file is resolved once,
//! as QEMU sees it, and held open from then on together with its directory; only exactly that file is ever removed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, fstat, openat, openat2, statat, unlinkat};
use tracee::{Process, ProcessError};
use tracing::{info, warn};

use crate::logs;

/// Maximum length of a process id, with the end of its line.
const PID_BYTES: usize = 16;

/// Runtime files to be removed after a QEMU's end.
#[derive(Debug, Default)]
pub(super) struct RuntimeFiles {
    /// Sockets that QEMU listens on.
    sockets: Vec<RuntimeFile>,
    /// File of `-pidfile`, and the number that QEMU wrote there.
    pid_file: Option<(RuntimeFile, String)>,
    /// Directory that the agent made for QEMU, when it arrived or was started from a file.
    directory: Option<PathBuf>,
    /// Directory of QEMU's log files; those with content stay.
    logs: Option<PathBuf>,
}

impl RuntimeFiles {
    /// Collects the runtime files of a process; `made` are the directories that the agent made for it and for its logs.
    /// Files that cannot be examined are left out.
    pub(super) fn of(process: &Process, made: Option<(PathBuf, PathBuf)>) -> Self {
        let (directory, logs) = made.unzip();
        let sockets = sockets(process).unwrap_or_default();
        let pid_file = pid_file(process);
        if process.is_alive() {
            Self { sockets, pid_file, directory, logs }
        } else {
            // Its process id may have been reused in the meantime.
            Self { directory, logs, ..Self::default() }
        }
    }

    /// Removes the files that still exist. The caller calls this after QEMU's end.
    pub(super) fn remove(&self) {
        self.sockets.iter().for_each(RuntimeFile::remove);
        if let Some((file, pid)) = &self.pid_file
            // A QEMU that was started since writes its own number into the same file.
            && file.text().is_ok_and(|text| text.trim() == pid)
        {
            file.remove();
        }
        if let Some(directory) = &self.directory
            && let Err(error) = fs::remove_dir_all(directory)
        {
            warn!(directory = %directory.display(), %error, "cannot remove the directory");
        }
        if let Some(logs) = &self.logs {
            logs::remove_empty(logs);
        }
    }
}

/// Returns the sockets that a process listens on.
fn sockets(process: &Process) -> Result<Vec<RuntimeFile>, ProcessError> {
    let descriptors = process.descriptors()?;
    let own: Vec<_> = descriptors
        .iter()
        .filter_map(|(_, target)| target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']'))
        .collect();
    let table = process.read("net/unix")?;
    // Num RefCount Protocol Flags Type St Inode Path; the flag 0x10000 means that the socket listens.
    let listening = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [_, _, _, flags, _, _, inode, path] = fields[..] else { return None };
        let listens = u32::from_str_radix(flags, 16).ok()? & 0x10000 != 0;
        (listens && !path.starts_with('@')).then_some((inode, path))
    });
    let (ours, theirs): (Vec<_>, Vec<_>) = listening.partition(|(inode, _)| own.contains(inode));
    let found = ours.into_iter().filter_map(|(_, path)| {
        let file = RuntimeFile::find(process, path.as_ref(), OFlags::PATH)?;
        let mut others = theirs.iter().filter(|(_, other)| *other == path);
        let unclear = others.any(|(inode, _)| may_belong_to_another(&file, inode));
        if unclear {
            info!(path, pid = process.pid(), "not removed: another process listens there too");
        }
        (!unclear).then_some(file)
    });
    Ok(found.collect())
}

/// Returns true if a file may belong to another socket with the same path as text. If two sockets were made at one
/// place, their owners cannot be distinguished from outside.
fn may_belong_to_another(file: &RuntimeFile, inode: &str) -> bool {
    let socket = PathBuf::from(format!("socket:[{inode}]"));
    let holds = |process: &Process| {
        process.descriptors().is_ok_and(|all| all.iter().any(|(_, target)| *target == socket))
    };
    let Ok(entries) = fs::read_dir("/proc") else { return true };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let holder = pids.filter_map(|pid| Process::open(pid).ok()).find(holds);
    let Some(holder) = holder else { return true };
    let theirs = RuntimeFile::find(&holder, &file.path, OFlags::PATH);
    theirs.is_some_and(|theirs| theirs.is(file).unwrap_or(true))
}

fn pid_file(process: &Process) -> Option<(RuntimeFile, String)> {
    let line = fs::read(process.path("cmdline")).ok()?;
    let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let place = words.iter().position(|word| word == "-pidfile" || word == "--pidfile")?;
    let path = PathBuf::from(words.get(place + 1)?.as_ref());
    let file = RuntimeFile::find(process, &path, OFlags::RDONLY | OFlags::NONBLOCK)?;
    // The number that it has in its own PID namespace is the last one.
    let status = process.read("status").ok()?;
    let pid = status.lines().find_map(|line| line.strip_prefix("NSpid:")?.split_whitespace().next_back())?;
    (file.text().ok()?.trim() == pid).then(|| (file, pid.to_owned()))
}

/// A file, held so that no other can be taken for it: as long as it is open, no other file gets its inode number.
#[derive(Debug)]
struct RuntimeFile {
    /// Path as it was passed to QEMU, for messages.
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
    file: File,
}

impl RuntimeFile {
    fn find(process: &Process, path: &Path, flags: OFlags) -> Option<Self> {
        let name = path.file_name()?.to_owned();
        let directory = directory_of(process, path.parent()?).ok()?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&directory, &name, flags, Mode::empty()).ok()?.into();
        Some(Self { path: path.to_owned(), directory, name, file })
    }

    fn text(&self) -> io::Result<String> {
        let mut bytes = [0; PID_BYTES];
        let read = self.file.read_at(&mut bytes, 0)?;
        Ok(String::from_utf8_lossy(&bytes[..read]).into_owned())
    }

    fn remove(&self) {
        match self.unlink() {
            Ok(true) => {}
            Ok(false) => info!(file = %self.path.display(), "not removed: it was replaced by another one"),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => warn!(file = %self.path.display(), %error, "cannot remove the file"),
        }
    }

    /// Returns true if the file with this name now is the file of `held`.
    fn is(&self, held: &Self) -> io::Result<bool> {
        let held = fstat(&held.file)?;
        let found = statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((held.st_dev, held.st_ino) == (found.st_dev, found.st_ino))
    }

    /// Removes the name if it still refers to this file; returns true if it did.
    fn unlink(&self) -> io::Result<bool> {
        let same = self.is(self)?;
        if same {
            unlinkat(&self.directory, &self.name, AtFlags::empty())?;
        }
        Ok(same)
    }
}

/// Opens a directory as a process sees it. The directory itself is held open, not the process's root: mounts of a
/// namespace are removed when its last process ends.
fn directory_of(process: &Process, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let start = |link: &str| rustix::fs::open(process.path(link), flags, Mode::empty());
    let open = |start: OwnedFd, path: &Path, resolve| openat2(start, path, flags, Mode::empty(), resolve);
    if path.is_absolute() {
        return Ok(open(start("root")?, path, ResolveFlags::IN_ROOT)?);
    }
    // An absolute symbolic link in the path would lead into the agent's root.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    Ok(open(start("cwd")?, path, ResolveFlags::NO_SYMLINKS)?)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Environment variable with the directory for the files of the process below.
    const DIRECTORY: &str = "LEAVINGS_DIRECTORY";

    /// A separate process, which [`listens`] in the tests' program.
    struct Listener(Child, Process);

    impl Listener {
        /// Starts it with the parent of `directory` as its working directory, after the shell command `first`.
        fn start(directory: &Path, first: &str) -> Self {
            let mut child = Command::new("unshare")
                .args([
                    "--mount",
                    "sh",
                    "-ec",
                    &format!("{first}; cd {}/..; exec \"$@\"", directory.display()),
                ])
                .arg("sh")
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "--ignored", "--nocapture", "runtime_files::tests::listens"])
                // To the tests' program these are two filters more, to the agent they are QEMU's option.
                .args(["--", "-pidfile"])
                .arg(Self::relative(directory).join("pid"))
                .env(DIRECTORY, directory)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
            assert!(lines.take_while(|line| line != "listening").count() < 10);
            let process = Process::open(child.id()).unwrap();
            Self(child, process)
        }

        fn relative(directory: &Path) -> &Path {
            directory.file_name().unwrap().as_ref()
        }

        fn end(mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    #[ignore = "what the other tests start"]
    fn listens() {
        let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else { return };
        let _absolute = UnixListener::bind(directory.join("absolute")).unwrap();
        let _relative = UnixListener::bind(Listener::relative(&directory).join("relative")).unwrap();
        fs::write(directory.join("pid"), format!("{}\n", std::process::id())).unwrap();
        println!("\nlistening");
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn what_a_process_made_is_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("its user's"), "").unwrap();
        let listener = Listener::start(directory.path(), ":");
        let runtime_files = RuntimeFiles::of(&listener.1, None);
        listener.end();
        assert_eq!(names(directory.path()), ["absolute", "its user's", "pid", "relative"]);
        runtime_files.remove();
        assert_eq!(names(directory.path()), ["its user's"]);
    }

    #[test]
    fn files_of_the_same_path_in_another_mount_namespace_are_others() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        // The process has this directory in the other's place.
        let inside = tempfile::tempdir().unwrap();
        let bind = format!("mount --bind {} {}", inside.path().display(), directory.path().display());
        let listener = Listener::start(directory.path(), &bind);
        assert!(names(directory.path()).is_empty());
        let others = ["absolute", "relative"].map(|name| UnixListener::bind(at(name)).unwrap());
        let runtime_files = RuntimeFiles::of(&listener.1, None);
        fs::write(at("pid"), listener.1.pid().to_string()).unwrap();
        listener.end();
        runtime_files.remove();
        assert_eq!(names(directory.path()), ["absolute", "pid", "relative"], "another VM's");
        assert!(others.iter().all(|other| UnixStream::connect_addr(&other.local_addr().unwrap()).is_ok()));
        assert!(names(inside.path()).is_empty(), "its own");
    }

    #[test]
    fn what_another_process_has_taken_over_is_left_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let listener = Listener::start(directory.path(), ":");
        let runtime_files = RuntimeFiles::of(&listener.1, None);
        fs::remove_file(at("absolute")).unwrap();
        let _other = UnixListener::bind(at("absolute")).unwrap();
        // QEMU writes into the file that is there.
        fs::write(at("pid"), "1\n").unwrap();
        // The file's owner can no longer be determined.
        let unclear = RuntimeFiles::of(&listener.1, None);
        listener.end();
        unclear.remove();
        assert_eq!(names(directory.path()), ["absolute", "pid"]);
        runtime_files.remove();
        assert_eq!(names(directory.path()), ["absolute", "pid"]);
        assert!(UnixStream::connect(at("absolute")).is_ok());
    }
}
