//! The fleet of a controller; plans for a fleet, and simulations of one, without a controller.

mod cli;
mod live;
mod matrix;
mod plan;
mod queue;
mod vms;

use std::path::Path;

use crate::Code;
use crate::failure::Failure;
use crate::output::Output;

pub(crate) use cli::FleetCommand;
use cli::SimulateCommand;

/// Carries out a command about the fleet.
pub(crate) fn run(
    command: FleetCommand,
    agent: &Path,
    controller: &Path,
    output: &Output,
) -> Result<Code, Failure> {
    let client = || api::fleet::FleetClient::new(controller).map_err(Failure::from);
    match command {
        FleetCommand::Status => live::status(&client()?, output),
        FleetCommand::Hosts => live::hosts(&client()?, output),
        FleetCommand::Vms => live::vms(&client()?, output),
        FleetCommand::Inventory => live::inventory(&client()?, output),
        FleetCommand::Events { follow, after } => live::events(&client()?, after, follow, output),
        FleetCommand::Cordon(host) => live::cordon(host, true, agent, controller, output),
        FleetCommand::Uncordon(host) => live::cordon(host, false, agent, controller, output),
        FleetCommand::Forget { host } => live::forget(&client()?, &host, output),
        FleetCommand::Simulate { command: SimulateCommand::Queue(options) } => {
            queue::simulate(&options, output)
        }
        FleetCommand::Simulate { command: SimulateCommand::Vms(options) } => vms::simulate(&options, output),
        FleetCommand::Plan(options) => plan::show(&options, output),
        FleetCommand::Matrix(options) => matrix::show(&options, output),
    }
}
