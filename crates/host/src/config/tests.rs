use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::*;
use api::OnLimit;

const HERE: &str = "/etc/whimbrel/agent.toml";

const LEAST: &str = "host = \"alpha\"\nlisten = \"127.0.0.1:7740\"\n[tls]\nplain = true\n";

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new(HERE), text)
}

fn example() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/agent.example.toml")).unwrap()
}

/// Returns the example with every key set that it has commented out.
fn example_with_all_keys() -> String {
    let mut in_comment = String::new();
    for line in example().lines() {
        let is_key = |rest: &str| rest.contains(" = ") || (rest.starts_with('[') && rest.ends_with(']'));
        match line.strip_prefix('#').filter(|rest| !rest.starts_with(' ') && is_key(rest)) {
            Some("plain = true") => {}
            Some(rest) => in_comment.push_str(rest),
            None => in_comment.push_str(line),
        }
        in_comment.push('\n');
    }
    in_comment
}

#[test]
fn the_least_configuration_has_the_documented_defaults() {
    let config = parse(LEAST).unwrap();
    assert_eq!(config.security, Security::Plain);
    assert_eq!(config.state_dir, PathBuf::from("/var/lib/whimbrel"));
    assert_eq!(config.api_socket, PathBuf::from("/run/whimbrel/agent.sock"));
    assert_eq!((config.migration.max_downtime_ms, config.migration.on_limit), (300, OnLimit::Abort));
    assert_eq!((config.role, config.registry, config.fault_socket), (AgentRole::Host, None, None));
}

#[test]
fn the_example_is_right_and_shows_the_defaults() {
    let plain = parse(&example()).unwrap();
    assert_eq!(plain.host.as_str(), "alpha");
    assert_eq!(plain.registry, None);
    let Security::Tls { ca, .. } = &plain.security else { panic!("the example has certificates") };
    assert_eq!(ca, Path::new("/etc/whimbrel/ca.pem"), "relative to the file");

    // Commented keys have their defaults, but for the maps and the fault socket, which have none.
    let mut all = parse(&example_with_all_keys()).unwrap();
    assert_eq!(all.registry.take().as_ref().map(HostId::as_str), Some("gamma"));
    let controller = all.controller.take().unwrap();
    assert_eq!((controller.name.as_str(), controller.namespaces_are_hosts), ("control", false));
    assert_eq!(all.taps.len(), 1);
    assert_eq!(all.disk_dirs.len(), 1);
    assert_eq!(all.disks_shared.len(), 2);
    let path = PathBuf::from("/var/lib/whimbrel/disks");
    let storage = Storage::Directory { path, format: PoolFormat::Same };
    assert_eq!(all.pool.take(), Some(Pool { storage, keep_free_percent: 0 }));
    assert_eq!(all.templates.len(), 1);
    let dns = std::mem::take(&mut all.dns);
    assert_eq!(dns.zones[0].key_file, Path::new("/etc/whimbrel/dns-example.key"), "relative to the file");
    let (zone, vm) = (&dns.zones[0], &dns.vms["web1"]);
    assert_eq!((zone.lowered_ttl_s, zone.new_ttl_s, vm.names.len(), vm.services.len()), (5, 300, 1, 1));
    let DnsConfig { check, restore_after_s, .. } = DnsConfig::default();
    assert_eq!((dns.check, dns.restore_after_s), (check, restore_after_s));
    assert!(all.fault_socket.is_some());
    all.templates.clear();
    all.disks_shared.clear();
    all.taps.clear();
    all.disk_dirs.clear();
    all.fault_socket = None;
    assert_eq!(all, plain);
}

#[test]
fn the_example_names_every_key() {
    let text = example_with_all_keys();
    let qemu = toml::to_string(&QemuConfig::default()).unwrap();
    let migration = toml::to_string(&MigrationSettings::default()).unwrap();
    let tuning = toml::to_string(&Tuning::default()).unwrap();
    let timeouts = toml::to_string(&Timeouts::default()).unwrap();
    let forecast = toml::to_string(&ForecastConfig::default()).unwrap();
    for line in [qemu, migration, tuning, forecast, timeouts].iter().flat_map(|text| text.lines()) {
        let (key, _) = line.split_once(" =").unwrap();
        assert!(text.contains(&format!("\n{key} = ")), "{key} is missing in docs/agent.example.toml");
    }
}

