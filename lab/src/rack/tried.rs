//! The record of what was tried on a rack, from which docs/tried-on.md is made.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;

use serde::{Deserialize, Serialize};

use super::agents::qemu_of;
use super::{Rack, RackHost};
use crate::error::{Context, Result};

/// Schema of [`TriedOn`].
pub const SCHEMA: &str = "whimbrel.tried-on/1";
/// The variable of the environment that names the file for new rows. Without it nothing is recorded.
pub const FILE: &str = "WHIMBREL_RACK_RESULTS";

/// The result of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The subject of the test.
    pub subject: String,
    /// The hosts' kernels, in the order of the hosts.
    pub kernels: Vec<String>,
    /// The QEMUs that run guests on them.
    pub qemus: Vec<String>,
    /// The guest's accelerator.
    pub accelerator: String,
    /// The guest's network.
    pub network: String,
    /// The guest's storage.
    pub storage: String,
    /// Values that were seen, if any are worth a note.
    pub notes: String,
    /// True if the test has passed.
    pub works: bool,
}

impl Row {
    /// Returns the row of a test that has not passed yet, with a guest on KVM whose network card the kernel serves.
    pub fn new(rack: &Rack, subject: &str) -> Result<Self> {
        let each =
            |of: &dyn Fn(&RackHost) -> Result<String>| rack.hosts.iter().map(of).collect::<Result<Vec<_>>>();
        Ok(Self {
            subject: subject.to_owned(),
            kernels: each(&|host| Ok(host.run(&["uname", "-r"])?.trim().to_owned()))?,
            qemus: each(&|host| Ok(version_in(&host.run(&[qemu_of(host), "--version"])?)))?,
            accelerator: "KVM".to_owned(),
            network: "vhost-net".to_owned(),
            storage: "none".to_owned(),
            notes: String::new(),
            works: false,
        })
    }

    /// Appends it to the file that the environment names.
    pub fn record(&self) -> Result<()> {
        let Some(path) = std::env::var_os(FILE) else { return Ok(()) };
        let context = || format!("cannot write {}", path.display());
        let line = serde_json::to_string(self).map_err(std::io::Error::from).context(context)?;
        let mut file = OpenOptions::new().append(true).create(true).open(&path).context(context)?;
        file.write_all(format!("{line}\n").as_bytes()).context(context)
    }
}

/// Returns QEMU's version in the output of `--version`.
fn version_in(output: &str) -> String {
    let version = output.split("version ").nth(1).and_then(|rest| rest.split([' ', '\n']).next());
    version.unwrap_or("unknown").to_owned()
}

/// All results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriedOn {
    /// [`SCHEMA`].
    pub schema: String,
    /// The results.
    pub results: Vec<Tried>,
}

/// The last result of a test, and the commit that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// The commit.
    pub commit: String,
    /// The result.
    #[serde(flatten)]
    pub row: Row,
}

impl TriedOn {
    /// Returns no results.
    pub fn none() -> Self {
        Self { schema: SCHEMA.to_owned(), results: Vec::new() }
    }

    /// Adds rows of a run, a JSON document a line, which replace those of the same subjects. Of two runs of one test
    /// the failed one counts.
    pub fn add(&mut self, commit: &str, rows: &str) -> Result<(), serde_json::Error> {
        let mut new: Vec<Row> = Vec::new();
        for line in rows.lines() {
            let row: Row = serde_json::from_str(line)?;
            match new.iter_mut().find(|one| one.subject == row.subject) {
                Some(one) if one.works => *one = row,
                Some(_) => {}
                None => new.push(row),
            }
        }
        for row in new {
            self.results.retain(|one| one.row.subject != row.subject);
            self.results.push(Tried { commit: commit.to_owned(), row });
        }
        self.results.sort_by(|one, other| one.row.subject.cmp(&other.row.subject));
        Ok(())
    }
}

/// Returns the results as a table, in Markdown.
pub fn table(all: &TriedOn) -> String {
    let mut text = "| subject | kernels | QEMU | accelerator | network | storage | result | commit |\n\
        |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for Tried { commit, row } in &all.results {
        let result = if row.works { "works" } else { "**fails**" };
        let note = if row.notes.is_empty() { String::new() } else { format!("; {}", row.notes) };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {result}{note} | {commit} |",
            row.subject,
            different(&row.kernels),
            different(&row.qemus),
            row.accelerator,
            row.network,
            row.storage
        );
    }
    text
}

/// Returns equal ones as one.
fn different(of_hosts: &[String]) -> String {
    let mut names = of_hosts.to_vec();
    names.dedup();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(subject: &str, works: bool) -> String {
        let row = Row {
            subject: subject.to_owned(),
            kernels: ["6.12", "6.12"].map(str::to_owned).into(),
            qemus: ["7.2", "10.0"].map(str::to_owned).into(),
            accelerator: "KVM".to_owned(),
            network: "vhost-net".to_owned(),
            storage: "none".to_owned(),
            notes: String::new(),
            works,
        };
        serde_json::to_string(&row).unwrap() + "\n"
    }

    #[test]
    fn a_failure_counts_and_a_newer_run_replaces_it() {
        let mut all = TriedOn::none();
        all.add("1", &(row("b", true) + &row("b", false) + &row("a", true) + &row("b", true))).unwrap();
        let seen = |all: &TriedOn| -> Vec<_> {
            all.results
                .iter()
                .map(|one| (one.row.subject.clone(), one.commit.clone(), one.row.works))
                .collect()
        };
        let one = |subject: &str, commit: &str, works| (subject.to_owned(), commit.to_owned(), works);
        assert_eq!(seen(&all), [one("a", "1", true), one("b", "1", false)]);
        all.add("2", &row("b", true)).unwrap();
        assert_eq!(seen(&all), [one("a", "1", true), one("b", "2", true)]);
        let table = table(&all);
        assert!(table.contains("| b | 6.12 | 7.2, 10.0 | KVM | vhost-net | none | works | 2 |"), "{table}");
    }

    #[test]
    fn the_version_is_found() {
        assert_eq!(version_in("QEMU emulator version 10.0.13 (Debian 1:10.0.13)\nCopyright\n"), "10.0.13");
    }
}
