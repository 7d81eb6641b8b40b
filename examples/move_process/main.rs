//! Moves the memory of a running process into another process, round by round, and lets the other one go on.
//!
//! `cargo run -p whimbrel-examples` (as root). It is the core of a live migration, without QEMU, devices, disks and
//! handover, and shows how the crates fit together:
//!
//! - `tracee`: the kernel tracks the writes of the source process, which is stopped at the end;
//! - `link`: the two sides are connected over TCP;
//! - `memory`: rounds are sent: scan, read, send, write, acknowledge;
//! - `engine::pre_copy`: decides after each round whether to stop.
//!
//! Both sides run in this program. In Whimbrel each has an agent of its own, on its own host: `crates/migrate`.

mod toy;

use std::convert::Infallible;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, iter, slice, thread};

use engine::pre_copy::{Decision, FixedCost, OnLimit, PatternPolicy, Policy, PreCopyGoals, RoundObservation};
use link::transport::DataStream;
use link::{Endpoint, Listener, Peer, Router, Security};
use memory::{
    CompletedRound, OwedPages, RamRegion, Receiver, Sender, TrackedRam, open_destination, open_source,
};
use proto::{Epoch, Generation, HostId, MigrationId, Purpose, VmName};
use tracee::{Injector, PAGE_SIZE, Process, RemoteMemory, Signal};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const STREAMS: u16 = 2;

