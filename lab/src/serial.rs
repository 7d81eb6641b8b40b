//! The serial line of a guest: follow its output, type commands.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use whimbrel_guest_load::checksum;

use crate::error::{Context, Error, Result};
use crate::follow::{DEADLINE, LONGEST_WAIT, LogFollower};

/// A guest's serial line: a socket for its input, a log with its output. The guest may have been started here, or may
/// have arrived by a migration.
#[derive(Debug, Clone)]
pub struct Serial {
    socket: PathBuf,
    log: PathBuf,
    /// The QEMU process, when known: waiting ends when it does.
    pid: Option<u32>,
}

/// A line that the tiny guest prints each second.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tick {
    /// Its number.
    pub n: u64,
    /// Time since the load began, as the guest sees it.
    pub uptime_ms: u64,
    /// The longest time since the last tick in which the program could not run.
    pub longest_stall_ms: f64,
    /// Pages written so far.
    pub writes: u64,
    /// Pages verified so far.
    pub verified: u64,
    /// Times that all pages were verified.
    pub passes: u64,
    /// Checks of the disk that are under way.
    pub checking: u64,
    /// Reads of the disk so far.
    pub disk_reads: u64,
    /// Writes to the disk so far, each of which the disk had acknowledged.
    pub disk_writes: u64,
    /// Wrong pages and blocks found so far.
    pub wrong: u64,
}

/// The tiny guest's answer to the command to verify everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Check {
    /// True if all content was always the content that was written last.
    pub ok: bool,
    /// Pages verified.
    pub pages: u64,
    /// Blocks of the disk verified: in memory those that were read, on the disk those that were written.
    pub disk_blocks: u64,
    /// Wrong pages and blocks found since the start.
    pub wrong: u64,
}

/// The length of a slot of [`Progress`].
pub(crate) const SLOT: Duration = Duration::from_millis(10);

/// Work done by the tiny guest's program, by the guest's own clock, in slots of [`SLOT`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// The number of the first slot, counted from the start of the load.
    pub first: u64,
    /// Pages written and verified in each slot.
    pub work: Vec<u32>,
    /// The longest time without the program that ended in each slot, in tenths of a millisecond.
    pub gap: Vec<u32>,
}

impl Progress {
    /// Parses a line that begins with `TRACE`. Missing parts are empty.
    pub fn parse(line: &str) -> Self {
        let list = |key: &str| {
            let list: String = value(line, key);
            list.split(',').map_while(|number| number.parse().ok()).collect()
        };
        Self { first: value(line, "first"), work: list("work"), gap: list("gap") }
    }
}

impl Serial {
    /// Returns the line of a guest by the socket for its input and the log with its output.
    pub fn new(socket: &Path, log: &Path, pid: Option<u32>) -> Self {
        Self { socket: socket.to_owned(), log: log.to_owned(), pid }
    }

    /// Returns the socket for its input.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Follows the output from its beginning.
    pub fn follow(&self) -> Result<LogFollower> {
        LogFollower::start(&self.log, self.pid)
    }

    /// Follows the output from now on.
    pub fn follow_from_now(&self) -> Result<LogFollower> {
        let mut follow = self.follow()?;
        follow.skip()?;
        Ok(follow)
    }

    /// Types a line and waits for a wanted line of the output, printed afterwards.
    pub fn ask(
        &self,
        line: &str,
        awaited: &str,
        deadline: Duration,
        wanted: impl FnMut(&str) -> bool,
    ) -> Result<String> {
        // A check of the disk takes as long as the disk needs.
        let is_checking = |line: &str| Tick::parse(line).is_some_and(|tick| tick.checking > 0);
        let mut output = self.follow_from_now()?;
        let context = || format!("cannot write to {}", self.socket.display());
        let mut input = UnixStream::connect(&self.socket).context(context)?;
        input.write_all(format!("{line}\n").as_bytes()).context(context)?;
        // The socket stays open until the answer is there: QEMU passes on no more than the guest can accept at once.
        // Until then the output that arrives here must be drained, or the guest's output stops; the log has it too.
        let mut drained = input.try_clone().context(context)?;
        let drain = thread::spawn(move || io::copy(&mut drained, &mut io::sink()));
        let answer = output.wait_while_working(awaited, deadline, is_checking, wanted);
        // QEMU may have ended in the meantime, and closed the connection.
        let _ = input.shutdown(Shutdown::Both);
        let _ = drain.join();
        answer
    }

