//! One host: its configuration, its VMs and their QEMUs, the pre-flight check, and the files that are made for VMs.

mod arrival_error;
pub mod arrivals;
mod arriving_vm;
pub mod config;
mod context;
pub mod cpu;
pub mod disks;
pub mod dns_keeper;
mod emulators;
pub mod fault;
pub mod freeze;
mod helper_program;
pub mod leftover_images;
pub mod link_rate;
mod logs;
pub mod measurement;
pub mod missing_pages_record;
pub mod name_locks;
pub mod net_show;
pub mod network_cards;
pub mod ownership;
pub mod peers;
pub mod pool;
pub mod preflight;
pub mod ram;
pub mod redirections;
pub mod repointing;
mod runtime_files;
mod source_vm;
pub mod templates;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod throttle_guard;
pub mod verification;
pub mod vms;
mod watch;

pub(crate) use api::with_causes as chain;
pub use arrival_error::ArrivalError;
pub use arriving_vm::{ArrivalArtifacts, ArrivingVm, ContOutcome, DestinationDetails};
pub use context::{Context, MigrationTransport};
pub(crate) use emulators::find_by_monitor;
pub use emulators::{EmulatorCache, end_probes};
pub use helper_program::HelperProgram;
pub use source_vm::{SourceVm, VmError};
pub use throttle_guard::{DismissOnDrop, ThrottleGuard, guard_main};
