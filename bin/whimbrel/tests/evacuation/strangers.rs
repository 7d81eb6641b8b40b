//! Agents and controllers that are not who they should be.

use std::fs;

use crate::common::{WHIMBREL, until};
use crate::fleet::{CONTROLLER, Fleet, tls};

/// An agent beside those of the fleet.
struct Stranger {
    _daemon: lab::Daemon,
    log: std::path::PathBuf,
}

impl Stranger {
    fn start(fleet: &Fleet, directory: &str, host: &str, identity: &lab::Identity, controller: &str) -> Self {
        let node = fleet.node("b");
        let directory = node.host.directory().join(directory);
        fs::create_dir_all(&directory).unwrap();
        let config = format!(
            "host = {host:?}\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n{}{}",
            tls(identity),
            fleet.controller_table(controller)
        );
        fs::write(directory.join("agent.toml"), config).unwrap();
        let log = directory.join("agent.log");
        let mut command = node.host.command(WHIMBREL);
        command.arg("agent").arg("--config").arg(directory.join("agent.toml"));
        Self { _daemon: lab::Daemon::start(&mut command, &log).unwrap(), log }
    }

    fn wait_for(&self, word: &str) {
        let text = || fs::read_to_string(&self.log).unwrap_or_default();
        until(&format!("{word:?} in {}", self.log.display()), || text().contains(word));
    }
}

/// Certificates decide who may speak with whom, in both directions.
#[test]
fn certificates_of_strangers_are_refused() {
    let fleet = Fleet::up();
    let others = fleet.node("b").host.directory().join("other-pki");
    let other = lab::Pki::new(&others).unwrap();

    // An agent of another authority.
    let identity = other.issue("mallory", &[]).unwrap();
    let stranger = Stranger::start(&fleet, "mallory", "mallory", &identity, CONTROLLER);
    stranger.wait_for("the controller cannot be reached");
    until("the controller has refused it", || fleet.log().contains("a connection was refused"));
    assert!(fleet.host("mallory").is_none());

    // An agent that expects a controller of another name, as if another host of the fleet posed as the controller.
    let identity = fleet.pki.issue("d", &[]).unwrap();
    let misled = Stranger::start(&fleet, "misled", "d", &identity, "elsewhere");
    misled.wait_for("elsewhere");
    assert!(fleet.host("d").is_none());

    // The same agent with the right name is welcome.
    let welcome = Stranger::start(&fleet, "welcome", "d", &identity, CONTROLLER);
    welcome.wait_for("connected to the controller");
    fleet.wait_connected("d");
}
