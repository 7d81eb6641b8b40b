//! `whimbrel-lab energy`: results of `whimbrel fleet simulate` in one file, as tables and plots.

use std::fs;

use lab::energy::{EnergyResults, plots, tables};

use crate::Code;
use crate::cli::EnergyCommand;
use crate::failure::Failure;
use crate::output::Output;
use crate::results_file;

pub(crate) fn run(command: &EnergyCommand, output: &Output) -> Result<Code, Failure> {
    let path = command.kept.results.as_deref();
    let must_be = command.add.is_empty();
    let mut results =
        results_file::read(path, must_be, EnergyResults::none(), |results: &EnergyResults| &results.schema)?;
    for (name, file) in &command.add {
        let json = fs::read_to_string(file).map_err(|source| Failure::File { path: file.clone(), source })?;
        results.add(name, &json).map_err(|error| {
            let file = file.display();
            lab::Error::Config(format!("{file} is no result of `whimbrel --json fleet simulate` ({error})"))
        })?;
    }
    results_file::keep(&command.kept, &results, "energy", tables, plots)?;
    output.show(&results, tables);
    Ok(Code::Done)
}
