//! The laboratory on the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use api::Rate;

/// Makes hosts on this machine, as network namespaces, and measures migrations between them
#[derive(Debug, Parser)]
#[command(name = "whimbrel-lab", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// Print one JSON document on the standard output, also for errors
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: LabCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Make two hosts, a witness, a router and a client, and configurations for their agents (as root)
    ///
    /// A laboratory with the same prefix that is up is taken down first, with all that runs in it.
    Up {
        /// Prefix of its namespaces' names: 1 to 20 letters, digits and dashes
        #[arg(long, default_value = "lab")]
        prefix: String,
    },
    /// Take the laboratory down, with all that runs in it
    Down {
        /// The prefix given to `up`
        #[arg(long, default_value = "lab")]
        prefix: String,
    },
    /// Migrate a Debian guest that serves a page, while a client watches it (as root)
    Demo {
        /// Directory for the reports
        #[arg(default_value = "target/demo", value_name = "DIR")]
        directory: PathBuf,
    },
    /// Measure migrations by Whimbrel and by QEMU itself, side by side (as root)
    ///
    /// The same guest, with the same memory, is migrated in turn by each contender over the same link. Without --suite
    /// one case is measured, which the options describe; `make bench` measures all suites. Nothing else should run on
    /// the machine at the same time.
    Bench(BenchCommand),
    /// Measure migrations of guests with their disks, by Whimbrel, by QEMU's mirror, and by copying stopped guests (as
    /// root)
    ///
    /// A Debian guest that serves, or writes, is migrated in turn by each mover over the same link, while clients watch
    /// it. `make bench-disks` measures all cases. Nothing else should run on the machine at the same time.
    Disks(DisksCommand),
    /// Measure a migration's cost by working set, write rate, link, streams, buffer, cap (as root)
    ///
    /// Without axes, the figures of the literature are measured: 1, total time by active memory in seven
    /// configurations, and 5, the downtime of NAS kernels that are stopped after a number of iterations. With axes, a
    /// grid of their values. Points that --results has already are not measured again. `make bench-sweep` measures the
    /// figures. Nothing else should run on the machine at the same time.
    Sweep(Box<SweepCommand>),
    /// Measure moves to another network, far away, while a client of the guest keeps its connection (as root)
    ///
    /// Each turn moves the guest there and back. `make bench-wan` measures all cases. Nothing else should run on the
    /// machine at the same time.
    Wan(WanCommand),
    /// Collect results of `whimbrel --json fleet simulate`, and make tables and plots of them
    Energy(EnergyCommand),
    /// Start the hosts that a failing test on whole machines left, until a line is typed (as root)
    Rack {
        /// The directory that the test has printed
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Collect results of `make rack`, and make a table of them
    TriedOn(TriedOnCommand),
}

#[derive(Debug, Args)]
pub(crate) struct TriedOnCommand {
    /// Add the results of a run of `make rack`. Without it, the table is made from existing ones
    #[arg(long, value_name = "FILE", requires = "commit")]
    pub add: Option<PathBuf>,
    /// The commit that was tried
    #[arg(long, value_name = "HASH")]
    pub commit: Option<String>,
    #[command(flatten)]
    pub kept: ResultsOptions,
}

