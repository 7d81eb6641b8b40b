//! The agent's configuration: one TOML file, read once at start.
//!
//! ```toml
//! host = "alpha"                    # this host's name; also in its certificate
//! listen = "192.0.2.1:7740"         # where peers reach this agent
//!
//! [tls]
//! ca = "ca.pem"                     # relative paths are relative to this file's directory
//! certificate = "alpha.pem"
//! key = "alpha.key"
//!
//! [hosts.beta]
//! address = "192.0.2.2:7740"
//! ```
//!
//! Everything else has a default. All keys with their meaning stand in `docs/agent.example.toml`, which a test reads.
//! Keys that are not known are refused, and every error names the file, the line and the key, and says what to do.

mod file;
mod locate;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use engine::precopy::Sampling;
use proto::HostId;
use serde::{Deserialize, Serialize};

use crate::api::{Compress, Deltas, OnLimit, SoftPages, StopPolicy, ThrottleCpu, ThrottleWrites};
pub use crate::pool::{Pool, PoolFormat, Storage};

/// Where the configuration lies if nothing else is said.
pub const DEFAULT_PATH: &str = "/etc/whimbrel/agent.toml";

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// This host's name.
    pub host: HostId,
    /// What this agent is for.
    pub role: AgentRole,
    /// Where peers reach it.
    pub listen: SocketAddr,
    /// Where the journal and the register lie; survives a reboot.
    pub state_dir: PathBuf,
    /// Where sockets of running things lie.
    pub run_dir: PathBuf,
    /// Where the files go that QEMU writes for people (serial ports, logs) of VMs that have arrived.
    pub log_dir: PathBuf,
    /// The API's socket.
    pub api_socket: PathBuf,
    /// How connections between agents are secured.
    pub security: Security,
    /// The other agents, by name, with their address as `host:port`. May hold this host too, so that all hosts can
    /// share one table; see [`Config::peer`].
    pub hosts: BTreeMap<HostId, String>,
    /// The witness that keeps the register of owners; none if there is no register. Always a key of `hosts`, never
    /// this host.
    pub register: Option<HostId>,
    /// What is said of QEMU.
    pub qemu: Qemu,
    /// Taps and bridges of arriving VMs: what the source calls it → what it is here.
    pub taps: BTreeMap<String, String>,
    /// Directories of disks of arriving VMs: where the source has it → where it is here. Longest prefix wins.
    pub disk_dirs: BTreeMap<PathBuf, PathBuf>,
    /// Directories, files and addresses of disks of arriving VMs that mean the same storage here as at the source.
    pub disks_shared: Vec<String>,
    /// Where disks of arriving VMs that are copied get their images; none if none can be.
    pub pool: Option<Pool>,
    /// Images, or directories of them, that disks of arriving VMs may have something in common with.
    pub templates: Vec<PathBuf>,
    /// What migrations from here aim at and keep within, unless a request says otherwise.
    pub limits: Limits,
    /// How long to wait for what.
    pub timeouts: Timeouts,
    /// Socket of a test harness that is asked at every fault point. For tests of this program only: who listens there
    /// decides when the agent stops dead.
    pub fault_socket: Option<PathBuf>,
}

/// What an agent is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentRole {
    /// Runs VMs and moves them.
    #[default]
    Host,
    /// Keeps the register of owners and nothing else.
    Witness,
}

impl AgentRole {
    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Witness => "witness",
        }
    }
}

/// How connections between agents are secured. Both sides have to say the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// TLS 1.3, certificates on both sides. PEM files.
    Tls {
        /// The authority that signed all agents' certificates.
        ca: PathBuf,
        /// This agent's certificate.
        certificate: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
    /// Nothing: guest memory crosses the network readable, and whoever reaches the port may send a VM.
    Plain,
}

/// What is said of QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Qemu {
    /// QEMUs that arriving VMs may be started with, first choice first. Of those that have the source's version or a
    /// newer one, the first is taken.
    pub binaries: Vec<PathBuf>,
    /// Where these find their firmware (`-L`), for QEMUs that do not lie where they were built for.
    pub data_dirs: Vec<PathBuf>,
    /// Options of QEMU's command line that are not known and are carried over as they stand.
    pub allow_options: Vec<String>,
}

