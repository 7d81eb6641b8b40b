//! `whimbrel controller`: the daemon itself.

use controller::Controller;
use controller::config::ControllerConfig;

use crate::Code;
use crate::cli::ControllerCommand;
use crate::daemon::{self, EndSignals};
use crate::failure::Failure;
use crate::output::Output;

/// Runs the controller until SIGTERM or SIGINT, or only checks its configuration.
pub(crate) fn run(command: &ControllerCommand, output: &Output) -> Result<Code, Failure> {
    let config = ControllerConfig::load(&command.config)?;
    if command.check_config {
        controller::check_identity(&config)?;
        let path = command.config.display();
        let good = serde_json::json!({"config": command.config, "name": config.name, "good": true});
        output.show(&good, |_| format!("{path}: valid; controller {}\n", config.name));
        return Ok(Code::Done);
    }
    daemon::log(command.log_format);
    // Before the controller starts, so that a signal in that moment is not lost.
    let signals = EndSignals::register()?;
    let controller = Controller::start(config, command.least_term)?;
    signals.wait();
    tracing::info!("exiting; migrations go on, and the next controller continues evacuations");
    drop(controller);
    Ok(Code::Done)
}