/// Files for the results, and for the page and the plots made from them.
#[derive(Debug, Args)]
pub(crate) struct ResultsOptions {
    /// Write the results into this file, as JSON; its other cases stay
    #[arg(long, value_name = "FILE")]
    pub results: Option<PathBuf>,
    /// Put tables of the results between the marks in this page
    #[arg(long, value_name = "FILE", requires = "results")]
    pub page: Option<PathBuf>,
    /// Draw the results into this directory
    #[arg(long, value_name = "DIR", requires = "results")]
    pub plots: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyCommand {
    /// Add a result under a name; may be repeated. Without it, page and plots are made from existing results
    #[arg(long, value_name = "NAME=FILE", value_parser = named_file)]
    pub add: Vec<(String, PathBuf)>,
    #[command(flatten)]
    pub kept: ResultsOptions,
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text.split_once('=').ok_or("write NAME=FILE")?;
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
    if name.is_empty() || !name.chars().all(is_name) {
        return Err("a name has letters, digits and dashes".to_owned());
    }
    Ok((name.to_owned(), file.into()))
}

#[derive(Debug, Args)]
pub(crate) struct WanCommand {
    /// Measure this case; may be repeated. Default: all
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// List cases
    #[arg(long)]
    pub list: bool,
    /// Moves there and back
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    #[command(flatten)]
    pub kept: ResultsOptions,
    /// Measure nothing; make page and plots from existing results
    #[arg(long, requires = "results", conflicts_with = "case")]
    pub redraw: bool,
    /// Prefix of its namespaces' names: 1 to 20 letters, digits and dashes
    #[arg(long, default_value = "wan")]
    pub prefix: String,
}

#[derive(Debug, Args)]
pub(crate) struct DisksCommand {
    /// Measure this case; may be repeated. Default: all
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// List cases with their movers
    #[arg(long)]
    pub list: bool,
    /// Measurements of each mover, after one that is discarded
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    /// Way to migrate the guest; may be repeated. Default: those that the case names
    #[arg(long, value_name = "NAME")]
    pub mover: Vec<lab::storage::Mover>,
    #[command(flatten)]
    pub kept: ResultsOptions,
    /// Measure nothing; make page and plots from existing results
    #[arg(long, requires = "results", conflicts_with = "case")]
    pub redraw: bool,
    /// Prefix of its namespaces' names: 1 to 20 letters, digits and dashes
    #[arg(long, default_value = "disks")]
    pub prefix: String,
}

#[derive(Debug, Args)]
pub(crate) struct SweepCommand {
    /// Measure this figure, 1 or 5; may be repeated. Default: both
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32))]
    pub figure: Vec<u32>,
    /// Measure only the points of this name; may be repeated. Default: all
    #[arg(long, value_name = "NAME")]
    pub point: Vec<String>,
    /// List points with their contenders
    #[arg(long)]
    pub list: bool,
    /// Measurements of each contender, after one that is discarded
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    /// Way to migrate the guest; may be repeated. Default: those that the point names
    #[arg(long, value_name = "NAME")]
    pub contender: Vec<lab::bench::Contender>,
    #[command(flatten)]
    pub kept: ResultsOptions,
    /// Measure points again that the results have already
    #[arg(long)]
    pub again: bool,
    /// Measure nothing; make page and plots from existing results
    #[arg(long, requires = "results", conflicts_with_all = ["figure", "point"])]
    pub redraw: bool,
    /// Prefix of its namespaces' names: 1 to 20 letters, digits and dashes
    #[arg(long, default_value = "sweep")]
    pub prefix: String,
    #[command(flatten)]
    pub axes: AxesOptions,
}

/// Axes of a grid. Each of them may have several values, between commas.
#[derive(Debug, Args)]
#[group(id = "axes", multiple = true, conflicts_with = "figure")]
#[command(next_help_heading = "Axes of a grid, with values between commas")]
pub(crate) struct AxesOptions {
    /// Working sets: filled, and rewritten over and over, MiB (128)
    #[arg(long, value_name = "MIB,…", value_delimiter = ',')]
    pub wss: Vec<u64>,
    /// Write rates, MiB/s (40)
    #[arg(long, value_name = "MIB,…", value_delimiter = ',')]
    pub rate: Vec<u64>,
    /// Patterns of writes: `sequential`, `random`, `hot-spot:90/10`, `strided:N` (sequential)
    #[arg(long, value_name = "PATTERN,…", value_delimiter = ',')]
    pub pattern: Vec<lab::Pattern>,
    /// Rates of the link: 1Gbit, 100Mbit, none (1Gbit)
    #[arg(long, value_name = "RATE,…", value_delimiter = ',')]
    pub link: Vec<Rate>,
    /// Streams, of Whimbrel and of QEMU's multifd (Whimbrel's own choice, and QEMU's default)
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=64))]
    pub streams: Vec<u16>,
    /// Data that a connection sends at once, KiB: 1 to 64, or 0 for the kernel's choice (0)
    #[arg(long, value_name = "KIB,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(..=64))]
    pub buffer: Vec<u32>,
    /// The largest packets, bytes: 1500 to 9000 (1500)
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1500..=9000))]
    pub mtu: Vec<u32>,
    /// Limit on the sending rate: `unlimited`, or `slow-start`, 32 MiB/s at first, doubled with each pass (unlimited)
    #[arg(long, value_name = "CAP,…", value_delimiter = ',', hide_possible_values = true)]
    pub cap: Vec<CapArg>,
    /// Memory of the guest, MiB (1024)
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Give a migration up after this time, in seconds (180)
    #[arg(long, value_name = "S")]
    pub patience: Option<u64>,
    /// Use the distribution's QEMU rather than the newer one
    #[arg(long)]
    pub installed_qemu: bool,
}

