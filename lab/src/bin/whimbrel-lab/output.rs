//! Results on the standard output: text or JSON.

use std::io::{self, Write as _};

use api::with_causes;
use serde::Serialize;

use crate::failure::Failure;

/// Form of the results.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints a result: as JSON, or as the text that `text` makes.
    pub(crate) fn show<T: Serialize>(&self, value: &T, text: impl FnOnce(&T) -> String) {
        if self.json { json(value) } else { write(&text(value)) }
    }

    /// Prints the error of a command.
    pub(crate) fn failure(&self, failure: &Failure) {
        let error = with_causes(failure);
        if self.json { json(&serde_json::json!({ "error": error })) } else { eprintln!("error: {error}") }
    }
}

fn json<T: Serialize>(value: &T) {
    match serde_json::to_string(value) {
        Ok(text) => write(&format!("{text}\n")),
        Err(error) => eprintln!("error: the result cannot be written as JSON: {error}"),
    }
}

/// A reader that has gone away (`whimbrel-lab … | head`) is no error.
fn write(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// Returns the lines as one text, each with its end.
pub(crate) fn joined(lines: &[String]) -> String {
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}
