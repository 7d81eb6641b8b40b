//! Load generator inside test guests: writes memory at a given rate, knows at any time the expected content of every
//! page, and reports errors.
//!
//! It runs as the only program of the tiny guest, on the serial line. Its output, one line each:
//!
//! - `FILLED pages=N` when the memory has been written for the first time;
//! - each second `tick n=… uptime_ms=… longest_stall_ms=… writes=… verified=… passes=… disk_reads=… disk_writes=…
//!   checking=… wrong=…`; `longest_stall_ms` is the longest time since the last tick in which the program did not run,
//!   `writes` and `verified` count pages, `passes` whole verifications; `checking` is the number of disk checks that
//!   are under way;
//! - `WRONG page N word=… expected=… found=…`, as soon as a page is found that differs from its last write; the run
//!   continues.
//!
//! It accepts commands on its input:
//!
//! - `check ID`: `CHECK ok id=ID pages=… disk_blocks=… n=… wrong=0` (or `CHECK wrong …`): memory was verified at once,
//!   and then the disk, which may need long. It is `wrong` if any error was ever found;
//! - `set KEY=VALUE …` changes settings (see [`options`]): `SET KEY=VALUE …`;
//! - `trace N COUNT` reports the work in COUNT hundredths of a second from the Nth on (see [`progress`]): `TRACE
//!   slot_ms=… first=… work=… gap=…`;
//! - `now` reports the time since the load began: `NOW uptime_us=…`;
//! - anything else: `ERROR …`.
//!
//! Serial lines lose characters now and then. So ticks and answers end with ` sum=…`, the
//! [`whimbrel_guest_load::checksum`] of the text before it, and an answer repeats the command as it was understood. A
//! host that misses an answer sends the command again.

mod disk;
mod memory;
mod options;
mod pace;
mod progress;

use std::io::{self, BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use disk::{DiskCheck, DiskLoad};
use memory::{Memory, Recipe};
use options::Options;
use pace::{MIB, Pace};
use progress::Progress;
use whimbrel_guest_load::Order;

/// Pages handled between two reads of the clock.
const BATCH: usize = 4;
/// Limit of printed `WRONG` lines, of pages and of blocks: beyond it, errors are only counted.
const MOST_REPORTED: u64 = 64;

fn main() {
    let options = match read_options() {
        Ok(options) => options,
        Err(error) => {
            println!("ERROR {error}");
            // The first program of a system must not end.
            loop {
                thread::park();
            }
        }
    };
    let commands = commands();
    if options.port > 0 {
        thread::spawn(move || echo(options.port));
    }
    let disk = if options.disk_threads + options.disk_writers > 0 {
        DiskLoad::start(&options).inspect_err(|error| println!("DISK error {error}")).ok()
    } else {
        None
    };
    let recipe = Recipe { seed: options.seed, noise_percent: options.noise_percent };
    let memory = Memory::filled(recipe, options.fill_mib * MIB);
    println!("FILLED pages={}", memory.len());
    Load::new(options, memory, disk).run(&commands);
}

/// Reads the kernel's command line, then the arguments.
fn read_options() -> Result<Options, String> {
    let mut options = Options::default();
    let line = std::fs::read_to_string("/proc/cmdline").map_err(|error| format!("/proc/cmdline: {error}"))?;
    for word in line.split_ascii_whitespace().filter_map(|word| word.strip_prefix("load.")) {
        options.set(word)?;
    }
    for word in std::env::args().skip(1) {
        options.set(&word)?;
    }
    Ok(options)
}

/// Returns the lines of the input, read by a thread of its own.
fn commands() -> Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    receive
}

/// Answers every byte with the same byte, for clients that watch the network.
fn echo(port: u16) {
    let listener = match TcpListener::bind(("0.0.0.0", port)) {
        Ok(listener) => listener,
        Err(error) => return println!("NET error {error}"),
    };
    for mut connection in listener.incoming().map_while(Result::ok) {
        thread::spawn(move || {
            let answer = |connection: &mut TcpStream| -> io::Result<()> {
                connection.set_nodelay(true)?;
                let mut bytes = [0; 4096];
                loop {
                    let n = connection.read(&mut bytes)?;
                    if n == 0 {
                        return Ok(());
                    }
                    connection.write_all(&bytes[..n])?;
                }
            };
            if let Err(error) = answer(&mut connection) {
                println!("NET error {error}");
            }
        });
    }
}

/// Prints a line with a checksum: serial lines lose characters.
fn report(line: &str) {
    println!("{line} sum={:x}", whimbrel_guest_load::checksum(line));
}

struct Load {
    options: Options,
    memory: Memory,
    disk: Option<DiskLoad>,
    /// Checks that are under way, by their ids.
    checks: Vec<(String, DiskCheck)>,
    progress: Progress,
    start: Instant,
    order: Order,
    next_verify: usize,
    writes: u64,
    verified: u64,
    wrong: u64,
    ticks: u64,
}