/// Text, the line and key that the error has to name, and a word of the error's text.
const MISTAKES: &[(&str, usize, &str, &str)] = &[
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[hosts.beta.dc1]\naddress = \"b:1\"",
        4,
        "hosts.beta.dc1",
        "[hosts.\"beta.dc1\"]",
    ),
    ("host = \"a b\"\nlisten = \"127.0.0.1:1\"\n[tls]\nplain = true", 1, "host", "letters, digits"),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[controller]\nname = \"control\"\naddress = \"control\"",
        6,
        "controller.address",
        "HOST:PORT",
    ),
    ("host = \"a\"\nlisten = \"nowhere\"\n[tls]\nplain = true", 2, "listen", "0.0.0.0:7740"),
    ("host = \"a\"\n[tls]\nplain = true", 1, "", "listen"),
    ("host = \"a\"\nlisten = \"127.0.0.1:1\"", 1, "tls", "plain = true"),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\n[tls]\nplain = true\n[forecast]\nmeasure_every_s = 60",
        6,
        "forecast.measure_every_s",
        "3600",
    ),
    ("host = \"a\"\nlisten = \"127.0.0.1:1\"\n\n[tls]\nca = \"x\"", 4, "tls", "certificate"),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\n[tls]\nca = \"x\"\ncertificate = \"y\"\nkey = \"z\"\nplain = true",
        7,
        "tls.plain",
        "conflicts with certificates",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\nstate_dir = \"/s\"\ntls.plain = true\n[disks.pool]\ndirectory = \"/s/.\"",
        6,
        "disks.pool.directory",
        "directory of `state_dir`",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\nrun_dir = \"/\"",
        4,
        "run_dir",
        "cannot be /",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks]\ntemplates = [\"/t\"]\n[disks.pool]\ndirectory = \"/t\"",
        5,
        "disks.templates",
        "directory of `disks.pool.directory`",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks.pool]\ndirectory = \"/d\"\nkeep_free_percent = 300",
        6,
        "disks.pool.keep_free_percent",
        "0 to 99",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[migration]\nstraems = 3",
        5,
        "migration.straems",
        "unknown",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[migration]\nstreams = 65",
        5,
        "migration.streams",
        "1 to 64",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[migration]\nstreams = \"4\"",
        5,
        "migration.streams",
        "u16",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[migration]\non_limit = \"x\"",
        5,
        "migration.on_limit",
        "abort",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[migration]\nmax_downtime_ms = 0",
        5,
        "migration.max_downtime_ms",
        "300",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[migration]\nmax_passes = 3\nhybrid_passes = 4",
        6,
        "migration.hybrid_passes",
        "fewer passes",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[timeouts]\n\nretry_ms = 0",
        6,
        "timeouts.retry_ms",
        "milliseconds",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[qemu]\nbinaries = []",
        5,
        "qemu.binaries",
        "names no QEMU",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[hosts.b]\naddress = \"b\"",
        5,
        "hosts.b.address",
        "HOST:PORT",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[hosts.b]\nadress = \"b:1\"",
        5,
        "hosts.b.adress",
        "unknown field",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[hosts.\"b c\"]\naddress = \"b:1\"",
        4,
        "hosts.b c",
        "letters",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[registry]\nhost = \"a\"",
        5,
        "registry.host",
        "third host",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[registry]\nhost = \"w\"",
        5,
        "registry.host",
        "[hosts.w]",
    ),
    (
        "host = \"a\"\nrole = \"witness\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[registry]\nhost = \"w\"",
        6,
        "registry.host",
        "keeps the ownership registry itself",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks.dirs]\n\"x\" = \"/y\"",
        5,
        "disks.dirs.x",
        "absolute",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks.pool]\ndirectory = \"x\"",
        5,
        "disks.pool.directory",
        "absolute",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks.pool]\ndirectory = \"/x\"\nvolume_group = \"x\"",
        4,
        "disks.pool",
        "either a",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks.pool]\nvolume_group = \"-x\"",
        5,
        "disks.pool.volume_group",
        "not a valid name",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks.pool]\nvolume_group = \"x\"\nformat = \"qcow2\"",
        6,
        "disks.pool.format",
        "raw data",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[disks]\nshared = [\"x\"]",
        5,
        "disks.shared",
        "address",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[dns.vms.web]\nnames = [\"web.example.org\"]",
        4,
        "dns.vms.web",
        "add [[dns.zones]]",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[[dns.zones]]\nzone = \"example.org\"\nservers = []\nkey_name = \"k\"\nkey_file = \"k\"",
        4,
        "dns.zones",
        "has no server",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[dns]\nchekc = \"warn\"",
        5,
        "dns.chekc",
        "unknown field",
    ),
    (
        "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\nlisten = \"127.0.0.1:2\"",
        4,
        "",
        "duplicate",
    ),
    ("host = \"a\"\nlisten = ", 2, "", "string"),
];

