//! Reasons for which a VM cannot run on a host, or cannot get there.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::inventory::{CpuModel, HostPlatform, HostSpec, VmPlatform, VmSpec};

/// Reason for which a VM cannot move to a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "obstacle", rename_all = "kebab-case")]
pub enum Obstacle {
    /// The VM stays where it is.
    Pinned,
    /// The VM moves already.
    IsMoving,
    /// The host accepts no VMs.
    Cordoned,
    /// The host is to be emptied.
    Drained,
    /// The VM's rules name other hosts.
    NotAmongItsHosts,
    /// The request names other hosts.
    NotATarget,
    /// QEMU has not the machine type.
    MachineType {
        /// Machine type.
        machine_type: String,
        /// Version of QEMU on the host.
        qemu: String,
    },
    /// QEMU is older than the one that runs the VM.
    OlderQemu {
        /// Version that runs the VM.
        needs: String,
        /// Version on the host.
        has: String,
    },
    /// The host has no KVM.
    NoKvm,
    /// The kernel lacks features.
    Kernel {
        /// Features that it lacks.
        lacks: Vec<String>,
    },
    /// The guest sees the host's own processor, and this host has another one.
    OtherCpu {
        /// Processor that the guest sees.
        needs: String,
        /// Processor of the host.
        has: String,
    },
    /// The processor lacks features.
    CpuFeatures {
        /// Features that it lacks.
        lacks: Vec<String>,
    },
    /// The host does not reach storage.
    Storage {
        /// Name.
        storage: String,
    },
    /// The host does not have a network.
    Network {
        /// Name.
        network: String,
    },
    /// The hosts have no link to each other.
    NoLink,
    /// Not enough processors for the VM's.
    Processors {
        /// Virtual processors.
        needs: u32,
        /// Processors of the host.
        has: u32,
    },
    /// The processors are in use.
    Load {
        /// Use of the VM, in thousandths of a processor.
        needs_milli: u64,
        /// Use that the host has left, in thousandths of a processor.
        free_milli: u64,
    },
    /// Not enough free memory.
    Memory {
        /// Memory of the VM, in MiB.
        needs_mib: u64,
        /// Free memory of the host, in MiB.
        free_mib: u64,
    },
    /// Not enough free memory in any NUMA node.
    Node {
        /// Memory of the VM, in MiB.
        needs_mib: u64,
        /// Largest free memory of a node, in MiB.
        free_mib: u64,
    },
    /// Not enough space for copied disks.
    Disk {
        /// Disks of the VM, in MiB.
        needs_mib: u64,
        /// Free space, in MiB.
        free_mib: u64,
    },
    /// A VM from which it stays apart is there.
    Apart {
        /// Label of both.
        label: String,
    },
    /// A VM with which it goes would be elsewhere.
    Separated {
        /// That VM.
        vm: String,
    },
}

