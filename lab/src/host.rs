//! A host of the laboratory: a network namespace, a directory, and the programs that run there.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::run::{Daemon, kill_pid, run};

/// Directory of named network namespaces.
const NAMESPACES: &str = "/run/netns";

/// A network namespace under a name, with a directory of its own. A handle: dropping it changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    name: String,
    namespace: String,
    directory: PathBuf,
    addresses: Vec<Ipv4Addr>,
}

impl Host {
    pub(crate) fn new(prefix: &str, name: &str, directory: &Path, addresses: &[Ipv4Addr]) -> Self {
        Self {
            name: name.to_owned(),
            namespace: format!("{prefix}-{name}"),
            directory: directory.join(name),
            addresses: addresses.to_vec(),
        }
    }

    /// Returns its name in the laboratory: `a`, `b`, `witness`, `router`, `client`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of its network namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the file that stands for its network namespace.
    pub fn namespace_path(&self) -> PathBuf {
        Path::new(NAMESPACES).join(&self.namespace)
    }

    /// Returns the directory for its files: on a real file system (disk images with direct I/O), and short enough for
    /// the paths of sockets.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns its address on the migration link (hosts) or on its only network (others).
    pub fn address(&self) -> Ipv4Addr {
        self.addresses.first().copied().unwrap_or(Ipv4Addr::LOCALHOST)
    }

    /// Returns its address on the network that it shares with the witness, if it has one.
    pub fn control_address(&self) -> Option<Ipv4Addr> {
        self.addresses.get(1).copied()
    }

    /// Returns a command that runs in this host's network namespace.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        // It becomes the program: the process id is the program's own.
        command.arg(format!("--net={}", self.namespace_path().display())).arg("--").arg(program);
        command
    }

    /// Runs a command to its end in this host and returns its output.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let (program, arguments) =
            words.split_first().ok_or_else(|| Error::Config("an empty command".to_owned()))?;
        run(self.command(program).args(arguments))
    }

    /// Starts a daemon in this host. Its log is `NAME.log` in the host's directory.
    pub fn spawn(&self, name: &str, words: &[&str]) -> Result<Daemon> {
        let (program, arguments) =
            words.split_first().ok_or_else(|| Error::Config("an empty command".to_owned()))?;
        Daemon::start(self.command(program).args(arguments), &self.directory.join(format!("{name}.log")))
    }

    /// Runs a function on a thread in this host's network namespace. Sockets and devices that it makes belong to that
    /// namespace, also afterwards.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = self.namespace_path();
        let namespace = fs::File::open(&path).context(|| format!("no namespace {}", path.display()))?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)
                    .context(|| format!("cannot enter {}", path.display()))?;
                Ok(work())
            });
            // A panic of the work continues here.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Makes a tap device for a VM, connected to the VMs' network. An existing one stays.
    pub fn tap(&self, name: &str) -> Result<()> {
        if self.run(&["ip", "link", "show", "dev", name]).is_err() {
            self.run(&["ip", "tuntap", "add", "dev", name, "mode", "tap"])?;
        }
        self.run(&["ip", "link", "set", "dev", name, "master", crate::addresses::VM_BRIDGE, "up"])?;
        Ok(())
    }

    /// Returns the process ids of everything that runs in this host.
    pub fn processes(&self) -> Result<Vec<u32>> {
        processes_in(&self.namespace_path())
    }
}

/// Returns the process ids of everything that runs in a network namespace.
fn processes_in(namespace: &Path) -> Result<Vec<u32>> {
    let wanted = fs::metadata(namespace).context(|| format!("no namespace {}", namespace.display()))?;
    let processes = fs::read_dir("/proc").context(|| "cannot read /proc")?;
    Ok(processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        // A process may end during the scan.
        .filter(|pid| {
            fs::metadata(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|it| (it.ino(), it.dev()) == (wanted.ino(), wanted.dev()))
        })
        .collect())
}

/// Returns the names of the network namespaces of hosts with this prefix.
pub(crate) fn namespaces(prefix: &str, hosts: &[&str]) -> Result<Vec<String>> {
    let entries = match fs::read_dir(NAMESPACES) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).context(|| format!("cannot read {NAMESPACES}")),
    };
    // By their whole names: another laboratory's prefix may begin with this one and a dash.
    let wanted: Vec<_> = hosts.iter().map(|host| format!("{prefix}-{host}")).collect();
    Ok(entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| wanted.contains(name))
        .collect())
}

/// Kills everything in a network namespace and removes it.
pub(crate) fn remove_namespace(name: &str) -> Result<()> {
    let path = Path::new(NAMESPACES).join(name);
    // A file that a crash left between its creation and the mounting is no namespace; nothing runs there.
    loop {
        let processes = processes_in(&path)?;
        if processes.is_empty() {
            break;
        }
        // Repeats until none is found: a dying process may have made children in the meantime.
        processes.into_iter().try_for_each(kill_pid)?;
    }
    run(Command::new("ip").args(["netns", "del", name]))?;
    Ok(())
}
