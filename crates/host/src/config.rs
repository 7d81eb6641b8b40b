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
//! Everything else has a default. All keys with their meaning are in `docs/agent.example.toml`, which a test reads.
//! Unknown keys are refused, and every error names the file, the line and the key, and has advice.

mod controller;
mod file;
mod locate;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use dns::{DnsConfig, Zones};
use engine::pre_copy::Sampling;
use net::redirection::teardown::TeardownLimits;
use net::redirection::tunnel::TunnelPorts;
use proto::HostId;
use serde::{Deserialize, Serialize};

pub use crate::pool::{Pool, PoolFormat, Storage};
use api::MigrationSettings;
pub use controller::ControllerConfig;

/// Default path of the configuration.
pub const DEFAULT_PATH: &str = "/etc/whimbrel/agent.toml";

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// This host's name.
    pub host: HostId,
    /// Role of this agent.
    pub role: AgentRole,
    /// Address for peers.
    pub listen: SocketAddr,
    /// Directory of the journal and the ownership registry; survives a reboot.
    pub state_dir: PathBuf,
    /// Directory of the sockets of running QEMUs and agents.
    pub run_dir: PathBuf,
    /// Directory of the human-readable files that QEMU writes (serial ports, logs) of arrived VMs.
    pub log_dir: PathBuf,
    /// The API's socket.
    pub api_socket: PathBuf,
    /// Security of connections between agents.
    pub security: Security,
    /// The other agents, by name, with their address as `host:port`. May hold this host too, so that all hosts can
    /// share one table; see [`Config::peer`].
    pub hosts: BTreeMap<HostId, String>,
    /// The witness that keeps the ownership registry; none if there is no registry. Always a key of `hosts`, never this
    /// host.
    pub registry: Option<HostId>,
    /// The controller to which the agent connects; none if there is no controller.
    pub controller: Option<ControllerConfig>,
    /// Settings for QEMU.
    pub qemu: QemuConfig,
    /// Taps and bridges of arriving VMs: name at the source → name here.
    pub taps: BTreeMap<String, String>,
    /// Settings for VMs that move to another network.
    pub redirection: RedirectionConfig,
    /// Directories of disks of arriving VMs: path at the source → path here. Longest prefix wins.
    pub disk_dirs: BTreeMap<PathBuf, PathBuf>,
    /// Directories, files and addresses of disks of arriving VMs that mean the same storage here as at the source.
    pub disks_shared: Vec<String>,
    /// Pool for images of copied disks of arriving VMs; none if disks cannot be copied to this host.
    pub pool: Option<Pool>,
    /// Images, or directories of them, that disks of arriving VMs may have content in common with.
    pub templates: Vec<PathBuf>,
    /// Zones of DNS, and the names of VMs there, which change when a VM moves to another network.
    pub dns: DnsConfig,
    /// Options of migrations from here, unless a request overrides them.
    pub migration: MigrationSettings,
    /// Fine adjustment of migrations from here.
    pub tuning: Tuning,
    /// Forecasts of migrations from here.
    pub forecast: ForecastConfig,
    /// Time-outs.
    pub timeouts: Timeouts,
    /// Socket of a test harness that is asked at every fault point. For tests of this program only: a program that
    /// listens there decides when the agent is killed.
    pub fault_socket: Option<PathBuf>,
}

/// Role of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentRole {
    /// Runs VMs and moves them.
    #[default]
    Host,
    /// Keeps the ownership registry and nothing else.
    Witness,
}

impl AgentRole {
    /// Returns the role's word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Witness => "witness",
        }
    }
}

/// Security of connections between agents. Both sides need the same setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// TLS 1.3, certificates on both sides. PEM files.
    Tls {
        /// The authority that signed all agents' certificates.
        ca: PathBuf,
        /// This agent's certificate.
        certificate: PathBuf,
        /// This agent's private key.
        key: PathBuf,
    },
    /// No security: guest memory crosses the network readable, and any host that can connect to the port may send a VM.
    Plain,
}

