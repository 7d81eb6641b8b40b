//! A kernel of the NAS Parallel Benchmarks in a tiny guest, beside its load generator: see `guest/nas`.

use std::net::SocketAddrV4;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::follow::{DEADLINE, LogFollower};
use crate::serial::Serial;

/// Time that a program may need until it ends, or until it has begun its work: emulated, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(20);

/// A kernel to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nas {
    /// `CG`, `EP`, `FT`, `IS` or `MG`.
    pub kernel: String,
    /// `S`, `W` or `A`.
    pub class: String,
    /// Threads that share its work.
    pub threads: u32,
    /// Number of runs; `None`: runs for as long as the guest does.
    pub runs: Option<u32>,
    /// Another guest that shares the work, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Peer>,
}

/// Connection between two guests that share a kernel's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// The peer connects to this port.
    Listen(u16),
    /// The peer listens at this address.
    At(SocketAddrV4),
}

/// End of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NasEnd {
    /// Its exit status: 0 when all of its runs verified.
    pub status: i32,
}

impl Nas {
    /// Returns a kernel that one thread runs until the guest ends.
    pub fn forever(kernel: &str, class: &str) -> Self {
        Self { kernel: kernel.to_owned(), class: class.to_owned(), threads: 1, runs: None, peer: None }
    }

    /// Returns the program's own options without spaces, for the kernel's command line.
    pub(crate) fn words(&self) -> String {
        let Self { kernel, class, threads, runs, peer } = self;
        let runs = runs.map_or("forever".to_owned(), |runs| runs.to_string());
        let peer = match peer {
            None => String::new(),
            Some(Peer::Listen(port)) => format!(",--listen,{port}"),
            Some(Peer::At(address)) => format!(",--peer,{address}"),
        };
        format!("{kernel},{class},--threads,{threads},--runs,{runs}{peer}")
    }
}

impl Serial {
    /// Waits until the guest's kernel has done an iteration, which it does after its setup.
    pub fn wait_for_nas(&self) -> Result<()> {
        let begun = |line: &str| line.starts_with("NAS tick ") || NasEnd::parse(line).is_some();
        let line = self.follow()?.wait_for("an iteration of a kernel", PATIENCE, begun)?;
        match NasEnd::parse(&line) {
            None => Ok(()),
            Some(NasEnd { status }) => {
                Err(Error::Config(format!("the guest's kernel ended with status {status}")))
            }
        }
    }

    /// Waits until the guest's kernel has ended, here; returns `None` if this QEMU has ended before.
    pub fn wait_for_nas_end(&self) -> Result<Option<NasEnd>> {
        let ended = |line: &str| NasEnd::parse(line).is_some();
        match self.follow()?.wait_for("the end of the guest's kernel", PATIENCE, ended) {
            Ok(line) => Ok(NasEnd::parse(&line)),
            Err(Error::Ended { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl LogFollower {
    /// Waits for the end of the next run of the guest's kernel. Returns true if the run verified. An incomplete line is
    /// skipped; the end of the program itself is an error.
    pub fn wait_for_nas_run(&mut self) -> Result<bool> {
        let known = |line: &str| verdict(line).is_some() || NasEnd::parse(line).is_some();
        let line = self.wait_for("a run of a kernel", DEADLINE, known)?;
        verdict(&line)
            .ok_or_else(|| Error::Config(format!("the guest's kernel does not run any more: {line}")))
    }
}

/// Returns true if a run verified, from the line that reports a run.
fn verdict(line: &str) -> Option<bool> {
    let words = line.strip_prefix("NAS run ")?;
    // The found and the expected value follow where they differ.
    if words.contains(" verified=no ") {
        Some(false)
    } else {
        words.contains(" verified=yes ms=").then_some(true)
    }
}

impl NasEnd {
    /// Parses a line; returns `None` for another or an incomplete one.
    fn parse(line: &str) -> Option<Self> {
        line.strip_prefix("NAS ended status=")?.parse().ok().map(|status| Self { status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_program() {
        let nas = Nas::forever("CG", "S");
        assert_eq!(nas.words(), "CG,S,--threads,1,--runs,forever");
        let two = Nas { runs: Some(3), peer: Some(Peer::At("10.92.0.1:7000".parse().unwrap())), ..nas };
        assert_eq!(two.words(), "CG,S,--threads,1,--runs,3,--peer,10.92.0.1:7000");
        let listening = Nas { threads: 2, peer: Some(Peer::Listen(7000)), ..two };
        assert_eq!(listening.words(), "CG,S,--threads,2,--runs,3,--listen,7000");
    }

    #[test]
    fn a_verdict_is_read_where_it_came_whole() {
        let of = |rest: &str| verdict(&format!("NAS run kernel=CG class=S run=2 {rest}"));
        assert_eq!(of("verified=yes ms=12"), Some(true));
        assert_eq!(of("verified=no found=1 expected=2 ms=12"), Some(false));
        for damaged in ["verifed=yes ms=12", "verified=yesNAS", "verified=y"] {
            assert_eq!(of(damaged), None);
        }
        assert_eq!(verdict("NAS tick kernel=CG class=S run=2 iteration=3 ms=4"), None);
    }

    #[test]
    fn an_end_is_read_where_it_came_whole() {
        assert_eq!(NasEnd::parse("NAS ended status=101"), Some(NasEnd { status: 101 }));
        for damaged in ["NAS ended status=", "NS ended status=0", "NAS ended status=0tick"] {
            assert_eq!(NasEnd::parse(damaged), None);
        }
    }
}