#[test]
fn mistakes_are_located_and_explained() {
    for (text, line, key, word) in MISTAKES {
        let Err(error) = parse(text) else { panic!("this was accepted:\n{text}") };
        let ConfigError::Invalid { path, line: found_line, key: found_key, what } = &error else {
            panic!("{error}")
        };
        assert_eq!(
            (path.as_path(), *found_line, found_key.as_str()),
            (Path::new(HERE), *line, *key),
            "{what}\n{text}"
        );
        assert!(what.contains(word), "{word:?} is missing in {what:?}");
        let message = error.to_string();
        assert!(message.starts_with(&format!("{HERE}, line {line}")), "{message}");
        assert!(!message.contains('\n'), "one line: {message}");
    }
}

#[test]
fn own_entry_in_the_table_of_hosts_is_no_peer() {
    let config =
        parse(&format!("{LEAST}[hosts.alpha]\naddress = \"x:1\"\n[hosts.beta]\naddress = \"y:2\"")).unwrap();
    let name = |name: &str| HostId::new(name).unwrap();
    assert_eq!(config.peer(&name("beta")), Some("y:2"));
    assert_eq!(config.peer(&name("alpha")), None);
    assert_eq!(config.peers().count(), 1);
}

#[test]
fn missing_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.toml");
    let error = Config::load(&path).unwrap_err();
    assert!(matches!(&error, ConfigError::Read { .. }), "{error}");
    assert!(error.to_string().contains("--config"), "{error}");

    let text = "host = \"a\"\nlisten = \"127.0.0.1:1\"\n[tls]\nca = \"ca.pem\"\ncertificate = \"c.pem\"\nkey = \"k\"\n[qemu]\nbinaries = [\"q\"]";
    std::fs::write(&path, text).unwrap();
    let config = Config::load(&path).unwrap();
    for (missing, line) in [("ca.pem", 4), ("c.pem", 5), ("k", 6), ("q", 8)] {
        let error = config.check_files(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("line {line}")) && error.contains(missing), "{error}");
        std::fs::write(folder.path().join(missing), "").unwrap();
    }
    config.check_files(&path).unwrap();
}

#[test]
fn a_key_that_others_can_read_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (path, key) = (folder.path().join("agent.toml"), folder.path().join("dns.key"));
    let text = "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\nqemu.binaries = [\"/dev/null\"]\n\
                [[dns.zones]]\nzone = \"example.org\"\nservers = [\"192.0.2.53\"]\nkey_name = \"k\"\nkey_file = \"dns.key\"";
    std::fs::write(&path, text).unwrap();
    std::fs::write(&key, "AAECAwQFBgcICQoLDA0ODw==").unwrap();
    let set_mode = |mode| std::fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
    let config = Config::load(&path).unwrap();
    set_mode(0o644);
    let error = config.check_files(&path).unwrap_err().to_string();
    assert!(error.contains("line 5, key `dns.zones`: example.org: the key file"), "{error}");
    assert!(error.contains("chmod 600"), "{error}");
    set_mode(0o600);
    config.check_files(&path).unwrap();
    std::fs::remove_file(&key).unwrap();
    assert!(config.check_files(&path).unwrap_err().to_string().contains("dns.key"));
}