/// Settings for QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QemuConfig {
    /// QEMU binaries for arriving VMs, first choice first. The first of those with the source's version or a newer one
    /// is used.
    pub binaries: Vec<PathBuf>,
    /// Directories of their firmware (`-L`), for QEMU binaries that are not in the place for which they were built.
    pub data_dirs: Vec<PathBuf>,
    /// Unknown options of QEMU's command line that are copied unchanged.
    pub allow_options: Vec<String>,
}

impl Default for QemuConfig {
    fn default() -> Self {
        Self {
            binaries: vec![PathBuf::from("/usr/bin/qemu-system-x86_64")],
            data_dirs: Vec::new(),
            allow_options: Vec::new(),
        }
    }
}

/// Fine adjustment of migrations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tuning {
    /// Longest time between two dirty scans, after the first pass, in milliseconds; 0 to derive it from the link's
    /// rate.
    pub sampling_ms: u64,
    /// Number of scans over which the number of modified pages is averaged.
    pub stable_window: u32,
    /// Largest change from scan to scan, in hundredths of the pages sent in between, that counts as stable.
    pub stable_percent: u32,
    /// Share of recently sent pages among the sent pages, in hundredths, from which the guest counts as writing to the
    /// same pages again and again.
    pub resent_percent: u32,
    /// Number of previous rounds that count as recent.
    pub resent_rounds: u32,
    /// Additional share of the time for which a guest may wait for a processor during the copy, in hundredths, before
    /// copying gives way more; 0 to disable this.
    pub guest_wait_percent: u32,
    /// Smallest ratio of the data's size to its compressed size, in percent, for which data is compressed.
    pub compression_least_ratio_percent: u32,
    /// Bytes of each stream that are sent uncompressed after data that compressed less.
    pub compression_skip_bytes: u64,
    /// Memory of the source for marks of sent pages, from which deltas are computed, in MiB: 1 MiB is enough for 32 MiB
    /// of memory.
    pub deltas_memory_mib: u32,
}

impl Tuning {
    /// Returns the settings of dirty scans.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            interval_ns: self.sampling_ms.saturating_mul(1_000_000),
            window: self.stable_window,
            stable_percent: self.stable_percent,
            resent_percent: self.resent_percent,
            history: self.resent_rounds,
        }
    }

    /// Returns the thresholds for compression.
    pub fn worth(&self) -> memory::CompressionCriteria {
        memory::CompressionCriteria {
            least_ratio_percent: self.compression_least_ratio_percent,
            skip_bytes: self.compression_skip_bytes,
        }
    }

    /// Returns the size of the memory for marks of sent pages, in bytes.
    pub fn deltas_bytes(&self) -> usize {
        (self.deltas_memory_mib as usize) << 20
    }
}

impl Default for Tuning {
    fn default() -> Self {
        let sampling = Sampling::default();
        let worth = memory::CompressionCriteria::default();
        Self {
            sampling_ms: sampling.interval_ns / 1_000_000,
            stable_window: sampling.window,
            stable_percent: sampling.stable_percent,
            resent_percent: sampling.resent_percent,
            resent_rounds: sampling.history,
            guest_wait_percent: 5,
            compression_least_ratio_percent: worth.least_ratio_percent,
            compression_skip_bytes: worth.skip_bytes,
            deltas_memory_mib: 16,
        }
    }
}

/// Settings for VMs that move to another network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedirectionConfig {
    /// True if only the hosts' owners can read or forge packets between them: tunnels need no encryption.
    pub trusted_path: bool,
    /// First port of UDP for tunnels: that of all VXLANs. Each tunnel of `WireGuard` has one of the next ones.
    pub port: u16,
    /// Least age of a redirection, in seconds: names are resolved to the old address for so long.
    pub least_s: u64,
    /// Time without any connection by the old address after which a redirection ends, in seconds.
    pub quiet_s: u64,
    /// Greatest age of a redirection, in seconds.
    pub longest_s: u64,
}

