//! Arguments of commands about evacuations.

use api::fleet::{Deadline, MovePolicy};
use api::{HostId, Rate, VmName};
use clap::{Args, Subcommand, ValueEnum};

use super::{host_id, vm_name};

#[derive(Debug, Args)]
pub(crate) struct EvacuateCommand {
    /// The hosts
    #[arg(value_name = "HOST", value_parser = host_id, required_unless_present = "this_host")]
    pub hosts: Vec<HostId>,
    /// Hosts to which their VMs go; by default all others
    #[arg(long, value_name = "HOST,…", value_delimiter = ',', value_parser = host_id)]
    pub to: Vec<HostId>,
    /// Deadline: a time from now as 45m or 1h30m, or a time in UTC as 2026-12-01T02:00:00Z
    #[arg(long, value_name = "TIME")]
    pub by: Option<Deadline>,
    /// Begin although the deadline is not expected to be kept
    #[arg(long, requires = "by")]
    pub accept_late: bool,
    /// Priorities of VMs: those with a higher one move earlier, and get more of the links
    #[arg(long, value_name = "VM=N,…", value_delimiter = ',', value_parser = priority)]
    pub priority: Vec<(VmName, i32)>,
    #[command(flatten)]
    pub moves: MovesArgs,
    /// The host on which this is run, by its agent, and wait: for a unit that runs before the host is shut down
    #[arg(long, conflicts_with_all = ["hosts", "to", "accept_late", "partial", "priority", "dry_run"])]
    pub this_host: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReturnCommand {
    /// The host
    #[arg(value_parser = host_id)]
    pub host: HostId,
    #[command(flatten)]
    pub moves: MovesArgs,
}

/// Options of all requests that move VMs of a host.
#[derive(Debug, Args)]
pub(crate) struct MovesArgs {
    /// Move what can be moved where some VMs cannot
    #[arg(long)]
    pub partial: bool,
    /// Cap on the rate of all moves together: 500M or 512Mi bytes per second, 1.5Gbit
    #[arg(long, value_name = "RATE")]
    pub bandwidth: Option<Rate>,
    /// Most moves of a host at the same time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub per_host: Option<u32>,
    /// Policy for the stops; by default that of each source
    #[arg(long, value_name = "pattern|hybrid|sla", hide_possible_values = true)]
    pub policy: Option<PolicyArg>,
    /// Compare all of memory and of copied disks after each stop; makes downtimes much longer
    #[arg(long)]
    pub verify: bool,
    /// Only show the plan: what would move where, when and why; moves nothing
    #[arg(long, conflicts_with = "detach")]
    pub dry_run: bool,
    /// Return as soon as it has begun; `whimbrel evacuation watch` shows its progress
    #[arg(long)]
    pub detach: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArg {
    /// When more rounds do not shorten the downtime any further
    Pattern,
    /// After one pass over memory; the rest follows by post-copy
    Hybrid,
    /// By whichever way is expected to keep the limits
    Sla,
}

impl From<PolicyArg> for MovePolicy {
    fn from(arg: PolicyArg) -> Self {
        match arg {
            PolicyArg::Pattern => Self::Pattern,
            PolicyArg::Hybrid => Self::Hybrid,
            PolicyArg::Sla => Self::Sla,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvacuationCommand {
    /// List evacuations, the newest first
    List,
    /// Show an evacuation: its moves, and what they wait for
    Show {
        /// Its id
        id: String,
    },
    /// Watch an evacuation until it has ended; Ctrl-C only ends the watching
    Watch {
        /// Its id
        id: String,
    },
    /// Cancel an evacuation: VMs that have moved stay where they are
    Cancel {
        /// Its id
        id: String,
    },
    /// Resume an evacuation that was cancelled or is incomplete
    Resume {
        /// Its id
        id: String,
        /// Return as soon as it has begun
        #[arg(long)]
        detach: bool,
    },
    /// Forget an evacuation that has ended, with what `whimbrel return` would bring back
    Forget {
        /// Its id
        id: String,
    },
}

fn priority(text: &str) -> Result<(VmName, i32), String> {
    let wrong = || "has to be VM=N, with a whole number N".to_owned();
    let (vm, priority) = text.split_once('=').ok_or_else(wrong)?;
    let vm = vm_name(vm).map_err(|error| error.to_string())?;
    Ok((vm, priority.parse().map_err(|_| wrong())?))
}
