//! Results on the standard output: text or JSON.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};

use api::{Finding, Severity};
use serde::Serialize;

use crate::failure::Failure;

/// Destination and format of results.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Shows a result: as JSON, or as the text that `text` makes.
    pub(crate) fn show<T: Serialize>(&self, value: &T, text: impl FnOnce(&T) -> String) {
        if self.json {
            self.json(value);
        } else {
            write(&plain(&text(value)));
        }
    }

    /// Shows the reason why a command failed.
    pub(crate) fn failure(&self, failure: &Failure) {
        let problem = failure.problem();
        if self.json {
            self.json(&problem);
            return;
        }
        eprintln!("error: {}", plain(&problem.error));
        eprint!("{}", plain(&findings(&problem.findings)));
        if !problem.advice.is_empty() {
            eprintln!("  {}", plain(&problem.advice));
        }
    }

    /// Returns true if the standard error is a terminal.
    pub(crate) fn is_on_terminal() -> bool {
        io::stderr().is_terminal()
    }

    /// Returns true if plain lines of progress are wanted where there is no terminal.
    pub(crate) fn wants_lines(&self) -> bool {
        !self.json
    }

    #[allow(clippy::unused_self, reason = "only an output for JSON gets here")]
    fn json<T: Serialize>(&self, value: &T) {
        match serde_json::to_string(value) {
            Ok(text) => write(&format!("{text}\n")),
            Err(error) => eprintln!("error: the answer cannot be written as JSON: {error}"),
        }
    }
}

/// Returns a text with terminal control characters made visible: parts of it are from other hosts and from logs of
/// QEMU.
pub(crate) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => plain.push(character),
            control if control.is_control() => plain.extend(control.escape_default()),
            other => plain.push(other),
        }
    }
    plain
}

/// Writes a text. A reader that has closed the pipe (`whimbrel … | head`) is no error.
fn write(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// Text that grows line by line.
#[derive(Debug, Default)]
pub(crate) struct Text(String);

impl Text {
    /// Appends a line.
    pub(crate) fn line(&mut self, line: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "{line}");
    }

    /// Appends lines.
    pub(crate) fn append(&mut self, lines: &str) {
        self.0.push_str(lines);
    }

    /// Returns the whole text.
    pub(crate) fn finish(self) -> String {
        self.0
    }
}

/// Formats findings, one after the other, each with its advice.
pub(crate) fn findings(findings: &[Finding]) -> String {
    let mut text = Text::default();
    for finding in findings {
        let word = match finding.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Blocker => "blocker",
        };
        text.line(format_args!("  {word:<8}{} [{}]", finding.what, finding.code));
        if !finding.advice.is_empty() {
            text.line(format_args!("          {}", finding.advice));
        }
    }
    text.finish()
}

/// Formats rows of cells as a table, with columns as wide as needed.
pub(crate) fn table<const N: usize>(
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let rows: Vec<[String; N]> = std::iter::once(heading.map(str::to_owned)).chain(rows).collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_shown_steers_a_terminal() {
        let message = "QEMU said:\n\t\u{1b}[2J\u{1b}]0;owned\u{7} \u{9b}31m\r fine \u{e4}";
        let shown = plain(message);
        assert!(!shown.chars().any(|c| c.is_control() && c != '\n' && c != '\t'), "{shown:?}");
        assert!(shown.contains("\n\t\\u{1b}[2J") && shown.ends_with("fine \u{e4}"), "{shown}");
    }
}