impl Default for Qemu {
    fn default() -> Self {
        Self {
            binaries: vec![PathBuf::from("/usr/bin/qemu-system-x86_64")],
            data_dirs: Vec::new(),
            allow_options: Vec::new(),
        }
    }
}

/// What migrations aim at and keep within.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Number of data streams, 1 to 64.
    pub streams: u16,
    /// Cap on the sending rate, in bytes per second; 0 for none.
    pub bandwidth_bytes_per_s: u64,
    /// When the guest is stopped.
    pub policy: StopPolicy,
    /// Longest time between two looks at what the guest writes, once all of its memory went, in milliseconds; 0 to have
    /// it follow from the link's rate.
    pub sampling_ms: u64,
    /// Over how many looks the number of modified pages is averaged.
    pub stable_window: u32,
    /// By how much that may change from look to look, in hundredths of what was sent in between, and be called stable.
    pub stable_percent: u32,
    /// How much of what is sent was sent shortly before where the guest writes to the same pages again and again, in
    /// hundredths.
    pub resent_percent: u32,
    /// How many rounds before are shortly before.
    pub resent_rounds: u32,
    /// Longest downtime, in milliseconds. Below it rounds go on as long as they make it shorter.
    pub max_downtime_ms: u64,
    /// How long a migration may take with the policy `sla`, in milliseconds; 0 for as long as it takes.
    pub max_total_ms: u64,
    /// Most rounds of pre-copy.
    pub max_rounds: u32,
    /// With the policy `hybrid`: how often all that is dirty goes before the rest comes after the guest.
    pub hybrid_passes: u32,
    /// What to do when the rounds are used up.
    pub on_limit: OnLimit,
    /// How fast a guest may write to disks that are copied.
    pub throttle_writes: ThrottleWrites,
    /// How fast a guest's processors may be while it is moved.
    pub throttle_cpu: ThrottleCpu,
    /// For how much more of the time than before a guest may wait for a processor while it is copied, in hundredths,
    /// before copying gives way more; 0 if it does not.
    pub guest_wait_percent: u32,
    /// Whether pages of disks that the destination has already are referred to, and not sent.
    pub references: bool,
    /// How pages are compressed.
    pub compression: Compress,
    /// Least ratio of data to what is sent for it, in percent, for which it is compressed.
    pub compression_least_ratio_percent: u32,
    /// How much is sent as it is behind data that compressed less, in bytes of each stream.
    pub compression_skip_bytes: u64,
    /// Whether only what changed is sent of pages that are sent again.
    pub deltas: Deltas,
    /// How much the source remembers of pages that it sent, to find out what changed of them, in MiB: 1 MiB is enough
    /// for 32 MiB of memory.
    pub deltas_memory_mib: u32,
    /// Which of a guest's memory is not sent because it can do without.
    pub soft_pages: SoftPages,
}

impl Limits {
    /// How the guest's writes are looked at.
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            interval_ns: self.sampling_ms.saturating_mul(1_000_000),
            window: self.stable_window,
            stable_percent: self.stable_percent,
            resent_percent: self.resent_percent,
            history: self.resent_rounds,
        }
    }

    /// What is worth compressing.
    pub(crate) fn worth(&self) -> memory::Worth {
        memory::Worth {
            least_ratio_percent: self.compression_least_ratio_percent,
            skip_bytes: self.compression_skip_bytes,
        }
    }

    /// How much is remembered of pages that were sent, in bytes.
    pub(crate) fn deltas_bytes(&self) -> usize {
        (self.deltas_memory_mib as usize) << 20
    }
}

impl Default for Limits {
    fn default() -> Self {
        let sampling = Sampling::default();
        Self {
            streams: 4,
            bandwidth_bytes_per_s: 0,
            policy: StopPolicy::Pattern,
            sampling_ms: sampling.interval_ns / 1_000_000,
            stable_window: sampling.window,
            stable_percent: sampling.stable_percent,
            resent_percent: sampling.resent_percent,
            resent_rounds: sampling.history,
            max_downtime_ms: 300,
            max_total_ms: 0,
            max_rounds: 30,
            hybrid_passes: 1,
            on_limit: OnLimit::Abort,
            throttle_writes: ThrottleWrites::Off,
            throttle_cpu: ThrottleCpu::Off,
            guest_wait_percent: 5,
            references: true,
            compression: Compress::Auto,
            compression_least_ratio_percent: memory::Worth::default().least_ratio_percent,
            compression_skip_bytes: memory::Worth::default().skip_bytes,
            deltas: Deltas::Auto,
            deltas_memory_mib: 16,
            soft_pages: SoftPages::Free,
        }
    }
}

