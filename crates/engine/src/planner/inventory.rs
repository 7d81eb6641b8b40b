//! The fleet as the planner sees it: hosts, VMs, and what they are made of.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::forecast::{Estimate, MigrationForecast};

/// Hosts and VMs at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// Hosts.
    pub hosts: Vec<HostSpec>,
    /// VMs.
    #[serde(default)]
    pub vms: Vec<VmSpec>,
    /// Processors and QEMUs of hosts, by names that hosts refer to.
    pub host_platforms: BTreeMap<String, HostPlatform>,
    /// Requirements of VMs, by names that VMs refer to.
    #[serde(default)]
    pub vm_platforms: BTreeMap<String, VmPlatform>,
    /// CPU models of QEMU, for which a common one is looked for.
    #[serde(default)]
    pub cpu_models: Vec<CpuModel>,
}

/// A host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Name.
    pub name: String,
    /// Name of its platform in [`Inventory::host_platforms`].
    pub platform: String,
    /// Processors.
    pub processors: u32,
    /// Memory, in MiB.
    pub memory_mib: u64,
    /// Memory that guests do not get: the host's own, and what is promised to others, in MiB.
    #[serde(default)]
    pub reserved_mib: u64,
    /// Memory of each NUMA node, in MiB; empty for one node.
    #[serde(default)]
    pub numa_mib: Vec<u64>,
    /// Links over which VMs can be moved.
    #[serde(default)]
    pub links: Vec<LinkSpec>,
    /// Shared storage that it reaches, by name.
    #[serde(default)]
    pub storage: BTreeSet<String>,
    /// Free space for copied disks, in MiB.
    #[serde(default)]
    pub disk_free_mib: u64,
    /// Networks that it offers to guests, by name.
    #[serde(default)]
    pub networks: BTreeSet<String>,
    /// Zone of hosts that fail together; none for a host that fails alone.
    #[serde(default)]
    pub zone: Option<String>,
    /// Accepts no VMs.
    #[serde(default)]
    pub cordoned: bool,
    /// Time for which its load has been above the threshold of [`super::Hysteresis`], in seconds.
    #[serde(default)]
    pub busy_for_s: u64,
}

impl HostSpec {
    /// Returns the memory for guests, in MiB.
    pub fn guest_mib(&self) -> u64 {
        self.memory_mib.saturating_sub(self.reserved_mib)
    }
}

/// Link of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Network that it is part of: hosts reach each other over a network that both have.
    pub network: String,
    /// Measured rate, in bytes per second.
    pub bytes_per_s: u64,
}

/// Hardware and programs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostPlatform {
    /// Maker of the processor, as CPU models name it.
    #[serde(default)]
    pub cpu_vendor: String,
    /// Processor: hosts with the same name have the same.
    #[serde(default)]
    pub cpu: String,
    /// Features that QEMU can offer to guests here.
    #[serde(default)]
    pub cpu_features: BTreeSet<String>,
    /// Version of QEMU.
    pub qemu: String,
    /// Machine types of QEMU; empty for those that a version of QEMU has.
    #[serde(default)]
    pub machine_types: BTreeSet<String>,
    /// Version of the kernel.
    #[serde(default)]
    pub kernel: String,
    /// Features of the kernel that are needed and missing.
    #[serde(default)]
    pub kernel_lacks: Vec<String>,
    /// Has /dev/kvm.
    #[serde(default = "yes")]
    pub kvm: bool,
}

fn yes() -> bool {
    true
}

/// Requirements of a VM's QEMU and guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmPlatform {
    /// Version of QEMU that runs it.
    pub qemu: String,
    /// Machine type.
    #[serde(default)]
    pub machine_type: String,
    /// CPU model: a name, `host` or `max`.
    #[serde(default)]
    pub cpu_model: String,
    /// CPU features that the guest sees, beside those of its model.
    #[serde(default)]
    pub cpu_features: BTreeSet<String>,
    /// Runs on KVM.
    #[serde(default = "yes")]
    pub kvm: bool,
}

