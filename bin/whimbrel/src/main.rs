//! Moves running virtual machines from host to host: the agent, and the commands by which users control it.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | failed; a VM that was to be migrated is at its source, unharmed |
//! | 2 | usage or bad input; nothing was done |
//! | 3 | in doubt: the VM's owner is unknown until `whimbrel recover` has settled it |
//! | 130 | interrupted with Ctrl-C; a migration that was watched continues |
//!
//! Results go to the standard output, as text or (`--json`) as one JSON document, errors included. Progress goes to the
//! standard error.

mod agent_command;
mod cli;
mod controller_command;
mod daemon;
mod evacuation;
mod failure;
mod fleet_command;
mod forecast_text;
mod forecasting;
mod images;
mod inventory;
mod migration;
mod network;
mod output;
mod recovery;
mod replay;
mod watching;

use std::process::ExitCode;

use api::{Limits, Rate};
use clap::Parser;

use cli::{Cli, Command, ImagesCommand, NetCommand, VmCommand};
use failure::Failure;
use output::Output;

/// The hidden command under which the agent starts its injector.
const INJECTOR: &str = "injector";
/// The hidden command under which it starts the guard, which lifts a guest's throttle after the agent's death.
const GUARD: &str = "guard";

fn main() -> ExitCode {
    // Before anything else: the injector starts no thread and allocates only what it needs.
    if std::env::args_os().nth(1).is_some_and(|command| command == INJECTOR) {
        return tracee::injector_main();
    }
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|command| command == GUARD) {
        return host::guard_main(words);
    }
    let cli = Cli::parse();
    let output = Output::new(cli.json);
    match run(cli, &output) {
        Ok(code) => code.into(),
        Err(failure) => {
            output.failure(&failure);
            failure.code().into()
        }
    }
}

/// Outcome of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    /// Done.
    Done,
    /// Failed, without harm.
    Failed,
    /// Usage or bad input.
    Usage,
    /// In doubt.
    InDoubt,
    /// The VM ended before it was migrated.
    VmEnded,
    /// Ctrl-C.
    Interrupted,
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(match code {
            Code::Done => 0,
            Code::Failed => 1,
            Code::Usage => 2,
            Code::InDoubt => 3,
            Code::VmEnded => 4,
            Code::Interrupted => 130,
        })
    }
}

fn run(cli: Cli, output: &Output) -> Result<Code, Failure> {
    let client = || api::Client::new(&cli.socket).map_err(Failure::from);
    let fleet = || api::fleet::FleetClient::new(&cli.controller).map_err(Failure::from);
    match cli.command {
        Command::Agent(command) => agent_command::run(&command, output),
        Command::Info => inventory::agent(&client()?, output),
        Command::Vm { command } => match command {
            VmCommand::List => inventory::list(&client()?, output),
            VmCommand::Show { vm } => inventory::show(&client()?, &vm, output),
            VmCommand::Adopt(adopt) => inventory::adopt(&client()?, adopt, output),
            VmCommand::Run { file, paused, accept_risk } => {
                inventory::run(&client()?, &file, paused, accept_risk, output)
            }
            VmCommand::Forget { vm } => inventory::forget(&client()?, &vm, output),
            VmCommand::Claim { vm, accept_risk } => inventory::claim(&client()?, &vm, accept_risk, output),
        },
        Command::Migrate(command) if command.check => migration::check(&client()?, command, output),
        Command::Migrate(command) => migration::migrate(&client()?, command, &cli.socket, output),
        Command::Forecast(command) => forecasting::run(&client()?, command, output),
        Command::Watch { vm } => migration::watch(&client()?, &vm, &cli.socket, output),
        Command::Migrations => migration::list(&client()?, output),
        Command::Cancel { vm } => migration::cancel(&client()?, &vm, output),
        Command::Limit { vm, bandwidth, max_downtime, max_passes, max_total } => {
            let limits = Limits {
                bandwidth_bytes_per_s: bandwidth.map(|Rate(rate)| rate),
                max_downtime_ms: max_downtime,
                max_passes,
                max_total_ms: max_total.map(|seconds| seconds.saturating_mul(1000)),
            };
            migration::limit(&client()?, &vm, &limits, output)
        }
        Command::Report { vm, epoch, explain } => migration::report(&client()?, &vm, epoch, explain, output),
        Command::Replay { report } => replay::replay(&report, output),
        Command::Controller(command) => controller_command::run(&command, output),
        Command::Evacuate(command) if command.this_host => {
            evacuation::this_host(&client()?, &command, output)
        }
        Command::Evacuate(command) => evacuation::evacuate(&fleet()?, command, output),
        Command::Return(command) => evacuation::return_vms(&fleet()?, &command, output),
        Command::Evacuation { command } => evacuation::manage(&fleet()?, command, output),
        Command::Fleet { command } => fleet_command::run(command, &cli.socket, &cli.controller, output),
        Command::Images { command } => match command {
            ImagesCommand::List => images::list(&client()?, output),
            ImagesCommand::Remove { vm, epoch, ended } => {
                images::remove(&client()?, &vm, epoch, ended, output)
            }
        },
        Command::Net { command: NetCommand::Show } => network::show(&client()?, output),
        Command::Net { command: NetCommand::Release { vm, all } } => {
            network::release(&client()?, &vm, all, output)
        }
        Command::Recover(command) => recovery::recover(&client()?, &command, output),
    }
}
