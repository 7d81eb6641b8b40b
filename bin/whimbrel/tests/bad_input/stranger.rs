//! Agents with other configurations than a cluster's.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Agent, CommandOutput, DEADLINE, Setup, WHIMBREL};
use crate::eventually;

/// Adds lines to an agent's configuration and starts it again.
pub(crate) fn configure(agent: &mut Agent, change: impl FnOnce(String) -> String) {
    let text = fs::read_to_string(agent.config()).unwrap();
    agent.kill();
    fs::write(agent.config(), change(text)).unwrap();
    agent.start();
}

/// An agent beside the two of the cluster.
pub(crate) struct Stranger {
    pub directory: PathBuf,
    pub host: lab::Host,
    _daemon: lab::Daemon,
}

impl Stranger {
    pub(crate) fn start(host: &lab::Host, name: &str, port: u16, tls: &str, hosts: &str) -> Self {
        let directory = host.directory().join(name);
        fs::create_dir_all(&directory).unwrap();
        let config = format!(
            "host = {name:?}\nlisten = \"{}:{port}\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n{tls}\n{hosts}\n{}",
            host.address(),
            Setup::impatient().extra
        );
        fs::write(directory.join("agent.toml"), config).unwrap();
        let mut command = host.command(WHIMBREL);
        command.arg("agent").arg("--config").arg(directory.join("agent.toml"));
        let mut daemon = lab::Daemon::start(&mut command, &directory.join("agent.log")).unwrap();
        let deadline = Instant::now() + DEADLINE;
        let stranger = loop {
            let ready = directory.join("run/agent.sock").exists();
            assert!(daemon.is_running(), "{}", fs::read_to_string(directory.join("agent.log")).unwrap());
            assert!(Instant::now() < deadline, "{name} does not start");
            if ready {
                break Self { directory, host: host.clone(), _daemon: daemon };
            }
            thread::sleep(Duration::from_millis(20));
        };
        eventually(name, || if stranger.cli(&["info"]).code == 0 { Ok(()) } else { Err("no answer".into()) });
        stranger
    }

    pub(crate) fn cli(&self, words: &[&str]) -> CommandOutput {
        let mut command = self.host.command(WHIMBREL);
        command.arg("--socket").arg(self.directory.join("run/agent.sock")).arg("--json").args(words);
        result(&mut command)
    }
}

pub(crate) fn result(command: &mut Command) -> CommandOutput {
    let output = command.output().unwrap();
    CommandOutput {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

pub(crate) fn tls(identity: &lab::Identity) -> String {
    format!(
        "[tls]\nca = {:?}\ncertificate = {:?}\nkey = {:?}",
        identity.ca, identity.certificate, identity.key
    )
}