    /// Waits for the next tick of the tiny guest.
    pub fn next_tick(&self) -> Result<Tick> {
        self.follow_from_now()?.wait_for_tick(DEADLINE, |_| true)
    }

    /// Waits until the tiny guest has read from its disk: until a tick reports more reads than the first one.
    pub fn wait_for_disk_reads(&self) -> Result<()> {
        self.wait_for_more(|tick| tick.disk_reads)
    }

    /// Waits until the tiny guest has written to its disk: until a tick reports more writes than the first one.
    pub fn wait_for_disk_writes(&self) -> Result<()> {
        self.wait_for_more(|tick| tick.disk_writes)
    }

    /// Waits until a counter of the tiny guest has increased; the time depends on the machine's other work.
    fn wait_for_more(&self, count: impl Fn(&Tick) -> u64) -> Result<()> {
        let mut ticks = self.follow_from_now()?;
        let before = count(&ticks.wait_for_tick(DEADLINE, |_| true)?);
        ticks.wait_for_tick(DEADLINE, |tick| count(tick) > before)?;
        Ok(())
    }

    /// Returns all ticks so far.
    pub fn ticks(&self) -> Result<Vec<Tick>> {
        let mut follow = self.follow()?;
        let mut ticks = Vec::new();
        while let Some(line) = follow.next_now()? {
            ticks.extend(Tick::parse(&line));
        }
        Ok(ticks)
    }

    /// Makes the tiny guest verify all its memory, all that it has read from its disk, and all that it may have written
    /// there, at once.
    pub fn check(&self) -> Result<Check> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let number = NUMBER.fetch_add(1, Relaxed);
        let id = format!(" id={number} ");
        let line = self.ask_until_complete(&format!("check {number}"), CHECK_PATIENCE, |answer| {
            answer.starts_with("CHECK ") && answer.contains(&id)
        })?;
        Ok(Check {
            ok: line.starts_with("CHECK ok "),
            pages: value(&line, "pages"),
            disk_blocks: value(&line, "disk_blocks"),
            wrong: value(&line, "wrong"),
        })
    }

    /// Returns the time since the tiny guest's load began, by the guest's clock.
    pub fn now(&self) -> Result<Duration> {
        let answer = self.ask_until_complete("now", PATIENCE, |answer| answer.starts_with("NOW "))?;
        Ok(Duration::from_micros(value(&answer, "uptime_us")))
    }

    /// Returns the work of the tiny guest's program from a moment of its clock on.
    pub fn progress(&self, from: Duration) -> Result<Progress> {
        self.progress_until(from, Duration::MAX)
    }

    /// Returns the work between two moments: a guest short of processor time may do more while it prints than it has
    /// printed.
    pub fn progress_until(&self, from: Duration, until: Duration) -> Result<Progress> {
        let slot = |at: Duration| u64::try_from(at.as_millis() / SLOT.as_millis()).unwrap_or(u64::MAX);
        let mut all = Progress { first: slot(from), ..Progress::default() };
        loop {
            let next = all.first + all.work.len() as u64;
            let piece = self.progress_piece(next)?;
            if piece.work.is_empty() || next > slot(until) {
                return Ok(all);
            }
            // The guest has discarded older slots.
            if all.work.is_empty() {
                all.first = piece.first;
            }
            all.work.extend(piece.work);
            all.gap.extend(piece.gap);
        }
    }

    /// Returns a fifth of a second of progress: lines are short, so that most arrive whole. A line of more than 270
    /// characters fills the socket, to which QEMU passes each character by itself, if its reader is slow; then one
    /// character is repeated, each time.
    fn progress_piece(&self, first: u64) -> Result<Progress> {
        let question = format!("trace {first} 20");
        let line = self.ask_until_complete(&question, PATIENCE, |answer| answer.starts_with("TRACE "))?;
        Ok(Progress::parse(&line))
    }

    /// Changes settings of the load while it runs: `rate=100 mode=few pattern=random`. See `guest/load`.
    pub fn set(&self, settings: &str) -> Result<()> {
        let done = format!("SET {settings}");
        self.ask_until_complete(&format!("set {settings}"), PATIENCE, |answer| answer == done).map(drop)
    }

    /// Returns the answer without its checksum. An emulated serial line loses a character now and then, also of the
    /// command: a command without a complete answer is typed again, a few times.
    fn ask_until_complete(
        &self,
        question: &str,
        patience: Duration,
        mut wanted: impl FnMut(&str) -> bool,
    ) -> Result<String> {
        let awaited = format!("the answer to {question}");
        let mut is_answer = |line: &str| {
            complete_line(line).is_some_and(|answer| answer.starts_with("ERROR ") || wanted(answer))
        };
        let mut attempts = 0;
        loop {
            attempts += 1;
            let answer = self.ask(question, &awaited, patience, &mut is_answer);
            match answer.map(|line| complete_line(&line).unwrap_or_default().to_owned()) {
                // A guest that has reported progress all the while, and did not finish, has understood the command.
                Err(Error::Timeout { waited_ms, .. })
                    if attempts < ATTEMPTS && waited_ms < LONGEST_WAIT.as_millis() => {}
                Ok(answer) if answer.starts_with("ERROR ") => {
                    if attempts == ATTEMPTS {
                        return Err(Error::Config(format!("{question}: the guest answers: {answer}")));
                    }
                }
                answer => return answer,
            }
        }
    }
}

