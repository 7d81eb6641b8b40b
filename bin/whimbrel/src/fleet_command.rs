//! Simulations of a fleet: without an agent.

mod cli;
mod queue;
mod vms;

use crate::Code;
use crate::failure::Failure;
use crate::output::Output;

pub(crate) use cli::FleetCommand;
use cli::SimulateCommand;

/// Carries out a command about the fleet.
pub(crate) fn run(command: FleetCommand, output: &Output) -> Result<Code, Failure> {
    let FleetCommand::Simulate { command } = command;
    match command {
        SimulateCommand::Queue(options) => queue::simulate(&options, output),
        SimulateCommand::Vms(options) => vms::simulate(&options, output),
    }
}
