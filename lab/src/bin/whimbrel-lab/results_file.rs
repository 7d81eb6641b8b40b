//! Results in a file that grows case by case.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::ResultsOptions;
use crate::failure::Failure;

/// Reads earlier results; returns `none` if there is no file and it need not exist. The schema has to be the same.
pub(crate) fn read<R: DeserializeOwned>(
    path: Option<&Path>,
    must_be: bool,
    none: R,
    schema_of: impl Fn(&R) -> &str,
) -> Result<R, Failure> {
    let Some(path) = path.filter(|path| must_be || path.exists()) else { return Ok(none) };
    let text = fs::read_to_string(path).map_err(|source| Failure::File { path: path.to_owned(), source })?;
    let wanted = schema_of(&none);
    let other = |found: &str| {
        let path = path.display();
        lab::Error::Config(format!("{path} holds {found}, this is {wanted}: name another file"))
    };
    let known: R =
        serde_json::from_str(&text).map_err(|error| other(&format!("something else ({error})")))?;
    let found = schema_of(&known);
    if found == wanted { Ok(known) } else { Err(other(found).into()) }
}

/// Replaces the results in the file, and writes what is made from them on request: tables between the marks of a part
/// of a page, and plots.
pub(crate) fn keep<R: Serialize>(
    options: &ResultsOptions,
    results: &R,
    part: &str,
    tables: impl Fn(&R) -> String,
    plots: impl Fn(&R, &Path) -> lab::Result<Vec<String>>,
) -> Result<(), Failure> {
    let Some(path) = &options.results else { return Ok(()) };
    write(path, results)?;
    if let Some(page) = &options.page {
        lab::bench::put(page, part, &tables(results))?;
    }
    if let Some(directory) = &options.plots {
        plots(results, directory)?;
    }
    Ok(())
}

fn write(path: &Path, results: &impl Serialize) -> Result<(), Failure> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Failure::File { path, source }
    };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(failed(directory))?;
    }
    let text = serde_json::to_string_pretty(results).map_err(io::Error::from).map_err(failed(path))?;
    fs::write(path, text + "\n").map_err(failed(path))
}
