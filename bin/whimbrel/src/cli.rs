//! What the command line looks like.

mod choices;
mod laboratory;

use std::path::PathBuf;

use agent::api::{BadName, Compress, HostId, VmName};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::rate::Rate;
use choices::{
    DeltasArg, DisksArg, OnLimitArg, PolicyArg, RamArg, SoftPagesArg, ThrottleArg, ThrottleCpuArg, one_disk,
};
pub(crate) use laboratory::{
    AxesOptions, BenchCommand, CaseOptions, DisksCommand, LabCommand, ResultsOptions, SweepCommand,
};

fn vm_name(name: &str) -> Result<VmName, BadName> {
    VmName::new(name)
}

fn host_id(name: &str) -> Result<HostId, BadName> {
    HostId::new(name)
}

/// Moves running virtual machines from host to host
///
/// An agent runs on each host (`whimbrel agent`); all other commands speak to the one of the host on which they are
/// called. A VM is moved from the host that it is on.
#[derive(Debug, Parser)]
#[command(name = "whimbrel", version, max_term_width = 100, after_help = EXIT_CODES, after_long_help = EXAMPLE)]
pub(crate) struct Cli {
    /// Socket of the agent to speak to
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        default_value = "/run/whimbrel/agent.sock",
        help_heading = ALL_COMMANDS
    )]
    pub socket: PathBuf,

    /// Answer with one JSON document on the standard output, errors included
    #[arg(long, global = true, help_heading = ALL_COMMANDS)]
    pub json: bool,

    #[command(subcommand)]
    pub command: Command,
}

const ALL_COMMANDS: &str = "Options of all commands";

macro_rules! exit_codes {
    () => {
        "\
Exit codes:
    0  done
    1  failed; a VM that was to be moved is at its source, unharmed
    2  usage or bad input; nothing was done
    3  in doubt, see `whimbrel recover`
    4  the VM ended before it was moved
  130  interrupted; a migration that was watched goes on"
    };
}

const EXIT_CODES: &str = exit_codes!();

