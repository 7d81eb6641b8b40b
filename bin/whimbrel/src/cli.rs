//! The command line.

mod choices;
mod evacuations;

use std::path::PathBuf;

use api::{BadName, HostId, MigrationOptions, NewAddress, RamChoice, Rate, VmName};
use clap::{Args, Parser, Subcommand, ValueEnum};

use choices::{DisksArg, one_disk};
pub(crate) use evacuations::{EvacuateCommand, EvacuationCommand, MovesArgs, ReturnCommand};

use crate::fleet_command::FleetCommand;

fn vm_name(name: &str) -> Result<VmName, BadName> {
    VmName::new(name)
}

fn host_id(name: &str) -> Result<HostId, BadName> {
    HostId::new(name)
}

/// Moves running virtual machines from host to host
///
/// An agent runs on each host (`whimbrel agent`); commands connect to the agent of the host on which they are called. A VM is
/// migrated from the host that it is on. Commands about the whole fleet connect to the controller (`whimbrel controller`).
#[derive(Debug, Parser)]
#[command(name = "whimbrel", version, max_term_width = 100, after_help = EXIT_CODES, after_long_help = EXAMPLE)]
pub(crate) struct Cli {
    /// Socket of the agent
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        default_value = "/run/whimbrel/agent.sock",
        help_heading = ALL_COMMANDS
    )]
    pub socket: PathBuf,

    /// Socket of the controller, for commands about the fleet
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "WHIMBREL_CONTROLLER",
        hide_env_values = true,
        default_value = "/run/whimbrel/controller.sock",
        help_heading = ALL_COMMANDS
    )]
    pub controller: PathBuf,

    /// Print one JSON document on the standard output, also for errors
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
    1  failed; a VM that was to be migrated is at its source, unharmed
    2  usage or bad input; nothing was done
    3  in doubt, see `whimbrel recover`
    4  the VM ended before it was moved
  130  interrupted; a migration that was watched continues"
    };
}

const EXIT_CODES: &str = exit_codes!();

