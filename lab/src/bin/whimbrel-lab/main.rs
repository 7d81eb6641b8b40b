//! Makes hosts on this machine, as network namespaces, and measures migrations between them. A program of its own: the
//! one that users install links nothing that only tests and benchmarks need.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | failed |
//! | 2 | usage or bad input; nothing was done |

extern crate whimbrel_lab as lab;

mod bench_command;
mod cli;
mod demo_command;
mod disks_command;
mod energy_command;
mod failure;
mod lab_command;
mod output;
mod rack_command;
mod results_file;
mod sweep_command;
mod tried_on_command;
mod wan_command;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, LabCommand};
use failure::Failure;
use output::Output;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output::new(cli.json);
    let code = run(cli.command, &output).unwrap_or_else(|failure| {
        output.failure(&failure);
        failure.code()
    });
    ExitCode::from(match code {
        Code::Done => 0,
        Code::Failed => 1,
        Code::Usage => 2,
    })
}

/// End of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Done,
    Failed,
    /// Usage or bad input.
    Usage,
}

fn run(command: LabCommand, output: &Output) -> Result<Code, Failure> {
    match command {
        LabCommand::Up { prefix } => lab_command::up(&prefix, output),
        LabCommand::Down { prefix } => lab_command::down(&prefix, output),
        LabCommand::Demo { directory } => demo_command::run(&directory),
        LabCommand::Bench(command) => bench_command::run(&command, output),
        LabCommand::Disks(command) => disks_command::run(&command, output),
        LabCommand::Energy(command) => energy_command::run(&command, output),
        LabCommand::Rack { directory } => rack_command::run(&directory),
        LabCommand::TriedOn(command) => tried_on_command::run(&command, output),
        LabCommand::Sweep(command) => sweep_command::run(&command, output),
        LabCommand::Wan(command) => wan_command::run(&command, output),
    }
}

/// Returns the path of the program `whimbrel`, which is built beside this one.
fn whimbrel() -> Result<PathBuf, Failure> {
    let this = std::env::current_exe()
        .map_err(|source| Failure::System { what: "cannot find the path of this program", source })?;
    let path = this.with_file_name("whimbrel");
    if path.is_file() { Ok(path) } else { Err(Failure::NoProgram { path }) }
}