/// Runs as one of three programs: the example, a toy, or the injector, which `tracee` needs as a process of its own.
fn main() -> ExitCode {
    let result = match env::args().nth(1).as_deref() {
        Some("injector") => return tracee::injector_main(),
        Some("toy") => toy::run(),
        _ => move_process(),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    let first: &dyn Error = &*error;
    let causes = iter::successors(Some(first), |&error| error.source());
    eprintln!("error: {}", causes.map(ToString::to_string).collect::<Vec<_>>().join(": "));
    ExitCode::FAILURE
}

fn move_process() -> Result<()> {
    let (mut source, mut destination) = (Toy::start()?, Toy::start()?);
    source.go()?;
    source.wait_for_step(toy::PAGES)?;
    println!("process {} has filled {} MiB and writes on", source.process.pid(), source.region.bytes >> 20);

    // Track first, and read only then: every write from here on is found by a later scan.
    let injector = Injector::new(env::current_exe()?, vec!["injector".into()]);
    let userfaultfd = injector.create_userfaultfd(&source.process)?;
    let mut log = TrackedRam::start(&source.process, userfaultfd, slice::from_ref(&source.region))?;

    let (sender, mut receiver) = connect(&source, &destination)?;
    let (sender, dirty) = send_while_running(sender, &mut log, source.region.bytes)?;

    let stopped = Instant::now();
    source.stop()?;
    // The scan before this one does not know what the source wrote until it stopped.
    let last = dirty.clear_marks(&mut log)?.skip_drain();
    // Until the destination is started, the source owns the state: after an error, SIGCONT would let it go on.
    let CompletedRound { sender, owed, stats } = sender.send_round(last)?;
    // Nothing is written to the destination after this, whatever is still on its way.
    receiver.shut();
    println!("the last pages arrived {:.1?} after the stop", stopped.elapsed());
    println!("{stats:?}");
    ensure(owed.pages() == 0, "some pages were not acknowledged")?;
    drop(sender);
    receiver.end_and_join();
    log.stop()?;

    let stopped_at = source.step()?;
    println!("process {} was stopped at step {stopped_at}", source.process.pid());
    drop(source);
    // It checks every word of its memory, which follows from the step that it finds there.
    let found = destination.go()?;
    // A state that is consistent, but older, is a lost write, too.
    ensure(found == stopped_at, &format!("the destination found step {found}"))?;
    destination.wait_for_step(found + 1000)?;
    println!("process {} found step {found}, checked every page and goes on", destination.process.pid());
    Ok(())
}

fn ensure(holds: bool, otherwise: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}

/// Connects a sender for the source's memory with a receiver for the destination's, over loopback.
fn connect(source: &Toy, destination: &Toy) -> Result<(Sender, Receiver)> {
    // Real hosts have certificates: `Security::Tls`.
    let near = Endpoint::new(HostId::new("source")?, Security::Plain);
    let far = Endpoint::new(HostId::new("destination")?, Security::Plain);
    let migration = MigrationId { vm: VmName::new("toy")?, epoch: Epoch(1) };
    // After a cut, a new set of connections would be the next generation.
    let (generation, deadline) = (Generation(1), Instant::now() + Duration::from_secs(30));

    let blocks = open_destination(&destination.process, slice::from_ref(&destination.region))?;
    // A stream that breaks is an error at the sender, too.
    let mut receiver = Receiver::new(blocks.into(), STREAMS, |_, _| {});
    receiver.begin(generation);

    let router = Router::default();
    let route = router.expect(migration.clone(), generation, STREAMS);
    let peer_host = far.host().clone();
    let listening = Listener::bind(far, "127.0.0.1:0")?
        .serve(move |arrival| drop(arrival.map(|peer| router.deliver(peer))))?;
    let peer = Peer { host: peer_host, address: listening.address().to_string() };
    let mut streams = Vec::new();
    for stream in 0..STREAMS {
        let purpose = Purpose::Data { migration: migration.clone(), generation, stream };
        streams.push(DataStream::over(near.connect(&peer, purpose, deadline)?, None));
        let (stream, connection) = route.next(deadline).ok_or("a data stream did not arrive")?;
        receiver.attach(generation, stream, DataStream::over(connection, None))?;
    }
    let blocks = open_source(&source.process, slice::from_ref(&source.region))?;
    Ok((Sender::start(blocks.into(), streams)?, receiver))
}

/// Sends rounds until the policy decides to stop the process. Returns the pages that are dirty then.
fn send_while_running(mut sender: Sender, log: &mut TrackedRam, bytes: u64) -> Result<(Sender, OwedPages)> {
    // Stop when the dirty pages need less than this time and another round would not help, or after so many rounds.
    let goals = PreCopyGoals { max_downtime_ns: 1_000_000, max_passes: 20, ..PreCopyGoals::default() };
    // A VM's stop takes time even when no page remains: its devices are saved and loaded. A toy has none.
    let fixed = FixedCost { stop_ns: 0, save_ns: 0, load_ns: 0, continue_ns: 0 };
    let mut policy = PatternPolicy::new(goals, OnLimit::Stop, fixed);
    // Each stage of a round consumes the one before, so that no page is read before its mark is cleared.
    let mut cleared = OwedPages::everything([bytes]).clear_marks(log)?;
    loop {
        // A guest's block I/O in flight would be drained here; a toy has none.
        let readable = cleared.drain(|| Ok::<_, Infallible>(()))?;
        let CompletedRound { sender: next, owed, stats } = sender.send_round(readable)?;
        println!("{stats:?}");
        // Pages that were sent, but not acknowledged, are still owed: the scan adds those written since.
        (sender, cleared) = (next, owed.clear_marks(log)?);
        let observed = RoundObservation {
            pass: stats.round,
            dirty_pages: cleared.pages(),
            full_pages: cleared.pages(),
            pages_sent: stats.contents.pages(),
            bytes_sent: stats.wire_bytes,
            duration_ns: stats.duration_us * 1000,
            interval_ns: stats.duration_us * 1000,
            ..RoundObservation::default()
        };
        if !matches!(policy.decide(&observed), Decision::NextRound { .. }) {
            return Ok((sender, cleared.give_up()));
        }
    }
}

/// A toy process; killed when dropped.
struct Toy {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    process: Process,
    /// Its memory, as one block of RAM.
    region: RamRegion,
}

impl Toy {
    fn start() -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        let mut child = command.arg("toy").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let process = Process::open(child.id())?;
        let input = child.stdin.take().ok_or("no input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let bytes = (1 + toy::PAGES) * PAGE_SIZE;
        let region = RamRegion { name: "toy".to_owned(), bytes, page_bytes: PAGE_SIZE, address: 0 };
        let mut toy = Self { child, input, output, process, region };
        toy.region.address = toy.number()?;
        Ok(toy)
    }

    /// Lets the toy go on from the state in its memory, and returns the number of steps that it found there.
    fn go(&mut self) -> Result<u64> {
        writeln!(self.input)?;
        self.number()
    }

    /// Returns the next number that it prints.
    fn number(&mut self) -> Result<u64> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        line.trim().parse().map_err(|_| format!("toy process {} has ended", self.process.pid()).into())
    }

    /// Reads the number of its last step from its memory.
    fn step(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        RemoteMemory::new(&self.process)?.read(self.region.address, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn wait_for_step(&self, step: u64) -> Result<()> {
        while self.step()? < step {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Stops the process, and waits until the signal was delivered.
    fn stop(&self) -> Result<()> {
        self.process.signal(Signal::STOP)?;
        while self.process.status()?.state != 'T' {
            thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
