//! The format of the file, and the checks that turn it into a [`Config`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use api::MigrationSettings;
use block::volume::VolumeGroup;
use dns::{DnsConfig, DnsConfigError};
use proto::HostId;
use serde::Deserialize;

use super::locate::Locator;
use super::{
    AgentRole, Config, ConfigError, ControllerConfig, ForecastConfig, Pool, PoolFormat, QemuConfig,
    RedirectionConfig, Security, Storage, Timeouts, Tuning,
};
use crate::pool::THIN_KEEP_FREE_PERCENT;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    host: HostId,
    #[serde(default)]
    role: AgentRole,
    listen: String,
    #[serde(default = "default_state_dir")]
    state_dir: PathBuf,
    #[serde(default = "default_run_dir")]
    run_dir: PathBuf,
    log_dir: Option<PathBuf>,
    api_socket: Option<PathBuf>,
    #[serde(default)]
    tls: Tls,
    #[serde(default)]
    hosts: BTreeMap<HostId, PeerTable>,
    registry: Option<Registry>,
    controller: Option<ControllerConfig>,
    #[serde(default)]
    qemu: QemuConfig,
    #[serde(default)]
    network: Network,
    #[serde(default)]
    disks: Disks,
    #[serde(default)]
    dns: DnsConfig,
    #[serde(default)]
    migration: MigrationSettings,
    #[serde(default)]
    tuning: Tuning,
    #[serde(default)]
    forecast: ForecastConfig,
    #[serde(default)]
    timeouts: Timeouts,
    faults: Option<FaultsTable>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tls {
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    #[serde(default)]
    plain: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerTable {
    address: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Registry {
    host: HostId,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Network {
    taps: BTreeMap<String, String>,
    redirection: RedirectionConfig,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Disks {
    dirs: BTreeMap<PathBuf, PathBuf>,
    shared: Vec<String>,
    pool: Option<PoolTable>,
    templates: Vec<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolTable {
    directory: Option<PathBuf>,
    volume_group: Option<String>,
    thin_pool: Option<String>,
    format: Option<PoolFormat>,
    keep_free_percent: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultsTable {
    socket: PathBuf,
}

fn default_state_dir() -> PathBuf {
    PathBuf::from("/var/lib/whimbrel")
}

fn default_run_dir() -> PathBuf {
    PathBuf::from("/run/whimbrel")
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
    let checks = Checks { path, locator: Locator::new(text) };
    let file: ConfigFile = toml::from_str(text).map_err(|error| checks.not_understood(&error))?;
    checks.all(file)
}

/// True if two paths lead to one directory, or would.
fn is_same_directory(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.components().collect());
    resolved(one) == resolved(other)
}

/// Data that the checks need in order to report the location of a value.
struct Checks<'a> {
    path: &'a Path,
    locator: Locator,
}

impl Checks<'_> {
    fn not_understood(&self, error: &toml::de::Error) -> ConfigError {
        let offset = error.span().map_or(0, |span| span.start);
        let mut what = error.message().trim_end().replace('\n', ", ");
        if let Some(name) = self.locator.host_with_dots() {
            let _ = write!(what, "; put a name with a dot in quotes: [hosts.\"{name}\"]");
        }
        // A key that is missing at the top level is not missing in the first key.
        let nowhere = offset == 0 && what.starts_with("missing");
        ConfigError::Invalid {
            path: self.path.to_owned(),
            line: self.locator.line_at(offset),
            key: if nowhere { String::new() } else { self.locator.key_at(offset) },
            what,
        }
    }

    fn wrong(&self, key: &[&str], what: impl Into<String>) -> ConfigError {
        ConfigError::Invalid {
            path: self.path.to_owned(),
            line: self.locator.line_of(key),
            key: key.join("."),
            what: what.into(),
        }
    }

    fn all(&self, file: ConfigFile) -> Result<Config, ConfigError> {
        let run_dir = self.absolute(file.run_dir);
        let api_socket =
            file.api_socket.map_or_else(|| run_dir.join("agent.sock"), |socket| self.absolute(socket));
        let state_dir = self.absolute(file.state_dir);
        let log_dir = file.log_dir.map_or_else(|| state_dir.join("logs"), |dir| self.absolute(dir));
        let listen: SocketAddr = file.listen.parse().map_err(|_| {
            let what = format!(
                "{:?} is not an address to listen on; write ADDRESS:PORT with an IP address, e.g. \
                 \"0.0.0.0:7740\"",
                file.listen
            );
            self.wrong(&["listen"], what)
        })?;
        let security = self.security(file.tls)?;
        let registry = file.registry.map(|registry| registry.host);
        let hosts = self.hosts(file.hosts)?;
        self.registry(&file.host, file.role, registry.as_ref(), &hosts)?;
        if let Some(controller) = &file.controller {
            self.address(&["controller", "address"], &controller.address)?;
        }
        file.migration
            .check_configured()
            .map_err(|invalid| self.wrong(&["migration", invalid.option], invalid.to_string()))?;
        self.tuning(&file.tuning)?;
        self.forecast(&file.forecast)?;
        self.timeouts(&file.timeouts)?;
        if file.qemu.binaries.is_empty() {
            return Err(
                self.wrong(&["qemu", "binaries"], "names no QEMU; omit it to use the distribution's QEMU")
            );
        }
        let config = Config {
            host: file.host,
            role: file.role,
            listen,
            state_dir,
            run_dir,
            log_dir,
            api_socket,
            security,
            hosts,
            registry,
            controller: file.controller,
            qemu: QemuConfig {
                binaries: file.qemu.binaries.into_iter().map(|binary| self.absolute(binary)).collect(),
                data_dirs: file.qemu.data_dirs.into_iter().map(|dir| self.absolute(dir)).collect(),
                allow_options: file.qemu.allow_options,
            },
            taps: file.network.taps,
            redirection: self.redirection(file.network.redirection)?,
            disk_dirs: self.disk_dirs(file.disks.dirs)?,
            disks_shared: self.disks_shared(file.disks.shared)?,
            pool: file.disks.pool.map(|pool| self.pool(pool)).transpose()?,
            templates: file.disks.templates.into_iter().map(|path| self.absolute(path)).collect(),
            dns: self.dns(file.dns)?,
            migration: file.migration,
            tuning: file.tuning,
            forecast: file.forecast,
            timeouts: file.timeouts,
            fault_socket: file.faults.map(|faults| self.absolute(faults.socket)),
        };
        self.directories(&config)?;
        Ok(config)
    }

    /// Directories in which the agent removes files belong to one purpose each.
    fn directories(&self, config: &Config) -> Result<(), ConfigError> {
        let pool = match config.pool.as_ref().map(|pool| &pool.storage) {
            Some(Storage::Directory { path, .. }) => Some(path.as_path()),
            _ => None,
        };
        let mut used: Vec<(&[&str], &Path)> =
            vec![(&["state_dir"], &config.state_dir), (&["run_dir"], &config.run_dir)];
        used.extend(pool.map(|path| (&["disks", "pool", "directory"][..], path)));
        used.extend(config.templates.iter().map(|path| (&["disks", "templates"][..], path.as_path())));
        for (number, (key, path)) in used.iter().enumerate() {
            if path.parent().is_none() {
                return Err(self.wrong(key, "cannot be /: name a directory that has no other use"));
            }
            let same = |(_, other): &&(&[&str], &Path)| is_same_directory(path, other);
            if let Some((other, _)) = used[..number].iter().find(same)
                && key != other
            {
                let what =
                    format!("is also the directory of `{}`: each needs a separate one", other.join("."));
                return Err(self.wrong(key, what));
            }
        }
        Ok(())
    }

    /// Makes a path absolute: relative paths are relative to the directory of the file.
    fn absolute(&self, path: PathBuf) -> PathBuf {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let joined = directory.join(path);
        std::path::absolute(&joined).unwrap_or(joined)
    }

    fn security(&self, tls: Tls) -> Result<Security, ConfigError> {
        match tls {
            Tls { ca: None, certificate: None, key: None, plain: true } => Ok(Security::Plain),
            Tls { plain: true, .. } => Err(self.wrong(
                &["tls", "plain"],
                "conflicts with certificates; remove it, or remove `ca`, `certificate` and `key`",
            )),
            Tls { ca: Some(ca), certificate: Some(certificate), key: Some(key), plain: false } => {
                Ok(Security::Tls {
                    ca: self.absolute(ca),
                    certificate: self.absolute(certificate),
                    key: self.absolute(key),
                })
            }
            _ => Err(self.wrong(
                &["tls"],
                "needs `ca`, `certificate` and `key` (PEM files), or `plain = true` on all hosts in an \
                 isolated network",
            )),
        }
    }

    fn hosts(&self, peers: BTreeMap<HostId, PeerTable>) -> Result<BTreeMap<HostId, String>, ConfigError> {
        peers
            .into_iter()
            .map(|(name, PeerTable { address })| {
                self.address(&["hosts", name.as_str(), "address"], &address)?;
                Ok((name, address))
            })
            .collect()
    }

    fn address(&self, key: &[&str], address: &str) -> Result<(), ConfigError> {
        let good = address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0));
        if good {
            return Ok(());
        }
        Err(self.wrong(
            key,
            format!("{address:?} is not an address; write \"HOST:PORT\", e.g. \"192.0.2.2:7740\""),
        ))
    }

    fn registry(
        &self,
        host: &HostId,
        role: AgentRole,
        registry: Option<&HostId>,
        hosts: &BTreeMap<HostId, String>,
    ) -> Result<(), ConfigError> {
        let Some(registry) = registry else { return Ok(()) };
        let key = ["registry", "host"];
        if role == AgentRole::Witness {
            return Err(self
                .wrong(&key, "a witness keeps the ownership registry itself; remove [registry] or `role`"));
        }
        if registry == host {
            return Err(self.wrong(
                &key,
                "the ownership registry cannot be on a host that runs VMs: it must be available when this \
                 host fails; name a third host whose agent has `role = \"witness\"`",
            ));
        }
        if !hosts.contains_key(registry) {
            let what =
                format!("{registry} is not among the hosts; add [hosts.{registry}] with its `address`");
            return Err(self.wrong(&key, what));
        }
        Ok(())
    }

    fn disk_dirs(&self, dirs: BTreeMap<PathBuf, PathBuf>) -> Result<BTreeMap<PathBuf, PathBuf>, ConfigError> {
        for (from, to) in &dirs {
            if !from.is_absolute() || !to.is_absolute() {
                let key = from.to_string_lossy();
                return Err(self.wrong(&["disks", "dirs", &key], "both directories must be absolute paths"));
            }
        }
        Ok(dirs)
    }

    fn pool(&self, pool: PoolTable) -> Result<Pool, ConfigError> {
        let wrong = |key: &str, what: &str| Err(self.wrong(&["disks", "pool", key], what));
        // LVM allows these characters in names; and a name with a leading hyphen would be an option of its programs.
        let is_name = |name: &String| {
            let known = |letter: char| letter.is_ascii_alphanumeric() || "+_.-".contains(letter);
            !name.is_empty() && !name.starts_with(['-', '.']) && name.chars().all(known)
        };
        let PoolTable { directory, volume_group, thin_pool, format, keep_free_percent } = pool;
        let usual_percent = if thin_pool.is_some() { THIN_KEEP_FREE_PERCENT } else { 0 };
        let keep_free_percent = keep_free_percent.map_or(Ok(usual_percent), u8::try_from);
        let Some(keep_free_percent) = keep_free_percent.ok().filter(|percent| *percent < 100) else {
            return Err(self.wrong(&["disks", "pool", "keep_free_percent"], "must be 0 to 99"));
        };
        let pool = |storage| Ok(Pool { storage, keep_free_percent });
        match (directory, volume_group) {
            (Some(path), None) if !path.is_absolute() => {
                wrong("directory", "the directory must be an absolute path")
            }
            (Some(_), None) if thin_pool.is_some() => wrong("thin_pool", "requires a `volume_group`"),
            (Some(path), None) => pool(Storage::Directory { path, format: format.unwrap_or_default() }),
            (None, Some(name)) if !is_name(&name) => {
                wrong("volume_group", "is not a valid name of a volume group")
            }
            (None, Some(_)) if thin_pool.as_ref().is_some_and(|pool| !is_name(pool)) => {
                wrong("thin_pool", "is not a valid name of a thin pool")
            }
            (None, Some(_)) if !matches!(format, None | Some(PoolFormat::Raw)) => {
                wrong("format", "volumes hold raw data; write \"raw\", or omit it")
            }
            (None, Some(name)) => pool(Storage::Volumes(VolumeGroup { name, thin_pool })),
            _ => Err(self.wrong(&["disks", "pool"], "needs either a `directory` or a `volume_group`")),
        }
    }

    fn disks_shared(&self, shared: Vec<String>) -> Result<Vec<String>, ConfigError> {
        match shared.iter().find(|word| !word.starts_with('/') && !word.contains(':')) {
            Some(word) => Err(self
                .wrong(&["disks", "shared"], format!("{word:?} is neither an absolute path nor an address"))),
            None => Ok(shared),
        }
    }

    fn redirection(&self, config: RedirectionConfig) -> Result<RedirectionConfig, ConfigError> {
        let wrong = |key, what: &str| Err(self.wrong(&["network", "redirection", key], what));
        if config.port == 0 {
            return wrong("port", "0 is no port; choose one that is free on all hosts");
        }
        if config.port.checked_add(RedirectionConfig::WIREGUARD_PORTS).is_none() {
            return wrong("port", "the 99 ports behind it are needed, too; choose one up to 65436");
        }
        if config.longest_s == 0 || config.longest_s < config.least_s {
            return wrong("longest_s", "must be at least `least_s`, and not 0");
        }
        Ok(config)
    }

    fn dns(&self, mut dns: DnsConfig) -> Result<DnsConfig, ConfigError> {
        dns.check().map_err(|error| {
            let key: &[&str] = match &error {
                DnsConfigError::NoZone { vm, .. } | DnsConfigError::SameService { vm, .. } => {
                    &["dns", "vms", vm]
                }
                DnsConfigError::NoServer(_)
                | DnsConfigError::SameZone(_)
                | DnsConfigError::LoweredTtl { .. } => &["dns", "zones"],
            };
            self.wrong(key, error.to_string())
        })?;
        for zone in &mut dns.zones {
            zone.key_file = self.absolute(std::mem::take(&mut zone.key_file));
        }
        Ok(dns)
    }

    fn forecast(&self, forecast: &ForecastConfig) -> Result<(), ConfigError> {
        let every_s = forecast.measure_every_s;
        if (1..ForecastConfig::LEAST_EVERY_S).contains(&every_s) {
            let what = format!("{every_s} seconds are too short; choose at least an hour (3600), or 0");
            return Err(self.wrong(&["forecast", "measure_every_s"], what));
        }
        Ok(())
    }

    fn tuning(&self, tuning: &Tuning) -> Result<(), ConfigError> {
        let wrong = |key, what: String| Err(self.wrong(&["tuning", key], what));
        let ratio = tuning.compression_least_ratio_percent;
        if !(100..=1000).contains(&ratio) {
            let what = format!("{ratio}% is not a compression ratio; choose 100 to 1000");
            return wrong("compression_least_ratio_percent", what);
        }
        if tuning.deltas_memory_mib > 1 << 20 {
            let what =
                format!("{} MiB are more than a host has; choose at most 1048576", tuning.deltas_memory_mib);
            return wrong("deltas_memory_mib", what);
        }
        if tuning.guest_wait_percent > 100 {
            let what = format!("{} hundredths; choose 1 to 100, or 0", tuning.guest_wait_percent);
            return wrong("guest_wait_percent", what);
        }
        self.check_sampling(tuning)
    }

    fn check_sampling(&self, l: &Tuning) -> Result<(), ConfigError> {
        let wrong = |key, what: String| Err(self.wrong(&["tuning", key], what));
        if l.sampling_ms != 0 && !(10..=60_000).contains(&l.sampling_ms) {
            return wrong("sampling_ms", format!("{} ms; choose 10 to 60000, or 0", l.sampling_ms));
        }
        if !(1..=100).contains(&l.stable_window) {
            return wrong("stable_window", format!("{} scans; choose 1 to 100", l.stable_window));
        }
        for (key, percent) in [("stable_percent", l.stable_percent), ("resent_percent", l.resent_percent)] {
            if !(1..=100).contains(&percent) {
                return wrong(key, format!("{percent} hundredths; choose 1 to 100"));
            }
        }
        if l.resent_rounds > 16 {
            let what = format!("{} rounds; choose at most 16: each takes memory", l.resent_rounds);
            return wrong("resent_rounds", what);
        }
        Ok(())
    }

    fn timeouts(&self, t: &Timeouts) -> Result<(), ConfigError> {
        let Timeouts {
            connect_ms,
            peer_silence_ms,
            stall_ms,
            standstill_ms,
            retry_ms,
            give_up_after_ms,
            reclaim_after_ms,
            qmp_ms,
            qemu_start_ms,
        } = *t;
        let all = [
            ("connect_ms", connect_ms),
            ("peer_silence_ms", peer_silence_ms),
            ("stall_ms", stall_ms),
            ("standstill_ms", standstill_ms),
            ("retry_ms", retry_ms),
            ("give_up_after_ms", give_up_after_ms),
            ("reclaim_after_ms", reclaim_after_ms),
            ("qmp_ms", qmp_ms),
            ("qemu_start_ms", qemu_start_ms),
        ];
        match all.into_iter().find(|(_, ms)| *ms == 0) {
            Some((name, _)) => Err(self.wrong(&["timeouts", name], "cannot be 0; it is in milliseconds")),
            None => Ok(()),
        }
    }
}
