//! The victims of the tests, and the injector that works on them.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(missing_docs, unreachable_pub, reason = "tests")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

pub mod copier;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use whimbrel_tracee::{AddressRange, Injector, Process, maps, merge_from};

pub fn injector() -> Injector {
    Injector::new(env!("CARGO_BIN_EXE_tracee-test-injector").into(), Vec::new())
}

/// Returns true if the long runs are requested.
pub fn soak() -> bool {
    std::env::var_os("WHIMBREL_SOAK").is_some()
}

/// A program of the tests, with its input and output; killed when dropped.
pub struct Victim {
    pub child: Child,
    pub process: Process,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Threads by name.
    pub threads: BTreeMap<String, u32>,
}

impl Victim {
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tracee-test-victim"));
        command.args(arguments);
        Self::start_command(command)
    }

    /// Starts any program that prints `ready`.
    pub fn start_command(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut victim = Self { child, process, input, output, threads: BTreeMap::new() };
        loop {
            let line = victim.line();
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["ready"] => return victim,
                ["thread", name, number] => {
                    victim.threads.insert(name.to_owned(), number.parse().unwrap());
                }
                _ => panic!("victim said {line:?}"),
            }
        }
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        let len = self.output.read_line(&mut line).unwrap();
        assert!(len > 0, "the victim ended: {:?}", self.child.wait());
        line.trim_end().to_owned()
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
    }

    /// Returns the number of rounds of each thread.
    pub fn rounds(&mut self) -> BTreeMap<String, u64> {
        self.tell("count");
        let mut found = BTreeMap::new();
        loop {
            let line = self.line();
            match line.split_once(' ') {
                Some((name, rounds)) => found.insert(name.to_owned(), rounds.parse().unwrap()),
                None => return found,
            };
        }
    }

    /// Waits until each thread has done some more rounds: all of them are alive and well.
    pub fn assert_goes_on(&mut self) {
        let before = self.rounds();
        loop {
            let now = self.rounds();
            if before.iter().all(|(name, rounds)| now[name] >= rounds + 2) {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Ends it; it must not have detected anything.
    pub fn assert_well(mut self) {
        self.input = None;
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the victim noticed something: {status}");
    }

    /// Returns the number of descriptors that are userfaultfds.
    pub fn userfaultfds(&self) -> usize {
        let all = self.process.descriptors().unwrap();
        all.iter().filter(|(_, target)| target.to_string_lossy().contains("userfaultfd")).count()
    }

    /// Returns true if a mapping has one of the flags of a userfaultfd.
    pub fn is_registered(&self) -> bool {
        !self.registered().is_empty()
    }

    /// Returns the mappings that have one of the flags of a userfaultfd, joined.
    pub fn registered(&self) -> Vec<AddressRange> {
        let all = maps::detailed_mappings(&self.process).unwrap().into_iter();
        let has_flag = |details: &maps::Details| details.has_flag("uw") || details.has_flag("um");
        let mut found: Vec<_> =
            all.filter(|one| one.details.as_ref().is_some_and(has_flag)).map(|one| one.range).collect();
        merge_from(&mut found, 0);
        found
    }

    /// Maps memory in a victim of mode `mode-memory`.
    pub fn map(&mut self, kind: &str, len: u64) -> AddressRange {
        let base = self.ask(&format!("map {kind} {len}")).parse().unwrap();
        AddressRange::with_len(base, len)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