/// CPU model of QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuModel {
    /// Name, as `-cpu` takes it.
    pub name: String,
    /// Maker of processors that it is like; empty for any.
    #[serde(default)]
    pub vendor: String,
    /// Features.
    pub features: BTreeSet<String>,
}

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Name.
    pub name: String,
    /// Host on which it runs.
    pub host: String,
    /// Name of its platform in [`Inventory::vm_platforms`].
    pub platform: String,
    /// Virtual processors.
    pub vcpus: u32,
    /// Expected use of processors, in thousandths of one.
    #[serde(default)]
    pub busy_milli: u64,
    /// Memory, in MiB.
    pub memory_mib: u64,
    /// Needs all of its memory in one NUMA node.
    #[serde(default)]
    pub one_node: bool,
    /// Disks that are copied with it, in MiB.
    #[serde(default)]
    pub disk_mib: u64,
    /// Shared storage that it needs, by name.
    #[serde(default)]
    pub storage: BTreeSet<String>,
    /// Networks that it needs, by name.
    #[serde(default)]
    pub networks: BTreeSet<String>,
    /// Rules of its placement.
    #[serde(default)]
    pub rules: PlacementRules,
    /// Host to which it moves already: it needs room on both, and is not moved elsewhere.
    #[serde(default)]
    pub moving_to: Option<String>,
    /// Time since it was moved last, in seconds; none if that is not known.
    #[serde(default)]
    pub rested_s: Option<u64>,
    /// Forecasts of its migration at several rates; empty to expect its memory and disks once.
    #[serde(default)]
    pub forecasts: Vec<ForecastAtRate>,
}

/// Rules of a VM's placement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementRules {
    /// Stays on its host.
    pub pinned: bool,
    /// Hosts on which it may run; empty for all.
    pub only_on: Vec<String>,
    /// VMs that it goes with: it runs on their host, and moves after them.
    pub follows: Vec<String>,
    /// Labels: two VMs with the same label never run on the same host.
    pub apart: Vec<String>,
    /// Label: VMs with the same label are spread over zones as evenly as possible.
    pub spread: Option<String>,
    /// VMs with a higher priority move earlier.
    pub priority: i32,
}

/// Forecast of a VM's migration on a link of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForecastAtRate {
    /// Rate of the link, in bytes per second.
    pub bytes_per_s: u64,
    /// Total time, in nanoseconds.
    pub total_ns: Estimate,
    /// Downtime, in nanoseconds.
    pub downtime_ns: u64,
    /// Bytes on the wire.
    pub bytes: u64,
}

impl ForecastAtRate {
    /// Returns the point of a forecast that was made for a link of a rate.
    pub fn new(bytes_per_s: u64, forecast: &MigrationForecast) -> Self {
        Self {
            bytes_per_s,
            total_ns: forecast.total_ns,
            downtime_ns: forecast.downtime_ns.expected,
            bytes: forecast.bytes.expected,
        }
    }
}

/// Change of a host's platform that is only thought of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlatformChange {
    /// Another version of QEMU, with all machine types that it has.
    pub qemu: Option<String>,
    /// Another kernel, which lacks nothing.
    pub kernel: Option<String>,
    /// The processor of another platform, by its name.
    pub cpu_of: Option<String>,
}

impl Inventory {
    /// Gives a host a changed platform: an answer to "what if". Returns false, and changes nothing, if there is no such
    /// host or platform.
    pub fn apply(&mut self, host: &str, change: &PlatformChange) -> bool {
        let cpu = change.cpu_of.as_ref().map(|name| self.host_platforms.get(name).cloned());
        let Some(spec) = self.hosts.iter_mut().find(|spec| spec.name == host) else { return false };
        let (Some(mut platform), false) =
            (self.host_platforms.get(&spec.platform).cloned(), cpu == Some(None))
        else {
            return false;
        };
        if let Some(qemu) = &change.qemu {
            platform.qemu.clone_from(qemu);
            platform.machine_types.clear();
        }
        if let Some(kernel) = &change.kernel {
            platform.kernel.clone_from(kernel);
            platform.kernel_lacks.clear();
        }
        if let Some(Some(other)) = cpu {
            (platform.cpu_vendor, platform.cpu) = (other.cpu_vendor, other.cpu);
            platform.cpu_features = other.cpu_features;
        }
        let name = format!("{} of {host}, changed", spec.platform);
        spec.platform.clone_from(&name);
        self.host_platforms.insert(name, platform);
        true
    }
}
