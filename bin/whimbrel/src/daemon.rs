//! Common parts of this program's daemons: their logs, and the signals that end them.

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::cli::LogFormat;
use crate::failure::Failure;
use crate::output::Output;

/// Signals that end a daemon: SIGTERM and SIGINT.
pub(crate) struct EndSignals {
    runtime: Runtime,
    terminate: Signal,
    interrupt: Signal,
}

impl EndSignals {
    /// Registers the signals: from now on they do not end the program by themselves.
    pub(crate) fn register() -> Result<Self, Failure> {
        let failed = |source| Failure::System { what: "cannot wait for signals", source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (terminate, interrupt) = {
            let _context = runtime.enter();
            (
                signal(SignalKind::terminate()).map_err(failed)?,
                signal(SignalKind::interrupt()).map_err(failed)?,
            )
        };
        Ok(Self { runtime, terminate, interrupt })
    }

    /// Waits for one of the signals.
    pub(crate) fn wait(mut self) {
        self.runtime.block_on(async {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
            }
        });
    }
}

/// Starts logging what `RUST_LOG` asks for.
pub(crate) fn log(format: LogFormat) {
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
