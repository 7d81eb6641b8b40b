//! Certificates and configurations that the laboratory writes are ones that agents accept. Needs root.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use host::config::{AgentRole, Config, Security};
use toml::toml;
use whimbrel_lab as lab;

use lab::{Agents, Environment, Lab, LabConfig, Pki};

#[test]
fn agents_accept_the_configurations() {
    let lab = Lab::up(&LabConfig::for_test()).unwrap();
    let agents = Agents::new(&lab, &Environment::discover(), &PathBuf::from("whimbrel")).with_registry();
    agents.write().unwrap();
    let load = |host: &lab::Host| {
        let path = host.directory().join("agent.toml");
        let config = Config::load(&path).unwrap();
        config.check_files(&path).unwrap();
        config
    };
    let [a, b, witness] = [&lab.a, &lab.b, &lab.witness].map(load);
    assert_eq!(a.peer(&b.host).unwrap(), b.listen.to_string());
    assert_eq!(b.peer(&a.host).unwrap(), a.listen.to_string());
    assert_eq!((a.registry.as_ref(), witness.role), (Some(&witness.host), AgentRole::Witness));
    assert_eq!(a.api_socket, Agents::socket(&lab.a));
    assert!(matches!(a.security, Security::Tls { .. }));

    let more = toml! { migration = { streams = 2 } };
    Agents::new(&lab, &Environment::discover(), &PathBuf::from("whimbrel"))
        .plain()
        .with(more)
        .write()
        .unwrap();
    let a = load(&lab.a);
    assert_eq!((a.security, a.migration.streams, a.registry), (Security::Plain, 2, None));
}

#[test]
fn keys_are_for_their_owner_alone() {
    let directory = tempfile::tempdir().unwrap();
    let identity = Pki::new(directory.path()).unwrap().issue("a", &[[10, 90, 0, 1].into()]).unwrap();
    let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&identity.key), mode(&identity.certificate)), (0o600, 0o644));
    for (path, what) in [
        (&identity.ca, "CERTIFICATE"),
        (&identity.certificate, "CERTIFICATE"),
        (&identity.key, "PRIVATE KEY"),
    ] {
        assert!(fs::read_to_string(path).unwrap().starts_with(&format!("-----BEGIN {what}-----")));
    }
}
