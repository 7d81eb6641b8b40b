//! `whimbrel-lab`: hosts on this machine for experiments.

use std::path::PathBuf;

use lab::{Agents, Environment, Lab, LabConfig};
use serde::Serialize;

use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, joined};

#[derive(Serialize)]
struct LabInfo {
    prefix: String,
    program: PathBuf,
    hosts: Vec<LabHostInfo>,
}

#[derive(Serialize)]
struct LabHostInfo {
    name: String,
    namespace: String,
    directory: PathBuf,
    config: PathBuf,
    socket: PathBuf,
}

/// Makes the laboratory and configurations for its agents, and leaves it up.
pub(crate) fn up(prefix: &str, output: &Output) -> Result<Code, Failure> {
    let program = crate::whimbrel()?;
    let mut lab = Lab::up(&LabConfig::new(prefix))?;
    let agents = Agents::new(&lab, &Environment::discover(), &program).with_registry();
    agents.write()?;
    let hosts = agents.all().iter().map(|host| LabHostInfo {
        name: host.name().to_owned(),
        namespace: host.namespace().to_owned(),
        directory: host.directory().to_owned(),
        config: host.directory().join("agent.toml"),
        socket: Agents::socket(host),
    });
    let up = LabInfo { prefix: prefix.to_owned(), program: program.clone(), hosts: hosts.collect() };
    lab.keep();
    output.show(&up, text);
    Ok(Code::Done)
}

fn text(up: &LabInfo) -> String {
    let program = up.program.display();
    let mut lines = Vec::new();
    lines.push(format!(
        "The laboratory {} is up. Start its agents, each in a terminal of its own:",
        up.prefix
    ));
    for LabHostInfo { namespace, config, .. } in &up.hosts {
        lines.push(format!("  ip netns exec {namespace} {program} agent --config {}", config.display()));
    }
    lines.push("Speak to them by their sockets:".to_owned());
    for LabHostInfo { socket, .. } in &up.hosts {
        lines.push(format!("  {program} --socket {} info", socket.display()));
    }
    lines.push(format!(
        "Take it down: {} down --prefix {}",
        up.program.with_file_name("whimbrel-lab").display(),
        up.prefix
    ));
    joined(&lines)
}

/// Takes the laboratory down.
pub(crate) fn down(prefix: &str, output: &Output) -> Result<Code, Failure> {
    Lab::down(&LabConfig::new(prefix))?;
    output.show(&serde_json::json!({"prefix": prefix, "up": false}), |_| {
        format!("The laboratory {prefix} is down.\n")
    });
    Ok(Code::Done)
}
