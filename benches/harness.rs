//! One list of cases for two ways of measuring: criterion tells how long each one takes, and valgrind's callgrind how
//! many instructions, which is the same on a busy machine (`scripts/callgrind`; docs/performance.md, "Functions").
//!
//! A case is prepared once, and only if it is asked for; then its work is done again and again.

#![allow(dead_code, reason = "each bench uses a part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

use std::time::Duration;

use criterion::{Criterion, Throughput};

/// Work of one call of a case, in the units of its figures.
#[derive(Clone, Copy)]
pub(crate) enum Amount {
    /// A number of something: `Of(512, "page")`.
    Of(u64, &'static str),
    /// A number of bytes.
    Bytes(u64),
}

impl Amount {
    fn throughput(self) -> Throughput {
        match self {
            Self::Of(count, _) => Throughput::Elements(count),
            Self::Bytes(bytes) => Throughput::Bytes(bytes),
        }
    }
}

/// Runs the cases that are asked for, in the way that is asked for.
pub(crate) enum Benches {
    Time(Box<Criterion>),
    /// `--list-counted`: prints what can be counted.
    List,
    /// `--repeat TIMES CASE`: does the work of one case so often, and nothing else. Callgrind counts two such runs;
    /// what the second has more is the work alone, without its preparation.
    Repeat {
        times: u64,
        case: String,
    },
}

impl Benches {
    pub(crate) fn from_arguments() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        match &arguments[..] {
            [list] if list == "--list-counted" => Self::List,
            [repeat, times, case] if repeat == "--repeat" => {
                Self::Repeat { times: times.parse().expect("a number"), case: case.clone() }
            }
            _ => Self::Time(Box::new(
                Criterion::default()
                    .warm_up_time(Duration::from_millis(500))
                    .measurement_time(Duration::from_secs(2))
                    .sample_size(50)
                    .configure_from_args(),
            )),
        }
    }

    /// Work of this process alone, always the same: it is timed, and its instructions are counted.
    pub(crate) fn counted<W: FnMut()>(&mut self, case: &str, amount: Amount, prepare: impl FnOnce() -> W) {
        match self {
            Self::Time(_) => self.timed(case, amount, prepare),
            Self::List => {
                let Amount::Of(count, unit) = amount else { panic!("{case} is counted for a unit") };
                println!("{case}\t{count}\t{unit}");
            }
            Self::Repeat { times, case: asked } if asked == case => {
                let mut work = prepare();
                (0..*times).for_each(|_| work());
            }
            Self::Repeat { .. } => {}
        }
    }

    /// Work in which the kernel, or another process, has a part: it is timed only.
    pub(crate) fn timed<W: FnMut()>(&mut self, case: &str, amount: Amount, prepare: impl FnOnce() -> W) {
        let Self::Time(criterion) = self else { return };
        let (mut prepare, mut work) = (Some(prepare), None);
        let mut group = criterion.benchmark_group(env!("CARGO_PKG_NAME"));
        group.throughput(amount.throughput());
        group.bench_function(case, |bencher| {
            let work = work.get_or_insert_with(|| prepare.take().expect("prepared once")());
            bencher.iter(work);
        });
    }

    /// Measures a case like [`Benches::timed`], but only the part of the work that the work itself has timed.
    pub(crate) fn timed_in_part<W: FnMut() -> Duration>(
        &mut self,
        case: &str,
        amount: Amount,
        prepare: impl FnOnce() -> W,
    ) {
        let Self::Time(criterion) = self else { return };
        let (mut prepare, mut work) = (Some(prepare), None);
        let mut group = criterion.benchmark_group(env!("CARGO_PKG_NAME"));
        group.throughput(amount.throughput()).sample_size(10);
        group.bench_function(case, |bencher| {
            let work = work.get_or_insert_with(|| prepare.take().expect("prepared once")());
            bencher.iter_custom(|times| (0..times).map(|_| work()).sum());
        });
    }

    pub(crate) fn finish(self) {
        if let Self::Time(criterion) = self {
            criterion.final_summary();
        }
    }
}
