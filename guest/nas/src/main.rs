//! Runs a kernel of the NAS Parallel Benchmarks and reports its progress: the load of a guest during a migration.
//!
//! It prints to the serial line of its guest, one line each:
//!
//! - `NAS start kernel=CG class=S threads=2 bytes=N`: `bytes` is the memory that its arrays will use;
//! - `NAS tick kernel=CG class=S run=K iteration=I ms=M` after each iteration, at M ms since the program started;
//! - `NAS run kernel=CG class=S run=K verified=yes ms=M` after each run, which lasted M ms with its setup and its
//!   verification; or `verified=no found=… expected=…`, and the next run begins all the same.
//!
//! It exits with 0 when all runs verified, 1 when one did not or the peer process was lost, 2 when the command line is
//! wrong, 101 when a value in memory leads out of an array. Where two processes share the work (see [`whimbrel_nas`]),
//! both print all of this.

mod options;

use std::error::Error;
use std::net::TcpListener;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use options::{Options, PeerAddress, USAGE};
use whimbrel_nas::class::KernelName;
use whimbrel_nas::exchange::{ExchangeError, Peer};
use whimbrel_nas::kernel::Kernel;
use whimbrel_nas::{cg, ep, ft, is, mg, team};

/// Time until the peer process must listen: its machine may be starting.
const PATIENCE: Duration = Duration::from_mins(5);

fn main() -> ExitCode {
    let start = Instant::now();
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("whimbrel-nas: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let class = options.class;
    let verified = match options.kernel {
        KernelName::Ep => run_all(&options, &ep::Problem::new(class), start),
        KernelName::Cg => run_all(&options, &cg::Problem::new(class), start),
        KernelName::Is => run_all(&options, &is::Problem::new(class), start),
        KernelName::Mg => run_all(&options, &mg::Problem::new(class), start),
        KernelName::Ft => run_all(&options, &ft::Problem::new(class), start),
    };
    match verified {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("whimbrel-nas: {}", with_causes(&error));
            ExitCode::FAILURE
        }
    }
}

/// Formats an error with its causes.
fn with_causes(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {}", with_causes(cause)))
}

/// Does all runs. Returns true if each of them verified.
fn run_all<K: Kernel>(options: &Options, kernel: &K, start: Instant) -> Result<bool, ExchangeError> {
    let Options { kernel: name, class, threads, runs, .. } = options;
    println!(
        "NAS start kernel={name} class={class} threads={threads} bytes={}",
        kernel.bytes(*threads, options.ranks())
    );
    let peer = find_peer(options)?;
    team::run(*threads, peer.as_ref(), |member| {
        let mut all_verified = true;
        for run in 1..=runs.unwrap_or(u64::MAX) {
            let began = Instant::now();
            let verdict = kernel.run(member, &mut |iteration| {
                if member.is_leader() {
                    let ms = start.elapsed().as_millis();
                    println!("NAS tick kernel={name} class={class} run={run} iteration={iteration} ms={ms}");
                }
            })?;
            if member.is_leader() {
                let ms = began.elapsed().as_millis();
                println!("NAS run kernel={name} class={class} run={run} {verdict} ms={ms}");
            }
            all_verified &= verdict.verified;
        }
        Ok(all_verified)
    })
}

/// Connects to the peer process, if one is configured.
fn find_peer(options: &Options) -> Result<Option<Peer>, ExchangeError> {
    let Options { kernel, class, threads, runs, peer } = options;
    let runs = runs.map_or("forever".into(), |runs| runs.to_string());
    // Everything that must be the same on both sides.
    let hello = format!("whimbrel-nas 1 {kernel} {class} threads={threads} runs={runs}");
    Ok(match peer {
        None => None,
        Some(PeerAddress::Listen(port)) => {
            let listener = TcpListener::bind(("0.0.0.0", *port))
                .map_err(|source| ExchangeError::Io { doing: "listening for the peer", source })?;
            Some(Peer::accept(&listener, &hello)?)
        }
        Some(PeerAddress::At(address)) => Some(Peer::connect(address, &hello, PATIENCE)?),
    })
}
