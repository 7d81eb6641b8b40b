//! Throughput of memory from one memfd to another over loopback, and its cost.
//!
//! `cargo run --release -p whimbrel-memory --example throughput [MIB] [ROUNDS]`: for one and two streams, plain and
//! with TLS: GB/s, and seconds of processor time of both ends together for each GB. Then the time of a round of one
//! page. Both ends run here and share the machine, so a real pair of hosts does better.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "an example")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::convert::Infallible;
use std::time::Instant;

use common::{Victim, connections};
use link::transport::DataStream;
use proto::Generation;
use whimbrel_memory::{
    CompletedRound, DirtyLog, OwedPages, PageSet, Receiver, ScanError, ScanStats, Sender, SourceRam,
    open_destination, open_source,
};

/// Reports everything, or one page, as written.
struct Written(bool);

impl DirtyLog for Written {
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        if self.0 {
            for block in into {
                block.set(0..block.pages());
            }
        } else {
            into[0].set(7..8);
        }
        Ok(ScanStats::default())
    }
}

/// Returns the processor time of this process so far, in seconds.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    // Clock ticks are hundredths of a second on every Linux that runs QEMU.
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>().unwrap());
    let bytes = arguments.next().unwrap_or(512) << 20;
    let rounds = arguments.next().unwrap_or(5);
    let mut source = Victim::start("memfd", bytes);
    source.order(&format!("write 0 {bytes} 1"));
    println!("streams  TLS    GB/s  CPU s/GB  one page, median us");
    for (streams, tls) in [(1, false), (2, false), (1, true), (2, true)] {
        let destination = Victim::start("memfd", bytes);
        let writers = open_destination(&destination.process, &destination.regions()).unwrap().into();
        let ram: SourceRam = open_source(&source.process, &source.regions()).unwrap().into();
        let mut receiver = Receiver::new(writers, streams, |_, _| {});
        receiver.begin(Generation(1));
        let (near, far) = connections(tls, streams);
        for (stream, far) in (0..).zip(far) {
            receiver.attach(Generation(1), stream, DataStream::over(far, None)).unwrap();
        }
        let near = near.into_iter().map(|near| DataStream::over(near, None)).collect();
        let mut sender = Sender::start(SourceRam::clone(&ram), near).unwrap();
        let mut owed = OwedPages::everything(ram.iter().map(|block| block.bytes()));
        let round = |sender: Sender, owed: OwedPages, all: bool| {
            let cleared = owed.clear_marks(&mut Written(all)).unwrap();
            sender.send_round(cleared.drain(|| Ok::<_, Infallible>(())).unwrap()).unwrap()
        };
        // The first round also makes the destination's pages.
        CompletedRound { sender, owed, .. } = round(sender, owed, true);
        let (started, cpu_before) = (Instant::now(), cpu_s());
        for _ in 0..rounds {
            CompletedRound { sender, owed, .. } = round(sender, owed, true);
        }
        let gigabytes = (bytes * rounds) as f64 / 1e9;
        let rate = gigabytes / started.elapsed().as_secs_f64();
        let cpu = (cpu_s() - cpu_before) / gigabytes;
        let mut times = Vec::new();
        for _ in 0..201 {
            let sent = round(sender, owed, false);
            times.push(sent.stats.duration_us);
            CompletedRound { sender, owed, .. } = sent;
        }
        times.sort_unstable();
        println!("{streams:7}  {tls:5} {rate:6.2}  {cpu:8.2}  {:6}", times[100]);
    }
}
