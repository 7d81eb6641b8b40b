//! `whimbrel-lab tried-on`: results of `make rack` in one file, as a table.

use std::fs;

use lab::rack::tried::{TriedOn, table};

use crate::Code;
use crate::cli::TriedOnCommand;
use crate::failure::Failure;
use crate::output::Output;
use crate::results_file;

pub(crate) fn run(command: &TriedOnCommand, output: &Output) -> Result<Code, Failure> {
    let path = command.kept.results.as_deref();
    let mut all =
        results_file::read(path, command.add.is_none(), TriedOn::none(), |all: &TriedOn| &all.schema)?;
    if let (Some(file), Some(commit)) = (&command.add, &command.commit) {
        let rows = fs::read_to_string(file).map_err(|source| Failure::File { path: file.clone(), source })?;
        all.add(commit, &rows).map_err(|error| {
            lab::Error::Config(format!("{} has no results of the rack ({error})", file.display()))
        })?;
    }
    results_file::keep(&command.kept, &all, "tests", table, |_, _| Ok(Vec::new()))?;
    output.show(&all, table);
    Ok(Code::Done)
}