impl Load {
    fn new(options: Options, memory: Memory, disk: Option<DiskLoad>) -> Self {
        Self {
            order: Order::new(options.seed),
            options,
            memory,
            disk,
            checks: Vec::new(),
            progress: Progress::default(),
            start: Instant::now(),
            next_verify: 0,
            writes: 0,
            verified: 0,
            wrong: 0,
            ticks: 0,
        }
    }

    fn run(mut self, commands: &Receiver<String>) -> ! {
        let now = Instant::now();
        let (mut writing, mut verifying) = (Pace::new(now), Pace::new(now));
        let (mut last, mut last_tick, mut longest_stall) = (now, now, Duration::ZERO);
        loop {
            let now = Instant::now();
            let gap = now - last;
            longest_stall = longest_stall.max(gap);
            last = now;
            if now - last_tick >= Duration::from_secs(1) {
                self.tick(longest_stall);
                (last_tick, longest_stall) = (now, Duration::ZERO);
            }
            if let Ok(line) = commands.try_recv() {
                self.command(&line);
                // Its own work is no stall.
                last = Instant::now();
                continue;
            }
            self.report_checks();
            let write = writing.is_due(self.options.rate_mib_per_s, now);
            if write {
                self.write();
                writing.done(BATCH);
            }
            let verify = verifying.is_due(self.options.verify_mib_per_s, now);
            if verify {
                self.verify(BATCH);
                verifying.done(BATCH);
            }
            let work = BATCH as u32 * (u32::from(write) + u32::from(verify));
            self.progress.note(now - self.start, gap, work);
            if work == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn write(&mut self) {
        let pages = (self.options.wss_mib * MIB).min(self.memory.len());
        if pages == 0 {
            return;
        }
        for _ in 0..BATCH {
            let page = self.order.next(self.options.pattern, pages);
            self.memory.write(page, self.options.mode);
        }
        self.writes += BATCH as u64;
    }

    fn verify(&mut self, pages: usize) {
        for _ in 0..pages.min(self.memory.len()) {
            if let Some(wrong) = self.memory.verify(self.next_verify) {
                self.wrong += 1;
                if self.wrong <= MOST_REPORTED {
                    let memory::Wrong { page, word, expected, found } = wrong;
                    println!("WRONG page {page} word={word} expected={expected:016x} found={found:016x}");
                }
            }
            self.verified += 1;
            self.next_verify = (self.next_verify + 1) % self.memory.len();
        }
    }

    fn all_wrong(&self) -> u64 {
        self.wrong + self.disk.as_ref().map_or(0, |disk| disk.counts.wrong.load(Relaxed))
    }

    fn tick(&mut self, longest_stall: Duration) {
        self.ticks += 1;
        report(&format!(
            "tick n={} uptime_ms={} longest_stall_ms={:.1} writes={} verified={} passes={} disk_reads={} disk_writes={} checking={} wrong={}",
            self.ticks,
            self.start.elapsed().as_millis(),
            longest_stall.as_secs_f64() * 1e3,
            self.writes,
            self.verified,
            self.verified / (self.memory.len() as u64).max(1),
            self.disk.as_ref().map_or(0, |disk| disk.counts.reads.load(Relaxed)),
            self.disk.as_ref().map_or(0, |disk| disk.counts.writes.load(Relaxed)),
            self.checks.len(),
            self.all_wrong(),
        ));
    }

    /// Reports the checks that have ended.
    fn report_checks(&mut self) {
        let mut ended = Vec::new();
        self.checks.retain_mut(|(id, check)| match check.result() {
            Some(blocks) => {
                ended.push((std::mem::take(id), blocks));
                false
            }
            None => true,
        });
        for (id, blocks) in ended {
            self.report_check(&id, blocks);
        }
    }

    fn report_check(&self, id: &str, blocks: u64) {
        let wrong = self.all_wrong();
        report(&format!(
            "CHECK {} id={id} pages={} disk_blocks={blocks} n={} wrong={wrong}",
            if wrong == 0 { "ok" } else { "wrong" },
            self.memory.len(),
            self.ticks,
        ));
    }

    fn command(&mut self, line: &str) {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("check") => {
                let id = words.next().unwrap_or("-");
                // A host that repeats a command has not received the answer yet.
                if self.checks.iter().any(|(known, _)| known == id) {
                    return;
                }
                self.verify(self.memory.len());
                match &self.disk {
                    Some(disk) => self.checks.push((id.to_owned(), disk.check())),
                    None => self.report_check(id, 0),
                }
            }
            Some("set") => match words.try_for_each(|word| self.options.set(word)) {
                Ok(()) => {
                    self.memory.grow(self.options.fill_mib * MIB);
                    report(&format!("SET {}", line["set".len()..].trim()));
                }
                Err(error) => report(&format!("ERROR {error}")),
            },
            Some("trace") => {
                let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
                let (from, count) = (number(), number());
                report(&format!("TRACE {}", self.progress.report(from, count as usize)));
            }
            Some("now") => report(&format!("NOW uptime_us={}", self.start.elapsed().as_micros())),
            Some(word) => report(&format!("ERROR unknown command {word}")),
            None => {}
        }
    }
}