const EXAMPLE: &str = concat!(
    "\
Example, on the host where a QEMU runs that was started with `-name web1`:
  whimbrel vm adopt web1                    the agent takes care of it; nothing changes in it
  whimbrel migrate web1 --to beta --check   what stands in the way, and what to do about it
  whimbrel migrate web1 --to beta           moves it, and ends with a report

",
    exit_codes!()
);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the agent of this host
    Agent(AgentCommand),
    /// Show what the agent and its host are
    Info,
    /// List, adopt, start and forget VMs of this host
    Vm {
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Move a running VM to another host
    ///
    /// The guest runs on while its memory is copied in rounds. When what is left would take less than the longest
    /// downtime, the guest is stopped, the rest is sent, and it runs at the other host. Until then the migration can be
    /// ended by `whimbrel cancel`, and whatever fails leaves the VM where it is. Ctrl-C ends the watching only.
    ///
    /// What is not given here is as in [limits] of the agent's configuration; defaults in parentheses.
    Migrate(MigrateCommand),
    /// Watch the latest migration of a VM until it is over; Ctrl-C ends the watching only
    Watch {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// List migrations from and to this host
    Migrations,
    /// End a migration; the VM stays where it is
    ///
    /// Possible up to the point of no return, which is after the guest was stopped. What was begun is taken back.
    /// After it the command says that it is too late, and changes nothing.
    Cancel {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// Change limits of a migration that is under way, on the host that the VM leaves
    #[command(group = clap::ArgGroup::new("limits").required(true).multiple(true))]
    Limit {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// Cap on the sending rate: 500M or 512Mi bytes per second, 1.5Gbit, none
        #[arg(long, value_name = "RATE", group = "limits")]
        bandwidth: Option<Rate>,
        /// Longest downtime, in milliseconds
        #[arg(long, value_name = "MS", group = "limits")]
        max_downtime: Option<u64>,
        /// Most rounds of pre-copy
        #[arg(long, value_name = "N", group = "limits")]
        max_rounds: Option<u32>,
        /// With `--policy sla`: how long all of it may take, in seconds from its beginning on; 0 for as long as it takes
        #[arg(long, value_name = "SECONDS", group = "limits")]
        max_total: Option<u64>,
    },
    /// Show the report of a migration, on the host that the VM left
    Report {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// Which of its migrations: 7 for web1#7; by default the latest
        epoch: Option<u64>,
        /// Tell why so much was sent, in the place of how it went
        #[arg(long)]
        explain: bool,
    },
    /// Decide again what was decided in a migration, and tell where that would be decided otherwise now; needs no agent
    Replay {
        /// The migration's report, as `whimbrel --json report` gives it; - for the standard input
        report: PathBuf,
    },
    /// List and remove images that VMs left on this host when they moved away with their disks, or ended
    Images {
        #[command(subcommand)]
        command: ImagesCommand,
    },
    /// Settle a migration that is in doubt; says first what that risks
    Recover(RecoverCommand),
    /// Make hosts on this machine, as network namespaces, to try things with
    Lab {
        #[command(subcommand)]
        command: LabCommand,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AgentCommand {
    /// The configuration; docs/agent.example.toml has every key
    #[arg(long, value_name = "FILE", default_value = agent::config::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Only say whether the configuration can be used, with all files that it names
    #[arg(long)]
    pub check_config: bool,
    /// How log lines look: `text` for people, `json` for programs. `RUST_LOG=debug` in the environment logs more
    #[arg(long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    pub log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// List the VMs and how they are
    List,
    /// Show what is known of a VM; with --json all of it
    Show {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// Take care of a QEMU that runs already; nothing changes in it
    ///
    /// It needs a QMP monitor on a Unix socket that nobody else holds: -qmp unix:PATH,server=on,wait=off.
    Adopt(AdoptCommand),
    /// Start a VM from a file and take care of it
    Run {
        /// The VM file; docs/vm.example.toml has every key
        file: PathBuf,
        /// Leave the guest paused; it can be moved all the same
        #[arg(long)]
        paused: bool,
        /// Start it also where another host owns the VM, or from images that a VM left here when it moved away
        #[arg(long)]
        i_know_the_risk: bool,
    },
    /// Forget a VM; its QEMU goes on
    Forget {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// Make this host the owner of a VM in the register of owners, where another host is named there by mistake
    Claim {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// Carry it out; what it risks was read and understood
        #[arg(long)]
        i_know_the_risk: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImagesCommand {
    /// List images that were left here and are still there
    List,
    /// Remove what a VM has left here; only what was copied whole, was not changed since, and is open nowhere
    Remove {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// What it left in this migration: 7 for web1#7; by default in all of them
        epoch: Option<u64>,
        /// The disks of a VM that came here, ended here and was forgotten, instead: there may be no other copy of them
        #[arg(long, conflicts_with = "epoch")]
        ended: bool,
    },
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("which").required(true))]
pub(crate) struct AdoptCommand {
    /// The QEMU that was started with this name (-name)
    #[arg(value_name = "NAME", group = "which")]
    pub qemu_name: Option<String>,
    /// The QEMU with this process id
    #[arg(long, value_name = "PID", group = "which")]
    pub pid: Option<u32>,
    /// The QEMU behind this QMP socket
    #[arg(long, value_name = "PATH", group = "which")]
    pub qmp: Option<PathBuf>,
    /// What to call the VM; by default the name that QEMU was given
    #[arg(long = "as", value_name = "VM", value_parser = vm_name)]
    pub name: Option<VmName>,
    /// Carry this option of QEMU's command line over although it is not known
    #[arg(long = "allow-option", value_name = "OPTION", allow_hyphen_values = true)]
    pub allow_options: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateCommand {
    /// The VM
    #[arg(value_parser = vm_name)]
    pub vm: VmName,
    /// The other host: a name under [hosts] of the agent's configuration
    #[arg(long, value_name = "HOST", value_parser = host_id)]
    pub to: HostId,
    /// Only look on both hosts whether it can be done; changes nothing
    #[arg(long, conflicts_with = "detach")]
    pub check: bool,
    /// When the VM is stopped: `pattern` when rounds do not make the downtime shorter any more, `target` as soon as it
    /// would be short enough, `rounds` after some rounds; these two are the rules of KVM and Xen. `hybrid`: after all of
    /// memory went once; what is left then comes when the VM runs at the other host, and until it is there the VM needs
    /// both hosts. `sla`: by rounds, with slower processors, or as `hybrid`: whichever is expected to keep --max-downtime
    /// and --max-total (pattern)
    #[arg(long, value_name = "pattern|target|rounds|hybrid|sla", hide_possible_values = true)]
    pub policy: Option<PolicyArg>,
    /// Longest downtime, in milliseconds (300)
    #[arg(long, value_name = "MS")]
    pub max_downtime: Option<u64>,
    /// With `--policy sla`: how long all of it may take, in seconds; 0 for as long as it takes (0)
    #[arg(long, value_name = "SECONDS")]
    pub max_total: Option<u64>,
    /// Most rounds of pre-copy (30)
    #[arg(long, value_name = "N")]
    pub max_rounds: Option<u32>,
    /// With `--policy hybrid`: how often all that is dirty goes before the rest comes after the VM (1)
    #[arg(long, value_name = "N")]
    pub hybrid_passes: Option<u32>,
    /// When the rounds or the time are used up, or rounds lead no further for a while: `abort` leaves the VM where it is,
    /// `stop` stops it and sends the rest, however long that takes, `post-copy` has the rest come when the VM runs at
    /// the other host (abort)
    #[arg(long, value_name = "abort|stop|post-copy", hide_possible_values = true)]
    pub on_limit: Option<OnLimitArg>,
    /// Cap on the sending rate: 500M or 512Mi bytes per second, 1.5Gbit, none (none)
    #[arg(long, value_name = "RATE")]
    pub bandwidth: Option<Rate>,
    /// Number of data streams, 1 to 64 (4)
    #[arg(long, value_name = "N")]
    pub streams: Option<u16>,
    /// Compare all of memory and of copied disks after the stop; makes the downtime much longer
    #[arg(long)]
    pub verify: bool,
    /// How fast the VM may write to disks that are copied: `off` as it likes, `drain` at most two fifths of what is
    /// sent, `threshold` the slower the more it has written (off)
    #[arg(long, value_name = "off|drain|threshold", hide_possible_values = true)]
    pub throttle_writes: Option<ThrottleArg>,
    /// How fast the VM's processors may be: `off` as ever, `drain` so fast that it dirties half of what is sent,
    /// where it would dirty more and could not be stopped in time (off)
    #[arg(long, value_name = "off|drain", hide_possible_values = true)]
    pub throttle_cpu: Option<ThrottleCpuArg>,
    /// Send all of the disks that are copied, also what the other host has already in its templates or from before
    #[arg(long)]
    pub no_references: bool,
    /// How pages are compressed: `auto` as hard as link and processors want it, `none`, `lz4`, `zstd`, or
    /// `zstd:LEVEL` with a level from 1 to 19 (auto)
    #[arg(long, value_name = "auto|none|lz4|zstd[:LEVEL]")]
    pub compress: Option<Compress>,
    /// Of pages that are sent again only what changed: `auto` where the link is slower than finding that out, `always`,
    /// `never` (auto)
    #[arg(long, value_name = "auto|always|never", hide_possible_values = true)]
    pub deltas: Option<DeltasArg>,
    /// Memory that is not sent because the VM can do without: `none`, what is `free`, page cache that is `cold` as
    /// well, or `all` of the page cache; a program in the VM has to say which that is (free)
    #[arg(long, value_name = "none|free|cold|all", hide_possible_values = true)]
    pub soft_pages: Option<SoftPagesArg>,
    /// Kind of RAM at the destination: `auto` loses nothing that the VM had there, `memfd` is shared, `anonymous` is
    /// not
    #[arg(
        long,
        value_name = "auto|memfd|anonymous",
        default_value = "auto",
        hide_possible_values = true,
        hide_default_value = true
    )]
    pub ram: RamArg,
    /// Disks that the VM writes to: `auto` copies those that the other host does not see, `shared` copies none, `copy`
    /// all
    #[arg(
        long,
        value_name = "auto|shared|copy",
        default_value = "auto",
        hide_possible_values = true,
        hide_default_value = true
    )]
    pub disks: DisksArg,
    /// The same for one disk; may be given again
    #[arg(long, value_name = "NAME=auto|shared|copy", value_parser = one_disk)]
    pub disk: Vec<(String, DisksArg)>,
    /// Copy disks without the internal snapshots of their images, which stay in the images at the source
    #[arg(long)]
    pub leave_snapshots: bool,
    /// Carry this option of QEMU's command line over although it is not known
    #[arg(long = "allow-option", value_name = "OPTION", allow_hyphen_values = true)]
    pub allow_options: Vec<String>,
    /// Return as soon as it runs; `whimbrel watch` shows how far it is
    #[arg(long)]
    pub detach: bool,
}

#[derive(Debug, Args)]
#[command(
    long_about = "Settle a migration that is in doubt.\n\nWithout a decision the other host and the register are \
                  asked once more, and what they say is done: that risks nothing. A decision says what only an \
                  operator can know; it is described first, and carried out with --i-know-the-risk."
)]
pub(crate) struct RecoverCommand {
    /// The VM
    #[arg(value_parser = vm_name)]
    pub vm: VmName,
    /// Which of its migrations; by default the latest
    pub epoch: Option<u64>,
    /// Run the VM on this host: the other one does not run it and never will
    #[arg(long, group = "decision")]
    pub run_here: bool,
    /// Give this host's copy up: the other host has the VM, or nobody shall
    #[arg(long, group = "decision")]
    pub give_up: bool,
    /// Take the VM in the register of owners even from the other host, if that has won there: it never ran the VM
    #[arg(long, requires = "run_here", conflicts_with = "give_up")]
    pub even_against_the_register: bool,
    /// Do not ask the register of owners, which is lost for good; no other host may count on it any more
    #[arg(long, requires = "decision", conflicts_with = "even_against_the_register")]
    pub without_the_register: bool,
    /// Carry the decision out; what it risks was read and understood
    #[arg(long)]
    pub i_know_the_risk: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn one_way_to_name_a_qemu() {
        let parse = |words: &[&str]| Cli::try_parse_from(["whimbrel", "vm", "adopt"].iter().chain(words));
        assert!(parse(&["web"]).is_ok());
        assert!(parse(&["--pid", "7", "--as", "web", "--allow-option", "-sandbox"]).is_ok());
        for bad in [&[][..], &["web", "--pid", "7"], &["--pid", "7", "--qmp", "/x"], &["--pid", "x"]] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
