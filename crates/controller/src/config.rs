//! The controller's configuration: one TOML file, read once at start.
//!
//! All keys with their meaning are in `docs/controller.example.toml`, which a test reads. Unknown keys are refused, and
//! errors name the file and the line.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use engine::evacuation::RetryLimits;
use engine::planner::MoveLimits;
use engine::planner::inventory::PlacementRules;
use link::TlsFiles;
use proto::{HostId, VmName};
use serde::{Deserialize, Serialize};

/// Default path of the configuration.
pub const DEFAULT_PATH: &str = "/etc/whimbrel/controller.toml";

/// A checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ControllerConfig {
    /// Name of the controller, which its certificate bears.
    pub name: HostId,
    /// Address for agents.
    pub listen: SocketAddr,
    /// Directory of the records; survives a reboot.
    pub state_dir: PathBuf,
    /// The API's socket.
    pub api_socket: PathBuf,
    /// Certificate, key and authority; none for connections without encryption.
    pub tls: Option<TlsFiles>,
    /// Hosts whose agents may connect; empty for all with a certificate of the authority.
    pub only_hosts: BTreeSet<HostId>,
    /// Properties of hosts that are not listed.
    pub fleet: HostDefaults,
    /// Limits of moves.
    pub limits: MoveLimits,
    /// Limits of repetitions and waits of evacuations.
    pub retries: RetryLimits,
    /// Properties of single hosts.
    pub hosts: BTreeMap<HostId, HostSettings>,
    /// Properties of single VMs.
    pub vms: BTreeMap<VmName, VmSettings>,
}

/// Properties of hosts that are not listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostDefaults {
    /// Rate of a host's link, in bytes per second.
    pub link_bytes_per_s: u64,
    /// Memory that guests do not get, in MiB.
    pub reserved_mib: u64,
}

impl Default for HostDefaults {
    /// A gigabit a second, and a gibibyte.
    fn default() -> Self {
        Self { link_bytes_per_s: 125_000_000, reserved_mib: 1024 }
    }
}

/// Properties of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostSettings {
    /// Rate of its link, in bytes per second.
    pub link_bytes_per_s: Option<u64>,
    /// Memory that guests do not get, in MiB.
    pub reserved_mib: Option<u64>,
    /// Zone of hosts that fail together.
    pub zone: Option<String>,
    /// Shared storage that it reaches, by name.
    pub storage: BTreeSet<String>,
    /// Networks that it offers to guests, by name.
    pub networks: BTreeSet<String>,
}

/// Properties of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmSettings {
    /// Needs all of its memory in one NUMA node.
    pub one_node: bool,
    /// Shared storage that it needs, by name.
    pub storage: BTreeSet<String>,
    /// Networks that it needs, by name.
    pub networks: BTreeSet<String>,
    /// Rules of its placement.
    pub rules: PlacementRules,
}

