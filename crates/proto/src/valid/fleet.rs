//! Limits on the contents of an agent's reports to its controller. Texts come from a kernel, a QEMU or a peer: only their
//! length is limited, and whoever shows them makes control characters visible.

use super::{Invalid, at_most};
use crate::limits;
use crate::message::{CpuFacts, FleetChange, FleetReport, HostFacts, MigrationFacts, VmFacts};

impl FleetReport {
    /// Checks the lengths of lists and texts.
    pub fn validate(&self) -> Result<(), Invalid> {
        match self {
            Self::Begin { host } => host.validate(),
            Self::Changed { changes } => {
                at_most("changes", changes.len(), limits::FLEET_CHANGES)?;
                changes.iter().try_for_each(FleetChange::validate)
            }
            Self::Complete | Self::Answer { .. } | Self::EvacuateHost { .. } => Ok(()),
        }
    }
}

impl FleetChange {
    fn validate(&self) -> Result<(), Invalid> {
        match self {
            Self::Host { host } => host.validate(),
            Self::Vm { vm } => vm.validate(),
            Self::Migration { migration } => migration.validate(),
            // Whoever owns the format of contents and states checks them.
            Self::Load { .. } | Self::VmGone { .. } | Self::Contents { .. } | Self::Move { .. } => Ok(()),
        }
    }
}

impl HostFacts {
    fn validate(&self) -> Result<(), Invalid> {
        let Self { version, role, address, boot_id, kernel, .. } = self;
        for (field, text) in [
            ("an agent's version", version),
            ("an agent's role", role),
            ("an agent's address", address),
            ("a boot id", boot_id),
            ("a kernel's release", kernel),
        ] {
            short(field, text)?;
        }
        at_most("peers", self.peers.len(), limits::FLEET_NAMES)?;
        at_most("NUMA nodes", self.numa_bytes.len(), limits::FLEET_NAMES)?;
        names("versions of QEMU", &self.qemu_versions)?;
        names("features of a kernel", &self.kernel_lacks)?;
        let CpuFacts { vendor, model, features, .. } = &self.cpu;
        short("a processor's maker", vendor)?;
        short("a processor's model", model)?;
        names("features of a processor", features)
    }
}

impl VmFacts {
    fn validate(&self) -> Result<(), Invalid> {
        short("a VM's state", &self.state)?;
        short("a version of QEMU", &self.qemu_version)?;
        short("a machine type", &self.machine_type)?;
        short("a CPU model", &self.cpu_model)
    }
}

impl MigrationFacts {
    fn validate(&self) -> Result<(), Invalid> {
        short("a migration's state", &self.state)?;
        self.message.as_ref().map_or(Ok(()), |message| short("a migration's message", message))?;
        self.progress.as_ref().map_or(Ok(()), |progress| short("a migration's phase", &progress.phase))
    }
}

fn names(field: &'static str, names: &[String]) -> Result<(), Invalid> {
    at_most(field, names.len(), limits::FLEET_NAMES)?;
    names.iter().try_for_each(|name| short(field, name))
}

fn short(field: &'static str, text: &str) -> Result<(), Invalid> {
    if text.len() <= limits::FLEET_TEXT_BYTES { Ok(()) } else { Err(Invalid::Text { field }) }
}