impl Obstacle {
    /// Returns what would remove the obstacle.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Pinned => "unpin the VM, or shut it down",
            Self::IsMoving => "wait until it has arrived",
            Self::Cordoned => "uncordon the host",
            Self::Drained => "empty the hosts one after the other",
            Self::NotAmongItsHosts => "add the host to `only_on` of the VM",
            Self::NotATarget => "name more targets",
            Self::MachineType { .. } | Self::OlderQemu { .. } => {
                "install at least the VM's version of QEMU there"
            }
            Self::NoKvm => "load kvm_intel or kvm_amd there",
            Self::Kernel { .. } => "install a newer kernel there",
            Self::OtherCpu { .. } => "restart the VM with a named CPU model that both hosts have",
            Self::CpuFeatures { .. } => "restart the VM with a CPU model that all hosts have",
            Self::Storage { .. } => "connect the storage there, or have the disk copied",
            Self::Network { .. } => "connect the network there",
            Self::NoLink => "give both hosts a common network for migrations",
            Self::Processors { .. } => "use a host with more processors",
            Self::Load { .. } => "free processors there, or allow a higher load",
            Self::Memory { .. } | Self::Node { .. } => "free memory there, or use a larger host",
            Self::Disk { .. } => "free disk space there",
            Self::Apart { .. } => "use more hosts, or drop the label",
            Self::Separated { .. } => "place both on the same host, or let neither follow the other",
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned => f.write_str("the VM is pinned"),
            Self::IsMoving => f.write_str("the VM moves already"),
            Self::Cordoned => f.write_str("the host is cordoned"),
            Self::Drained => f.write_str("the host is to be emptied"),
            Self::NotAmongItsHosts => f.write_str("the VM may run on other hosts only"),
            Self::NotATarget => f.write_str("the request names other targets"),
            Self::MachineType { machine_type, qemu } => {
                write!(f, "QEMU {qemu} does not know machine type {machine_type}")
            }
            Self::OlderQemu { needs, has } => write!(f, "QEMU is {has}, and {needs} runs the VM"),
            Self::NoKvm => f.write_str("no KVM"),
            Self::Kernel { lacks } => write!(f, "the kernel lacks {}", lacks.join(", ")),
            Self::OtherCpu { needs, has } => {
                write!(f, "the guest sees the processor of its host, {needs}, and this is {has}")
            }
            Self::CpuFeatures { lacks } => write!(f, "the processor lacks {}", lacks.join(", ")),
            Self::Storage { storage } => write!(f, "storage {storage} is not reached"),
            Self::Network { network } => write!(f, "network {network} is missing"),
            Self::NoLink => f.write_str("no common network for migrations"),
            Self::Processors { needs, has } => write!(f, "{has} processors for {needs} virtual ones"),
            Self::Load { needs_milli, free_milli } => write!(
                f,
                "processors in use: {}.{} free, {}.{} needed",
                free_milli / 1000,
                free_milli / 100 % 10,
                needs_milli / 1000,
                needs_milli / 100 % 10
            ),
            Self::Memory { needs_mib, free_mib } => {
                write!(f, "{free_mib} MiB of memory free, {needs_mib} needed")
            }
            Self::Node { needs_mib, free_mib } => {
                write!(f, "{free_mib} MiB free in the emptiest NUMA node, {needs_mib} needed")
            }
            Self::Disk { needs_mib, free_mib } => {
                write!(f, "{free_mib} MiB of disk space free, {needs_mib} needed")
            }
            Self::Apart { label } => write!(f, "another VM with the label {label} is there"),
            Self::Separated { vm } => write!(f, "{vm}, with which it goes, would be elsewhere"),
        }
    }
}

/// Returns what on a host's platform keeps a VM from running there, when it comes from another platform.
pub(super) fn platform_obstacles(
    vm: &VmPlatform,
    models: &[CpuModel],
    from: &HostPlatform,
    to: &HostPlatform,
) -> Vec<Obstacle> {
    let mut found = Vec::new();
    if !to.kernel_lacks.is_empty() {
        found.push(Obstacle::Kernel { lacks: to.kernel_lacks.clone() });
    }
    if vm.kvm && !to.kvm {
        found.push(Obstacle::NoKvm);
    }
    if version(&to.qemu) < version(&vm.qemu) {
        found.push(Obstacle::OlderQemu { needs: vm.qemu.clone(), has: to.qemu.clone() });
    }
    if !has_machine_type(to, &vm.machine_type) {
        let (machine_type, qemu) = (vm.machine_type.clone(), to.qemu.clone());
        found.push(Obstacle::MachineType { machine_type, qemu });
    }
    let is_own = ["host", "max"].contains(&vm.cpu_model.as_str());
    if vm.kvm && is_own && from.cpu != to.cpu {
        found.push(Obstacle::OtherCpu { needs: from.cpu.clone(), has: to.cpu.clone() });
    }
    let model = models.iter().find(|model| model.name == vm.cpu_model);
    let of_model = model.map(|model| &model.features);
    let of_host = is_own.then_some(&from.cpu_features);
    let needed = vm.cpu_features.iter().chain(of_model.into_iter().flatten());
    let needed: BTreeSet<_> = needed.chain(of_host.into_iter().flatten()).collect();
    let lacks: Vec<_> =
        needed.into_iter().filter(|feature| !to.cpu_features.contains(*feature)).cloned().collect();
    if vm.kvm && !lacks.is_empty() {
        found.push(Obstacle::CpuFeatures { lacks });
    }
    found
}

