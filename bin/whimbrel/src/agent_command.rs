//! `whimbrel agent`: the daemon itself.

use std::path::PathBuf;

use agent::daemon::Agent;
use host::HelperProgram;
use host::config::Config;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

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

/// Starts logging what `RUST_LOG` asks for.
fn log(format: LogFormat) {
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    let filter = filter(&asked);
    let registry = tracing_subscriber::registry().with(filter.clone().unwrap_or_else(|_| usual()));
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => registry.with(layer.with_ansi(Output::is_on_terminal())).init(),
        LogFormat::Json => registry.with(layer.json()).init(),
    }
    if let Err(error) = filter {
        tracing::warn!("RUST_LOG={asked} cannot be used: {error}; logging as with RUST_LOG=info");
    }
}

/// Parses the value of `RUST_LOG`: a level, or levels for parts of the program (`warn,whimbrel_link=debug`).
fn filter(asked: &str) -> Result<Targets, String> {
    if asked.is_empty() { Ok(usual()) } else { asked.parse().map_err(|error| format!("{error}")) }
}

fn usual() -> Targets {
    Targets::new().with_default(LevelFilter::INFO)
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::filter::LevelFilter;

    #[test]
    fn a_log_has_what_was_asked_for() {
        let level = |asked| super::filter(asked).map(|targets| targets.default_level());
        assert_eq!(level(""), Ok(Some(LevelFilter::INFO)));
        assert_eq!(level("debug"), Ok(Some(LevelFilter::DEBUG)));
        let parts = super::filter("warn,whimbrel_link=trace").unwrap();
        assert!(parts.would_enable("whimbrel_link::stream", &tracing::Level::TRACE));
        assert!(!parts.would_enable("whimbrel_agent", &tracing::Level::INFO));
        assert!(level("info,whimbrel_link=loud").is_err());
    }
}