/// Reason for which a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ControllerConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the configuration {path}; name another file with --config, or start from \
         docs/controller.example.toml",
        path = path.display()
    )]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// A value in the file is invalid.
    #[error("{path}, line {line}: {what}", path = path.display())]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The problem, and advice.
        what: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ControllerFile {
    name: HostId,
    listen: SocketAddr,
    #[serde(default = "default_state_dir")]
    state_dir: PathBuf,
    #[serde(default = "default_socket")]
    api_socket: PathBuf,
    tls: toml::Spanned<TlsTable>,
    #[serde(default)]
    only_hosts: BTreeSet<HostId>,
    fleet: Option<toml::Spanned<HostDefaults>>,
    #[serde(default)]
    limits: MoveLimits,
    retries: Option<toml::Spanned<RetryLimits>>,
    #[serde(default)]
    hosts: BTreeMap<HostId, HostSettings>,
    #[serde(default)]
    vms: BTreeMap<VmName, VmSettings>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsTable {
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    #[serde(default)]
    plain: bool,
}

fn default_state_dir() -> PathBuf {
    PathBuf::from("/var/lib/whimbrel-controller")
}

fn default_socket() -> PathBuf {
    PathBuf::from("/run/whimbrel/controller.sock")
}

impl ControllerConfig {
    /// Reads and checks a file. Accesses no other file.
    pub fn load(path: &Path) -> Result<Self, ControllerConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ControllerConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Checks a configuration's text. The path is for errors, and its directory for relative paths.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ControllerConfigError> {
        let invalid = |offset: usize, what: String| ControllerConfigError::Invalid {
            path: path.to_owned(),
            line: 1 + text.get(..offset).unwrap_or(text).matches('\n').count(),
            what,
        };
        let file: ControllerFile = toml::from_str(text).map_err(|error| {
            let what = error.message().trim_end().replace('\n', ", ");
            invalid(error.span().map_or(0, |span| span.start), what)
        })?;
        let absolute = |file: PathBuf| {
            let joined = path.parent().unwrap_or(Path::new("/")).join(file);
            std::path::absolute(&joined).unwrap_or(joined)
        };
        let tls_at = file.tls.span().start;
        let tls = match file.tls.into_inner() {
            TlsTable { ca: None, certificate: None, key: None, plain: true } => None,
            TlsTable { ca: Some(ca), certificate: Some(certificate), key: Some(key), plain: false } => {
                Some(TlsFiles { ca: absolute(ca), certificate: absolute(certificate), key: absolute(key) })
            }
            _ => {
                let what = "[tls] needs `ca`, `certificate` and `key` (PEM files), or `plain = true` here and on all \
                            hosts in an isolated network";
                return Err(invalid(tls_at, what.to_owned()));
            }
        };
        let (fleet_at, fleet) =
            file.fleet.map_or_else(Default::default, |fleet| (fleet.span().start, fleet.into_inner()));
        let rates = file.hosts.values().filter_map(|host| host.link_bytes_per_s);
        if rates.chain([fleet.link_bytes_per_s]).any(|rate| rate == 0) {
            let what =
                "a `link_bytes_per_s` of 0 moves nothing; write the rate of the link in bytes per second";
            return Err(invalid(fleet_at, what.to_owned()));
        }
        let (retries_at, retries) = file
            .retries
            .map_or_else(Default::default, |retries| (retries.span().start, retries.into_inner()));
        for (key, is_zero) in [
            ("attempts", retries.attempts == 0),
            ("patience_s", retries.patience_s == 0),
            ("ask_s", retries.ask_s == 0),
        ] {
            if is_zero {
                return Err(invalid(retries_at, format!("`{key}` under [retries] is 0; write at least 1")));
            }
        }
        Ok(Self {
            name: file.name,
            listen: file.listen,
            state_dir: absolute(file.state_dir),
            api_socket: absolute(file.api_socket),
            tls,
            only_hosts: file.only_hosts,
            fleet,
            limits: file.limits,
            retries,
            hosts: file.hosts,
            vms: file.vms,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "name = \"control\"\nlisten = \"127.0.0.1:7742\"\n[tls]\nplain = true\n";

    fn parse(text: &str) -> Result<ControllerConfig, ControllerConfigError> {
        ControllerConfig::parse(Path::new("/etc/whimbrel/controller.toml"), text)
    }

    fn example() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/controller.example.toml");
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn the_least_configuration_has_the_documented_defaults() {
        let config = parse(LEAST).unwrap();
        assert_eq!(config.tls, None);
        assert_eq!(config.state_dir, PathBuf::from("/var/lib/whimbrel-controller"));
        assert_eq!(config.api_socket, PathBuf::from("/run/whimbrel/controller.sock"));
        assert_eq!((config.fleet, config.limits), (HostDefaults::default(), MoveLimits::default()));
    }

    #[test]
    fn the_example_is_right_and_names_every_key() {
        let plain = parse(&example()).unwrap();
        assert_eq!(plain.name.as_str(), "control");
        assert_eq!(plain.tls.as_ref().unwrap().ca, Path::new("/etc/whimbrel/ca.pem"), "relative to the file");
        let is_key = |rest: &str| rest.contains(" = ") || (rest.starts_with('[') && rest.ends_with(']'));
        let all: String = example()
            .lines()
            .map(|line| match line.strip_prefix('#').filter(|rest| !rest.starts_with(' ') && is_key(rest)) {
                Some("plain = true") => String::new(),
                Some(rest) => format!("{rest}\n"),
                None => format!("{line}\n"),
            })
            .collect();
        let mut shown = parse(&all).unwrap();
        assert_eq!((shown.hosts.len(), shown.vms.len(), shown.only_hosts.len()), (1, 1, 2));
        // Commented keys have their defaults, but for the maps and lists, which have none.
        shown.hosts.clear();
        shown.vms.clear();
        shown.only_hosts.clear();
        shown.limits.bytes_per_s = None;
        assert_eq!(shown, plain);
        let texts = [
            toml::to_string(&MoveLimits { bytes_per_s: Some(1), ..MoveLimits::default() }).unwrap(),
            toml::to_string(&RetryLimits::default()).unwrap(),
            toml::to_string(&HostDefaults::default()).unwrap(),
        ];
        for line in texts.iter().flat_map(|text| text.lines()) {
            let (key, _) = line.split_once(" =").unwrap();
            assert!(all.contains(&format!("\n{key} = ")), "{key} is missing in docs/controller.example.toml");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, line, word) in [
            ("name = \"a b\"\nlisten = \"127.0.0.1:1\"\n[tls]\nplain = true", 1, "letters, digits"),
            ("name = \"a\"\nlisten = \"nowhere\"\n[tls]\nplain = true", 2, "socket address"),
            ("name = \"a\"\nlisten = \"127.0.0.1:1\"\n[tls]\nca = \"ca.pem\"", 3, "needs `ca`"),
            (&format!("{LEAST}[fleet]\nlink_bytes_per_s = 0"), 5, "moves nothing"),
            (&format!("{LEAST}[retries]\nattempts = 0"), 5, "`attempts`"),
            (&format!("{LEAST}[retries]\npatience_s = 0"), 5, "`patience_s`"),
            (&format!("{LEAST}[retries]\nask_s = 0"), 5, "`ask_s`"),
            (&format!("{LEAST}[vms.web]\nrules = {{ pined = true }}"), 6, "unknown field"),
            (&format!("{LEAST}colour = 1"), 5, "unknown field"),
        ] {
            let error = parse(text).unwrap_err();
            let ControllerConfigError::Invalid { line: found, what, .. } = &error else { panic!("{error}") };
            assert_eq!(*found, line, "{error}");
            assert!(what.contains(word), "{error}");
        }
    }
}