impl RedirectionConfig {
    /// Number of ports for tunnels of `WireGuard`.
    pub(crate) const WIREGUARD_PORTS: u16 = 99;

    /// Returns the ports of UDP for tunnels.
    pub fn ports(&self) -> TunnelPorts {
        let first = self.port.saturating_add(1);
        TunnelPorts { vxlan: self.port, wireguard: [first, self.port.saturating_add(Self::WIREGUARD_PORTS)] }
    }
}

impl Default for RedirectionConfig {
    fn default() -> Self {
        let TeardownLimits { least, quiet, longest } = TeardownLimits::default();
        Self {
            trusted_path: false,
            port: 7741,
            least_s: least.as_secs(),
            quiet_s: quiet.as_secs(),
            longest_s: longest.as_secs(),
        }
    }
}

/// Settings for forecasts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForecastConfig {
    /// Interval at which all VMs are measured, in seconds; 0 to measure a VM only when a forecast is requested.
    pub measure_every_s: u64,
}

impl ForecastConfig {
    /// Shortest interval, in seconds.
    pub(crate) const LEAST_EVERY_S: u64 = 3600;
}

/// Time-outs, in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Connection to a peer, including the handshake.
    pub connect_ms: u64,
    /// Silence of a peer's host after which the peer counts as unreachable: connections are made anew.
    pub peer_silence_ms: u64,
    /// Time after which a destination whose host answers, but which accepts no pages, counts as unreachable too. Must
    /// be longer than any stall of its storage.
    pub stall_ms: u64,
    /// Additional time, beyond the expected one, for which a stopped guest waits for the destination; then it goes on
    /// here.
    pub standstill_ms: u64,
    /// Pause between two attempts to reach a peer or the ownership registry.
    pub retry_ms: u64,
    /// Before COMMITTED, time without contact to the peer after which the migration ends; the VM stays at its source.
    pub give_up_after_ms: u64,
    /// After COMMITTED, time without contact to the destination after which the source tries to reclaim the VM through
    /// the ownership registry. Without a registry it waits for an operator.
    pub reclaim_after_ms: u64,
    /// QEMU's answer to a command.
    pub qmp_ms: u64,
    /// Start of an arriving VM's QEMU.
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

/// Reason for which a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the configuration {path}; name another file with --config, or start from docs/agent.example.toml",
        path = path.display()
    )]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// A value in the file is invalid.
    #[error("{path}, line {line}{key}: {what}", path = path.display(), key = in_key(key))]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The key, as `table.key`; empty if the text is not TOML at all.
        key: String,
        /// The problem, and advice.
        what: String,
    },
    /// A file that the configuration names is missing or cannot be read.
    #[error("{path}, line {line}, key `{key}`: cannot read {file}", path = path.display(), file = file.display())]
    File {
        /// Path of the configuration.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The key, as `table.key`.
        key: String,
        /// Path of the named file.
        file: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
}

fn in_key(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!(", key `{key}`") }
}

impl Config {
    /// Reads and checks a file. Accesses no other file: the files that it names need not exist yet.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Checks a configuration's text. The path is for errors, and its directory for relative paths.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        file::parse(path, text)
    }

    /// Checks that the files that the configuration names can be read, for `--check-config`.
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
        if let Some((zone, reason)) = Zones::load(&self.dns.zones).unusable().next() {
            return Err(ConfigError::Invalid {
                path: path.to_owned(),
                line: locator.line_of(&["dns", "zones"]),
                key: "dns.zones".to_owned(),
                what: format!("{zone}: {reason}"),
            });
        }
        Ok(())
    }

    /// Returns a peer's address; none for unknown names and for this host itself.
    pub fn peer(&self, name: &HostId) -> Option<&str> {
        self.hosts.get(name).filter(|_| *name != self.host).map(String::as_str)
    }

    /// Returns the names of all peers.
    pub fn peers(&self) -> impl Iterator<Item = &HostId> {
        self.hosts.keys().filter(|name| **name != self.host)
    }
}

#[cfg(test)]
mod tests;
