//! Repeats the decisions of a migration, from its report: without an agent.

use std::io::Read as _;
use std::path::Path;
use std::{fs, io};

use api::report::{Replayed, SCHEMA, Traces};
use serde::Deserialize;

use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text};

/// Most differences of a policy that are shown as text.
const MOST_SHOWN: usize = 10;

/// Schema of a report. A file of traces alone has none.
#[derive(Deserialize)]
struct ReportHeader {
    schema: Option<String>,
}

/// Repeats the decisions; fails if one of them would be different now.
pub(crate) fn replay(path: &Path, output: &Output) -> Result<Code, Failure> {
    let text = read(path).map_err(|source| Failure::File { path: path.to_owned(), source })?;
    let no_report = |source| Failure::NotAReport { path: path.to_owned(), source };
    let kind: ReportHeader = serde_json::from_slice(text.as_bytes()).map_err(no_report)?;
    if let Some(schema) = kind.schema.filter(|schema| schema != SCHEMA) {
        return Err(Failure::OtherReport { path: path.to_owned(), schema });
    }
    let traces: Traces = serde_json::from_slice(text.as_bytes()).map_err(no_report)?;
    let replayed = traces.compare();
    if replayed.is_empty() {
        return Err(Failure::NoTraces { path: path.to_owned() });
    }
    output.show(&replayed, |replayed| render(replayed));
    let is_same = replayed.iter().all(|one| one.differences.is_empty());
    Ok(if is_same { Code::Done } else { Code::Failed })
}

fn read(path: &Path) -> io::Result<String> {
    if path.as_os_str() != "-" {
        return fs::read_to_string(path);
    }
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map(|_| text)
}

fn render(replayed: &[Replayed]) -> String {
    let mut text = Text::default();
    for Replayed { policy, decisions, left_out, differences } in replayed {
        let same = decisions - differences.len();
        let missing =
            if *left_out > 0 { format!("; {left_out} more were not recorded") } else { String::new() };
        text.line(format_args!("{policy}: {same} of {decisions} decisions are the same{missing}"));
        for difference in differences.iter().take(MOST_SHOWN) {
            text.line(format_args!("  {difference}"));
        }
        if let Some(more) = differences.len().checked_sub(MOST_SHOWN).filter(|more| *more > 0) {
            text.line(format_args!("  and {more} more"));
        }
    }
    text.finish()
}
