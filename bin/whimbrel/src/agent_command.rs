//! `whimbrel agent`: the daemon itself.

use std::path::PathBuf;

use agent::daemon::Agent;
use host::HelperProgram;
use host::config::Config;

use crate::cli::AgentCommand;
use crate::daemon::{self, EndSignals};
use crate::failure::Failure;
use crate::output::Output;
use crate::{Code, GUARD, INJECTOR};

/// Runs the agent until SIGTERM or SIGINT, or only checks its configuration.
pub(crate) fn run(command: &AgentCommand, output: &Output) -> Result<Code, Failure> {
    let config = Config::load(&command.config)?;
    if command.check_config {
        config.check_files(&command.config)?;
        agent::daemon::check_identity(&config)?;
        let path = command.config.display();
        output
            .show(&serde_json::json!({"config": command.config, "host": config.host, "good": true}), |_| {
                format!("{path}: valid; host {}, {}\n", config.host, config.role.as_str())
            });
        return Ok(Code::Done);
    }
    daemon::log(command.log_format);
    tracee::allocator::share_one_arena();
    // Before the agent starts, so that a signal in that moment is not lost.
    let signals = EndSignals::register()?;
    let agent = Agent::start(config, helper(INJECTOR), helper(GUARD))?;
    signals.wait();
    tracing::info!("exiting; VMs keep running, and the next agent resumes migrations");
    drop(agent);
    Ok(Code::Done)
}

/// Returns this very program, also when its file has been replaced by another version since.
fn helper(word: &str) -> HelperProgram {
    HelperProgram { program: PathBuf::from("/proc/self/exe"), arguments: vec![word.into()] }
}