const EXAMPLE: &str = concat!(
    "\
Example, on the host where a QEMU runs that was started with `-name web1`:
  whimbrel vm adopt web1                    the agent adopts it; nothing changes in it
  whimbrel migrate web1 --to beta --check   lists blockers, and how to remove them
  whimbrel forecast web1 --to beta          forecasts time, downtime and bytes
  whimbrel migrate web1 --to beta           migrates it, and shows a report

",
    exit_codes!()
);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the agent of this host
    Agent(AgentCommand),
    /// Show the agent and its host
    Info,
    /// List, adopt, start and forget VMs of this host
    Vm {
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Migrate a running VM to another host
    ///
    /// The guest keeps running while its memory is copied in rounds. When the remaining pages need less time than the
    /// longest downtime, the guest is stopped, the rest is sent, and the guest resumes at the destination. Until then
    /// `whimbrel cancel` can abort the migration, and any failure leaves the VM at the source. Ctrl-C only ends the
    /// watching.
    ///
    /// Defaults are in [migration] of the agent's configuration; the built-in ones are in parentheses.
    Migrate(MigrateCommand),
    /// Forecast a migration: whether it converges, total time, downtime, bytes; each with an 80% interval
    ///
    /// The VM's writes are tracked for at most 3.2 seconds, a sample of its memory is read, and the link is measured by
    /// some data if no migration has shown its rate within a day. Nothing changes in the VM. Refused while the VM is in a
    /// migration. The options are those of `whimbrel migrate`.
    Forecast(ForecastCommand),
    /// Watch the latest migration of a VM until it has ended; Ctrl-C only ends the watching
    Watch {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// List migrations from and to this host
    Migrations,
    /// Abort a migration; the VM stays at the source
    ///
    /// Possible until the commit point, which is after the guest was stopped. All changes are rolled back. After the
    /// commit point the command fails, and changes nothing.
    Cancel {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// Change limits of a migration that is under way, on its source host
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
        /// Most passes over the dirty pages in pre-copy
        #[arg(long, value_name = "N", group = "limits")]
        max_passes: Option<u32>,
        /// With `--policy sla`: longest total time, in seconds from the start of the migration; 0 for no limit
        #[arg(long, value_name = "SECONDS", group = "limits")]
        max_total: Option<u64>,
    },
    /// Show the report of a migration, on its source host
    Report {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// Epoch of the migration: 7 for web1#7; by default the latest
        epoch: Option<u64>,
        /// Explain the amount of sent data, instead of showing the course of the migration
        #[arg(long)]
        explain: bool,
    },
    /// Repeat the decisions of a migration, and show those that would be different now; needs no agent
    Replay {
        /// The migration's report, from `whimbrel --json report`; - for the standard input
        report: PathBuf,
    },
    /// List and remove images that VMs left on this host when they migrated away with their disks, or ended
    Images {
        #[command(subcommand)]
        command: ImagesCommand,
    },
    /// Show what migrations have in the kernel of this host
    Net {
        #[command(subcommand)]
        command: NetCommand,
    },
    /// Run the controller of a fleet, to which agents connect
    Controller(ControllerCommand),
    /// Empty hosts: all of their VMs move to others, and nothing remains there
    ///
    /// The controller plans the moves, carries them out, and says whether the deadline can be kept. Ctrl-C only ends the
    /// watching. `whimbrel return` brings the VMs back.
    Evacuate(EvacuateCommand),
    /// Bring back the VMs that evacuations have moved away from a host
    Return(ReturnCommand),
    /// List, watch, cancel, resume and forget evacuations
    Evacuation {
        #[command(subcommand)]
        command: EvacuationCommand,
    },
    /// Show the fleet of a controller, cordon hosts, plan moves, or simulate a fleet on traces
    Fleet {
        #[command(subcommand)]
        command: FleetCommand,
    },
    /// Settle a migration that is in doubt; describes the risk first
    Recover(RecoverCommand),
}

#[derive(Debug, Args)]
pub(crate) struct AgentCommand {
    /// The configuration; docs/agent.example.toml has every key
    #[arg(long, value_name = "FILE", default_value = host::config::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Only check that the configuration can be used, with all files that it names
    #[arg(long)]
    pub check_config: bool,
    /// Format of log lines: `text`, or `json` for programs. `RUST_LOG=debug` in the environment logs more
    #[arg(long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    pub log_format: LogFormat,
}

#[derive(Debug, Args)]
pub(crate) struct ControllerCommand {
    /// The configuration; docs/controller.example.toml has every key
    #[arg(long, value_name = "FILE", default_value = controller::config::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Only check that the configuration can be used
    #[arg(long)]
    pub check_config: bool,
    /// Largest term that agents have seen, after the controller's records were lost or restored: it takes the next one
    #[arg(
        long,
        value_name = "TERM",
        default_value_t = 0,
        hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(..1 << 62)
    )]
    pub least_term: u64,
    /// Format of log lines: `text`, or `json` for programs. `RUST_LOG=debug` in the environment logs more
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
    /// List the VMs and their states
    List,
    /// Show the properties of a VM; with --json all of them
    Show {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// Adopt a running QEMU; nothing changes in it
    ///
    /// It needs a QMP monitor on a Unix socket without another client: -qmp unix:PATH,server=on,wait=off.
    Adopt(AdoptCommand),
    /// Start a VM from a file and adopt it
    Run {
        /// The VM file; docs/vm.example.toml has every key
        file: PathBuf,
        /// Leave the guest paused; it can be migrated all the same
        #[arg(long)]
        paused: bool,
        /// Start it also where another host owns the VM, or from images that a VM left here when it moved away
        #[arg(long)]
        accept_risk: bool,
    },
    /// Forget a VM; its QEMU keeps running
    Forget {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
    },
    /// Make this host the owner of a VM in the ownership registry, where another host is recorded by mistake
    Claim {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// Carry it out; the risk was read and understood
        #[arg(long)]
        accept_risk: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImagesCommand {
    /// List images that VMs left here and that still exist
    List,
    /// Remove images that a VM left here; only images that were copied completely, are unchanged since, and are not
    /// open
    Remove {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// Only images left by this migration: 7 for web1#7; by default by all of them
        epoch: Option<u64>,
        /// Instead, remove disks of a VM that arrived here, ended here and was forgotten: there may be no other copy of
        /// them
        #[arg(long, conflicts_with = "epoch")]
        ended: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetCommand {
    /// List redirected connections, tables of netfilter, devices, routes and rules, each with its migration, and mark
    /// those whose migration has ended
    Show,
    /// End the redirections of a VM's old connections on this host; these connections end with them
    Release {
        /// The VM
        #[arg(value_parser = vm_name)]
        vm: VmName,
        /// End the translation of its new addresses as well: the VM itself has configured them by now
        #[arg(long)]
        all: bool,
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
    /// Name of the VM; by default the name in QEMU's options
    #[arg(long = "as", value_name = "VM", value_parser = vm_name)]
    pub name: Option<VmName>,
    /// Carry this option of QEMU's command line over although it is unknown
    #[arg(long = "allow-option", value_name = "OPTION", allow_hyphen_values = true)]
    pub allow_options: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateCommand {
    /// The VM
    #[arg(value_parser = vm_name)]
    pub vm: VmName,
    /// The destination host: a name under [hosts] of the agent's configuration
    #[arg(long, value_name = "HOST", value_parser = host_id)]
    pub to: HostId,
    /// Only run the pre-flight checks on both hosts; changes nothing
    #[arg(long, conflicts_with = "detach")]
    pub check: bool,
    /// With --check: forecast the migration, too; see `whimbrel forecast`
    #[arg(long, requires = "check")]
    pub forecast: bool,
    #[command(flatten)]
    pub request: RequestArgs,
    /// Return as soon as the migration runs; `whimbrel watch` shows its progress
    #[arg(long)]
    pub detach: bool,
}

/// Arguments of a migration, and of its forecast.
#[derive(Debug, Args)]
pub(crate) struct RequestArgs {
    #[command(flatten)]
    pub options: MigrationOptions,
    /// Compare all of memory and of copied disks after the stop; makes the downtime much longer
    #[arg(long)]
    pub verify: bool,
    /// Kind of RAM at the destination: `auto` keeps all properties that the VM has now, `memfd` is shared, `anonymous`
    /// is not
    #[arg(
        long,
        value_name = "auto|memfd|anonymous",
        default_value = "auto",
        hide_possible_values = true,
        hide_default_value = true
    )]
    pub ram: RamChoice,
    /// Disks that the VM writes to: `auto` copies those that the destination does not see, `shared` copies none, `copy`
    /// copies all
    #[arg(
        long,
        value_name = "auto|shared|copy",
        default_value = "auto",
        hide_possible_values = true,
        hide_default_value = true
    )]
    pub disks: DisksArg,
    /// Like --disks, for one disk; may be repeated
    #[arg(long, value_name = "NAME=auto|shared|copy", value_parser = one_disk)]
    pub disk: Vec<(String, DisksArg)>,
    /// Copy disks without the internal snapshots of their images, which stay in the images at the source
    #[arg(long)]
    pub without_snapshots: bool,
    /// For a VM that moves to another network: an address of the VM, and the one by which it is reached there; may be
    /// repeated. The VM's networks are not compared then
    #[arg(long = "new-address", value_name = "OLD=NEW[/PREFIX]")]
    pub new_addresses: Vec<NewAddress>,
    /// Carry this option of QEMU's command line over although it is unknown
    #[arg(long = "allow-option", value_name = "OPTION", allow_hyphen_values = true)]
    pub allow_options: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ForecastCommand {
    /// The VM
    #[arg(value_parser = vm_name, required_unless_present = "calibration")]
    pub vm: Option<VmName>,
    /// The destination host: a name under [hosts] of the agent's configuration
    #[arg(long, value_name = "HOST", value_parser = host_id, required_unless_present = "calibration")]
    pub to: Option<HostId>,
    /// Measure the VM and the link anew, also if that was done in the last hour and the last day
    #[arg(long)]
    pub fresh: bool,
    /// Instead, show the forecasts of migrations from this host beside their outcomes
    #[arg(long, conflicts_with_all = ["vm", "to", "fresh"])]
    pub calibration: bool,
    #[command(flatten)]
    pub request: RequestArgs,
}

#[derive(Debug, Args)]
#[command(long_about = "Settle a migration that is in doubt.\n\nWithout a decision, the other host and the \
                  registry are asked once more, and their answer is followed, without risk. A decision adds \
                  what only an operator can know; its risk is described first, and it is carried out only \
                  with --accept-risk.")]
pub(crate) struct RecoverCommand {
    /// The VM
    #[arg(value_parser = vm_name)]
    pub vm: VmName,
    /// Epoch of the migration; by default the latest
    pub epoch: Option<u64>,
    /// Run the VM on this host: the other host does not run it and never will
    #[arg(long, group = "decision")]
    pub run_here: bool,
    /// Discard this host's copy: the other host has the VM, or no host shall run it
    #[arg(long, group = "decision")]
    pub discard_copy: bool,
    /// Claim the VM in the ownership registry even if the other host has won there: that host never ran the VM
    #[arg(long, requires = "run_here", conflicts_with = "discard_copy")]
    pub overrule_registry: bool,
    /// Do not use the ownership registry, which is lost for good; no other host may rely on it any longer
    #[arg(long, requires = "decision", conflicts_with = "overrule_registry")]
    pub without_registry: bool,
    /// Carry the decision out; the risk was read and understood
    #[arg(long)]
    pub accept_risk: bool,
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
    fn a_forecast_needs_a_vm_and_a_host_or_shows_the_record() {
        let parse = |words: &[&str]| Cli::try_parse_from(["whimbrel", "forecast"].iter().chain(words));
        assert!(parse(&["web", "--to", "beta", "--fresh", "--policy", "hybrid"]).is_ok());
        assert!(parse(&["--calibration"]).is_ok());
        for bad in [&["web"][..], &["--to", "beta"], &[], &["web", "--to", "beta", "--calibration"]] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
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
