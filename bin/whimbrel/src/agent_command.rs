//! `whimbrel agent`: the daemon itself.

use std::path::PathBuf;

use agent::daemon::Agent;
use host::HelperProgram;
use host::config::Config;
use tracing_subscriber::EnvFilter;

use crate::cli::{AgentCommand, LogFormat};
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
    log(command.log_format);
    tracee::allocator::share_one_arena();
    let failed = |source| Failure::System { what: "cannot wait for signals", source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    // Registered before the agent starts, so that a signal in that moment is not lost.
    let (mut terminate, mut interrupt) = {
        use tokio::signal::unix::{SignalKind, signal};
        let _context = runtime.enter();
        (signal(SignalKind::terminate()).map_err(failed)?, signal(SignalKind::interrupt()).map_err(failed)?)
    };
    let agent = Agent::start(config, helper(INJECTOR), helper(GUARD))?;
    runtime.block_on(async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    });
    tracing::info!("exiting; VMs keep running, and the next agent resumes migrations");
    drop(agent);
    Ok(Code::Done)
}

/// Returns this very program, also when its file has been replaced by another version since.
fn helper(word: &str) -> HelperProgram {
    HelperProgram { program: PathBuf::from("/proc/self/exe"), arguments: vec![word.into()] }
}

fn log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(Output::is_on_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
}