/// How long to wait for what, in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// For a connection to a peer, handshake included.
    pub connect_ms: u64,
    /// A peer whose host says nothing for so long is taken for unreachable: connections are made anew.
    pub peer_silence_ms: u64,
    /// A destination whose host answers, but which takes no pages for so long, is taken for unreachable too. More than
    /// its storage ever stalls.
    pub stall_ms: u64,
    /// A stopped guest waits for the destination so much longer than everything should take; then it goes on here.
    pub standstill_ms: u64,
    /// Pause between two attempts to reach a peer or the register.
    pub retry_ms: u64,
    /// Before COMMITTED, a peer that cannot be reached for so long ends the migration; the VM stays at its source.
    pub give_up_after_ms: u64,
    /// After COMMITTED, a destination that cannot be reached for so long makes the source try to take the VM back
    /// through the register. Without a register it waits for an operator.
    pub reclaim_after_ms: u64,
    /// For QEMU's answer to a command.
    pub qmp_ms: u64,
    /// For an arriving VM's QEMU to come up.
    pub qemu_start_ms: u64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect_ms: 5_000,
            peer_silence_ms: 10_000,
            stall_ms: 60_000,
            standstill_ms: 5_000,
            retry_ms: 500,
            give_up_after_ms: 120_000,
            reclaim_after_ms: 60_000,
            qmp_ms: 10_000,
            qemu_start_ms: 30_000,
        }
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the configuration {path}; name another with --config, or begin with docs/agent.example.toml",
        path = path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Something in it is wrong.
    #[error("{path}, line {line}{key}: {what}", path = path.display(), key = in_key(key))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The key, as `table.key`; empty where the text is no TOML at all.
        key: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// A file that it names is missing or cannot be read.
    #[error("{path}, line {line}, key `{key}`: cannot read {file}", path = path.display(), file = file.display())]
    File {
        /// The configuration.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The key, as `table.key`.
        key: String,
        /// The file that it names.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn in_key(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!(", key `{key}`") }
}

impl Config {
    /// Reads and checks a file. Looks at nothing else: the files it names need not be there yet.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Checks a configuration's text. The path is for errors, and its directory for relative paths.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        file::parse(path, text)
    }

    /// Whether the files that the configuration names can be read, as `--check-config` wants to know.
    pub fn check_files(&self, path: &Path) -> Result<(), ConfigError> {
        let locator = std::fs::read_to_string(path).map(locate::Locator::new).unwrap_or_default();
        let mut files: Vec<(&[&str], &Path)> = Vec::new();
        if let Security::Tls { ca, certificate, key } = &self.security {
            files.push((&["tls", "ca"], ca));
            files.push((&["tls", "certificate"], certificate));
            files.push((&["tls", "key"], key));
        }
        if self.role == AgentRole::Host {
            files.extend(
                self.qemu.binaries.iter().map(|binary| (&["qemu", "binaries"][..], binary.as_path())),
            );
        }
        for (key, file) in files {
            std::fs::File::open(file).map_err(|source| ConfigError::File {
                path: path.to_owned(),
                line: locator.line_of(key),
                key: key.join("."),
                file: file.to_owned(),
                source,
            })?;
        }
        Ok(())
    }

    /// A peer's address; none for unknown names and for this host itself.
    pub fn peer(&self, name: &HostId) -> Option<&str> {
        self.hosts.get(name).filter(|_| *name != self.host).map(String::as_str)
    }

    /// The names of all peers.
    pub fn peers(&self) -> impl Iterator<Item = &HostId> {
        self.hosts.keys().filter(|name| **name != self.host)
    }
}

#[cfg(test)]
mod tests;
