//! The command line of `whimbrel fleet`.

use std::path::PathBuf;

use api::{BadName, HostId};
use clap::{Args, Subcommand, ValueEnum};
use engine::planner::inventory::PlatformChange;
use fleet::power_curve::PowerCurve;
use fleet::queue::figure::{HEADROOMS_PERCENT, LATENCIES_S, MIN_RUNS_S};
use fleet::vms::POLICIES;

#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Show the controller, and what its fleet does
    Status,
    /// List hosts with their state, use and VMs
    Hosts,
    /// List the VMs of all hosts
    Vms,
    /// List events: hosts, VMs, migrations and evacuations
    Events {
        /// Wait for further events, until Ctrl-C
        #[arg(long)]
        follow: bool,
        /// Only events after the one with this number; by default the last 100, or with --follow new ones
        #[arg(long, value_name = "NUMBER")]
        after: Option<u64>,
    },
    /// Let a host accept no more VMs
    Cordon(CordonOptions),
    /// Let a host accept VMs again
    Uncordon(CordonOptions),
    /// Forget a host that has no agent any longer
    Forget {
        /// The host
        #[arg(value_parser = host_id)]
        host: HostId,
    },
    /// Print the inventory that the controller plans with, for `fleet plan` and `fleet matrix`
    Inventory,
    /// Simulate a fleet on traces, without an agent
    Simulate {
        #[command(subcommand)]
        command: SimulateCommand,
    },
    /// Plan moves: empty hosts, level load, spread groups, or bring VMs back
    ///
    /// The inventory is a JSON file; docs/operations/planning.md explains it. Nothing is moved.
    Plan(PlanOptions),
    /// Show which VM could run where, why not, and the CPU model that all hosts have
    Matrix(MatrixOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CordonOptions {
    /// The host
    #[arg(value_parser = host_id, required_unless_present = "this_host")]
    pub host: Option<HostId>,
    /// The host on which this is run, by its agent: also where no controller answers
    #[arg(long, conflicts_with = "host")]
    pub this_host: bool,
}

fn host_id(name: &str) -> Result<HostId, BadName> {
    HostId::new(name)
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("goal").required(true))]
pub(crate) struct PlanOptions {
    /// Inventory of hosts and VMs, as JSON; - for the standard input
    #[arg(long, value_name = "FILE")]
    pub inventory: PathBuf,
    /// Empty hosts
    #[arg(long, value_name = "HOST,…", value_delimiter = ',', group = "goal")]
    pub drain: Vec<String>,
    /// Hosts to which the VMs of emptied hosts go; by default all others
    #[arg(long, value_name = "HOST,…", value_delimiter = ',', requires = "drain")]
    pub to: Vec<String>,
    /// Relieve hosts that are busier than others
    #[arg(long, group = "goal")]
    pub balance: bool,
    /// Spread the VMs of each group over zones
    #[arg(long, group = "goal")]
    pub spread: bool,
    /// Put VMs on hosts: back to where they were, for instance
    #[arg(long, value_name = "VM=HOST,…", value_delimiter = ',', group = "goal", value_parser = placement)]
    pub place: Vec<(String, String)>,
    /// Time in which all moves have to be over, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub deadline: Option<u64>,
    /// Plan what is possible, and list VMs that stay
    #[arg(long)]
    pub partial: bool,
    /// Limits and hysteresis, as JSON; those that are missing keep their defaults
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MatrixOptions {
    /// Inventory of hosts and VMs, as JSON; - for the standard input
    #[arg(long, value_name = "FILE")]
    pub inventory: PathBuf,
    /// VMs to show; by default all
    #[arg(long, value_name = "VM,…", value_delimiter = ',')]
    pub vm: Vec<String>,
    /// Show what would be if a host had another QEMU, kernel, or the processor of a platform; may be repeated
    #[arg(long, value_name = "HOST:qemu=VERSION|kernel=VERSION|cpu=PLATFORM", value_parser = what_if)]
    pub what_if: Vec<WhatIf>,
}

/// Change of a host that is only thought of.
#[derive(Clone, Debug)]
pub(crate) struct WhatIf {
    pub(crate) host: String,
    pub(crate) change: PlatformChange,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SimulateCommand {
    /// Simulate servers that are switched on and off to follow the requests of a trace
    ///
    /// For each latency, which is the time of a migration and of powering a host on, finds the headroom and the minimum
    /// time to run that need the least energy of those that keep the limit on late requests. Prints the energy beside
    /// that of the smallest constant number of servers. docs/energy.md explains the model.
    Queue(QueueOptions),
    /// Simulate VMs with CPU traces on hosts, under this program's planner and published policies
    ///
    /// Set-up, power model, metrics and policies are those of Beloglazov and Buyya 2012. Results that are not plausible
    /// are listed, and then the command fails. docs/energy.md explains the model.
    Vms(VmsOptions),
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("source").required(true))]
pub(crate) struct QueueOptions {
    /// Trace: the number of requests in each second, one a line; also compressed by xz; - for the standard input
    #[arg(long, value_name = "FILE", group = "source")]
    pub trace: Option<PathBuf>,
    /// Generate a trace instead: so many days of a tournament
    #[arg(long, value_name = "DAYS", group = "source", value_parser = days)]
    pub tournament: Option<usize>,
    /// Gaps of the trace, for which nothing was recorded: leave them out, or refuse the trace
    #[arg(long, value_name = "exclude|refuse", default_value = "exclude", hide_possible_values = true)]
    pub gaps: Gaps,
    /// Seed of all random numbers: the same seed gives the same result
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// Latencies, in seconds
    #[arg(long, value_name = "SECONDS,…", value_delimiter = ',', default_values_t = LATENCIES_S,
        hide_default_value = true, value_parser = clap::value_parser!(u32).range(..=86_400))]
    pub latency: Vec<u32>,
    /// Headrooms that the search tries, in percent of average demand
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_values_t = HEADROOMS_PERCENT,
        hide_default_value = true, value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub headroom: Vec<u32>,
    /// Minimum times to run that the search tries, in seconds
    #[arg(long, value_name = "SECONDS,…", value_delimiter = ',', default_values_t = MIN_RUNS_S,
        hide_default_value = true, value_parser = clap::value_parser!(u32).range(..=31_536_000))]
    pub min_run: Vec<u32>,
    /// Servers, which are just busy in the busiest minute
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=255))]
    pub servers: u32,
    /// Seconds over which demand is averaged
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub window: u32,
    /// Response time above which a request is late, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = positive)]
    pub limit: f64,
    /// Largest share of late requests, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = percent)]
    pub late: f64,
    /// Longest mean time of service, in seconds; a trace with fewer requests is scaled up
    #[arg(long, value_name = "SECONDS", default_value_t = 0.1, value_parser = positive)]
    pub max_service: f64,
    /// Watts of a server at equally spaced utilisations, from idle to fully busy
    #[arg(long, value_name = "WATTS,…", default_value = "100,200")]
    pub power: PowerCurve,
    /// Power of a server that is being switched on, in percent of its peak power
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0, value_parser = percent)]
    pub waking: f64,
    /// Watts of a server that is off
    #[arg(long, value_name = "WATTS", default_value_t = 0.0)]
    pub off: f64,
    /// Threads; the result does not depend on them
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = threads)]
    pub threads: usize,
}