/// See [`lab::bench::Cap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CapArg {
    Unlimited,
    SlowStart,
}

impl From<CapArg> for lab::bench::Cap {
    fn from(arg: CapArg) -> Self {
        match arg {
            CapArg::Unlimited => Self::Unlimited,
            CapArg::SlowStart => Self::SlowStart,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct BenchCommand {
    /// Measure this suite, or the case of this name, or `all`; may be repeated
    #[arg(long, value_name = "NAME")]
    pub suite: Vec<String>,
    /// List suites, and cases with their contenders
    #[arg(long)]
    pub list: bool,
    /// Measurements of each contender, after one that is discarded
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    /// Way to migrate the guest; may be repeated. Default: whimbrel and all ways of QEMU
    #[arg(long, value_name = "NAME")]
    pub contender: Vec<lab::bench::Contender>,
    #[command(flatten)]
    pub kept: ResultsOptions,
    /// Measure nothing; make page and plots from existing results
    #[arg(long, requires = "results", conflicts_with = "suite")]
    pub redraw: bool,
    /// Prefix of its namespaces' names: 1 to 20 letters, digits and dashes
    #[arg(long, default_value = "bench")]
    pub prefix: String,
    #[command(flatten)]
    pub case: CaseOptions,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "The case, where no suite is named")]
pub(crate) struct CaseOptions {
    /// Use the distribution's QEMU rather than the newer one
    #[arg(long)]
    pub installed_qemu: bool,
    /// Debian with nginx and SQLite rather than the load generator
    #[arg(long)]
    pub debian: bool,
    /// Memory of the guest, MiB
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    pub memory: u64,
    /// Memory that the load generator fills, MiB
    #[arg(long, default_value_t = 700, value_name = "MIB")]
    pub fill: u64,
    /// Share of that memory that is random, in percent; the rest compresses well
    #[arg(long, default_value_t = 100, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(..=100))]
    pub noise: u64,
    /// Part of that memory that is rewritten, MiB
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub wss: u64,
    /// Write rate, MiB/s
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub rate: u64,
    /// Rate at which the guest verifies its memory at the same time, MiB/s
    #[arg(long, default_value_t = 4, value_name = "MIB")]
    pub verify: u64,
    /// Rewrite only a few bytes of each page
    #[arg(long)]
    pub few: bool,
    /// Pattern of writes: `sequential`, `random`, `hot-spot:90/10` (90 percent of the writes go to the first 10 percent
    /// of the pages), or `strided:N` (every Nth page, then those after them)
    #[arg(long, default_value_t = lab::Pattern::Sequential, value_name = "PATTERN")]
    pub pattern: lab::Pattern,
    /// RAM blocks that share the memory
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub regions: u64,
    /// With VGA, USB and five virtio devices
    #[arg(long)]
    pub devices: bool,
    /// The guest's memory is a shared memfd
    #[arg(long)]
    pub memfd: bool,
    /// QEMU allocates all of the guest's memory when it starts, on both sides
    #[arg(long)]
    pub preallocated: bool,
    /// Each host has another guest, which computes as fast as it can
    #[arg(long)]
    pub neighbours: bool,
    /// A client exchanges messages with the guest all the time
    #[arg(long)]
    pub client: bool,
    /// Connections to the guest that the source's firewall tracks and translates
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(..=30_000))]
    pub tracked_connections: u16,
    /// Additional time that Whimbrel lets the guest wait for processors, in hundredths (0: copying does not yield)
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub guest_wait: Option<u32>,
    /// Rate of the link: 1Gbit, 100Mbit, none
    #[arg(long, default_value = "none", value_name = "RATE")]
    pub link: Rate,
    /// The guest has read this much of a disk before, MiB, and reports memory that need not be sent
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub cache: u64,
    /// Encrypted, on both sides of the comparison
    #[arg(long)]
    pub tls: bool,
    /// Give a migration up after this time, in seconds
    #[arg(long, default_value_t = 90, value_name = "S")]
    pub patience: u64,
}
