//! `whimbrel-lab demo`: the demonstration of `make demo`.

use std::path::Path;

use lab::demo::run_demo;

use crate::Code;
use crate::failure::Failure;

/// Runs the demonstration, and prints its progress.
pub(crate) fn run(directory: &Path) -> Result<Code, Failure> {
    let report = run_demo(&crate::whimbrel()?, directory, |line| println!("{line}"))?;
    if report.is_clean() {
        return Ok(Code::Done);
    }
    eprintln!("The demonstration did not go as it should.");
    Ok(Code::Failed)
}