#[derive(Debug, Args)]
pub(crate) struct VmsOptions {
    /// Trace: a line "# YYYYMMDD" for each day, then 288 values of CPU use in percent for each VM; also compressed by
    /// xz;
    /// - for the standard input
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Days to simulate; by default all
    #[arg(long, value_name = "YYYYMMDD,…", value_delimiter = ',')]
    pub day: Vec<String>,
    /// Hosts, of two types in turn
    #[arg(long, value_name = "N", default_value_t = 800, value_parser = hosts)]
    pub hosts: usize,
    /// Use the VMs of each day so many times
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = repeat)]
    pub repeat: usize,
    /// Memory of running VMs: ignored, as CloudSim does, or kept
    #[arg(long, value_name = "ignored|kept", default_value = "ignored", hide_possible_values = true)]
    pub memory: Memory,
    /// Also simulate with moves that take so many times as long
    #[arg(long, value_name = "FACTOR,…", value_delimiter = ',', value_parser = positive)]
    pub move_factor: Vec<f64>,
    /// Settings of the planner, as JSON; those that are missing keep their defaults
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,
    /// Policies to simulate; may be repeated; by default all
    #[arg(long, value_name = "NAME", default_values = POLICIES, hide_default_value = true,
        value_parser = clap::builder::PossibleValuesParser::new(POLICIES))]
    pub policy: Vec<String>,
    /// Threads; the result does not depend on them
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = threads)]
    pub threads: usize,
}

/// Rule about memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// Running VMs need none.
    Ignored,
    /// The memory of all VMs fits at any time.
    Kept,
}

/// Handling of gaps in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Gaps {
    /// They are left out.
    Exclude,
    /// They are an error.
    Refuse,
}

fn placement(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(vm, host)| !vm.is_empty() && !host.is_empty());
    pair.map(|(vm, host)| (vm.to_owned(), host.to_owned())).ok_or_else(|| "has to be VM=HOST".to_owned())
}

fn what_if(text: &str) -> Result<WhatIf, String> {
    let wrong = || "has to be HOST:qemu=VERSION, HOST:kernel=VERSION or HOST:cpu=PLATFORM".to_owned();
    let (host, change) = text.rsplit_once(':').ok_or_else(wrong)?;
    let (what, value) = change.split_once('=').filter(|(_, value)| !value.is_empty()).ok_or_else(wrong)?;
    let (host, value) = (host.to_owned(), Some(value.to_owned()));
    let none = PlatformChange::default();
    match what {
        "qemu" => Ok(WhatIf { host, change: PlatformChange { qemu: value, ..none } }),
        "kernel" => Ok(WhatIf { host, change: PlatformChange { kernel: value, ..none } }),
        "cpu" => Ok(WhatIf { host, change: PlatformChange { cpu_of: value, ..none } }),
        _ => Err(wrong()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("has to be above 0 and finite".to_owned()) }
}

fn percent(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=100.0).contains(&value) { Ok(value) } else { Err("has to be from 0 to 100".to_owned()) }
}

fn days(text: &str) -> Result<usize, String> {
    let most = fleet::generator::MOST_DAYS;
    let days = text.parse().ok().filter(|days| (1..=most).contains(days));
    days.ok_or_else(|| format!("has to be from 1 to {most}"))
}

fn hosts(text: &str) -> Result<usize, String> {
    let hosts = text.parse().ok().filter(|hosts| (1..=1_000_000).contains(hosts));
    hosts.ok_or_else(|| "has to be from 1 to 1,000,000".to_owned())
}

fn repeat(text: &str) -> Result<usize, String> {
    let times = text.parse().ok().filter(|times| (1..=1000).contains(times));
    times.ok_or_else(|| "has to be from 1 to 1,000".to_owned())
}

fn threads(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|threads| (1..=256).contains(threads))
        .ok_or_else(|| "has to be from 1 to 256".to_owned())
}
