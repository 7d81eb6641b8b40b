//! Plans for a fleet, and simulations of one: without an agent.

mod cli;
mod matrix;
mod plan;
mod queue;
mod vms;

use crate::Code;
use crate::failure::Failure;
use crate::output::Output;

pub(crate) use cli::FleetCommand;
use cli::SimulateCommand;

/// Carries out a command about the fleet.
pub(crate) fn run(command: FleetCommand, output: &Output) -> Result<Code, Failure> {
    match command {
        FleetCommand::Simulate { command: SimulateCommand::Queue(options) } => {
            queue::simulate(&options, output)
        }
        FleetCommand::Simulate { command: SimulateCommand::Vms(options) } => vms::simulate(&options, output),
        FleetCommand::Plan(options) => plan::show(&options, output),
        FleetCommand::Matrix(options) => matrix::show(&options, output),
    }
}