/// Returns what around a host keeps a VM from running there: storage and networks.
pub(super) fn surroundings_obstacles(vm: &VmSpec, to: &HostSpec) -> Vec<Obstacle> {
    let storage = vm.storage.difference(&to.storage).cloned().map(|storage| Obstacle::Storage { storage });
    let networks = vm.networks.difference(&to.networks).cloned().map(|network| Obstacle::Network { network });
    storage.chain(networks).collect()
}

/// Returns the rate of the fastest network for migrations that two hosts have in common.
pub(crate) fn link_bytes_per_s(one: &HostSpec, other: &HostSpec) -> Option<u64> {
    let common = one.links.iter().flat_map(|link| {
        let same = other.links.iter().filter(|there| there.network == link.network);
        same.map(|there| there.bytes_per_s.min(link.bytes_per_s))
    });
    common.filter(|rate| *rate > 0).max()
}

/// Returns true if QEMU has a machine type. Those with a version are of that version of QEMU or a newer one.
fn has_machine_type(platform: &HostPlatform, machine_type: &str) -> bool {
    if !platform.machine_types.is_empty() {
        return machine_type.is_empty() || platform.machine_types.contains(machine_type);
    }
    let named =
        machine_type.rsplit('-').next().filter(|end| end.starts_with(|sign: char| sign.is_ascii_digit()));
    named.is_none_or(|named| version(named) <= version(&platform.qemu))
}

/// Returns the first two numbers of a version.
fn version(text: &str) -> (u64, u64) {
    let mut numbers = text.split(|sign: char| !sign.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn host(qemu: &str, cpu: &str, names: &[&str]) -> HostPlatform {
        let (qemu, cpu) = (qemu.to_owned(), cpu.to_owned());
        HostPlatform { qemu, cpu, cpu_features: features(names), kvm: true, ..HostPlatform::default() }
    }

    fn vm(qemu: &str, machine_type: &str, cpu_model: &str) -> VmPlatform {
        let [qemu, machine_type, cpu_model] = [qemu, machine_type, cpu_model].map(str::to_owned);
        VmPlatform { qemu, machine_type, cpu_model, kvm: true, ..VmPlatform::default() }
    }

    #[test]
    fn qemu_is_at_least_as_new_and_has_the_machine_type() {
        let found = |vm: &VmPlatform, qemu: &str| {
            platform_obstacles(vm, &[], &host("8.2", "A", &[]), &host(qemu, "A", &[]))
        };
        let from_8_2 = vm("8.2.1", "pc-q35-7.2", "");
        assert_eq!(found(&from_8_2, "8.2"), []);
        assert_eq!(found(&from_8_2, "10.0.2"), []);
        assert!(matches!(found(&from_8_2, "7.2.9")[..], [Obstacle::OlderQemu { .. }]));
        let newer = vm("7.2", "pc-i440fx-9.0", "");
        assert!(matches!(found(&newer, "8.2")[..], [Obstacle::MachineType { .. }]));
        assert_eq!(found(&vm("7.2", "microvm", ""), "8.2"), []);
    }

    #[test]
    fn features_of_the_model_and_of_the_own_host_are_needed() {
        let model =
            CpuModel { name: "Big".to_owned(), vendor: String::new(), features: features(&["avx2", "sse2"]) };
        let from = host("8.2", "A", &["avx2", "sse2", "avx512f"]);
        let found = |model_name: &str, to: &HostPlatform| {
            platform_obstacles(&vm("8.2", "", model_name), std::slice::from_ref(&model), &from, to)
        };
        let smaller = host("8.2", "B", &["sse2"]);
        let lacks = |names: &[&str]| Obstacle::CpuFeatures { lacks: features(names).into_iter().collect() };
        assert_eq!(found("Big", &smaller), [lacks(&["avx2"])]);
        assert_eq!(found("Small", &smaller), []);
        let own = found("host", &smaller);
        assert!(
            matches!(&own[..], [Obstacle::OtherCpu { .. }, other] if *other == lacks(&["avx2", "avx512f"]))
        );
        assert_eq!(found("max", &from), []);
    }
}