/// Number of attempts for a command that is not answered, and the time limits of an answer: of one that is immediate,
/// and of one for which the guest has to check all of its memory and disk.
const ATTEMPTS: u32 = 6;
const PATIENCE: Duration = Duration::from_secs(5);
const CHECK_PATIENCE: Duration = Duration::from_secs(40);

/// Returns the tiny guest's line without its checksum. `None` if the line is incomplete, or has no checksum.
fn complete_line(line: &str) -> Option<&str> {
    let (content, sum) = line.rsplit_once(" sum=")?;
    (Some(checksum(content)) == u64::from_str_radix(sum, 16).ok()).then_some(content)
}

impl LogFollower {
    /// Returns the tiny guest's next tick that is wanted. Incomplete lines are skipped: the next tick reports as much.
    pub fn wait_for_tick(
        &mut self,
        deadline: Duration,
        mut wanted: impl FnMut(&Tick) -> bool,
    ) -> Result<Tick> {
        let line =
            self.wait_for("a tick", deadline, |line| Tick::parse(line).is_some_and(|tick| wanted(&tick)))?;
        Ok(Tick::parse(&line).unwrap_or_default())
    }
}

impl Tick {
    /// Parses a line; returns `None` for a line that is no tick, or incomplete.
    pub fn parse(line: &str) -> Option<Self> {
        let line = complete_line(line)?.strip_prefix("tick ")?;
        Some(Self {
            n: value(line, "n"),
            uptime_ms: value(line, "uptime_ms"),
            longest_stall_ms: value(line, "longest_stall_ms"),
            writes: value(line, "writes"),
            verified: value(line, "verified"),
            passes: value(line, "passes"),
            checking: value(line, "checking"),
            disk_reads: value(line, "disk_reads"),
            disk_writes: value(line, "disk_writes"),
            wrong: value(line, "wrong"),
        })
    }
}

/// Returns the value of `KEY=VALUE` in a line of words.
fn value<T: std::str::FromStr + Default>(line: &str, key: &str) -> T {
    line.split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read() {
        let progress = Progress::parse("TRACE slot_ms=10 first=7 work=8,0,12 gap=10,99,205");
        assert_eq!(progress, Progress { first: 7, work: vec![8, 0, 12], gap: vec![10, 99, 205] });
        assert_eq!(
            Progress::parse("TRACE slot_ms=10 first=7 work= gap="),
            Progress { first: 7, ..Progress::default() }
        );
    }

    #[test]
    fn a_tick_is_read() {
        let tick_text = "tick n=3 uptime_ms=3001 longest_stall_ms=3.5 writes=38408 verified=24584 passes=2 disk_reads=7 disk_writes=5 wrong=1";
        let line = format!("{tick_text} sum={:x}", checksum(tick_text));
        let tick = Tick::parse(&line).unwrap();
        assert_eq!(
            (tick.n, tick.uptime_ms, tick.passes, tick.disk_reads, tick.disk_writes, tick.wrong),
            (3, 3001, 2, 7, 5, 1)
        );
        assert!((tick.longest_stall_ms - 3.5).abs() < 1e-9);
        for damaged in
            [tick_text, &line.replace("=38408", "=338408"), &line.replace("disk_writes", "diskwrites")]
        {
            assert_eq!(Tick::parse(damaged), None);
        }
    }
}
