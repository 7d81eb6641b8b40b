//! Descriptions of guests to start, and QEMU's command line made from them.

mod command_line;

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

pub use whimbrel_guest_load::Pattern;

use crate::addresses::VM_GATEWAY;
use crate::bare;
use crate::environment::{Environment, QemuVersion};
use crate::error::{Context, Result};
use crate::nas::Nas;
use command_line::CommandLine;

/// A guest to be started. Start from [`GuestSpec::tiny`] or [`GuestSpec::bare`] and change what matters.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestSpec {
    /// Its name, also for QEMU.
    pub name: String,
    /// The QEMU version.
    pub qemu: QemuVersion,
    /// The machine type, `q35` or `pc` or a versioned one.
    pub machine: String,
    /// Execution of its instructions.
    pub accel: Accel,
    /// Model of its processors. `None`: all that the accelerator can provide.
    pub cpu: Option<String>,
    /// Processors.
    pub vcpus: u32,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Kind of its memory.
    pub ram: Ram,
    /// NUMA nodes that share the memory evenly, a RAM block each. 1: no NUMA.
    pub numa_nodes: u64,
    /// Its devices.
    pub devices: Vec<Device>,
    /// The software that runs in it.
    pub boot: Boot,
    /// A second monitor, `lab.sock`, for a test that needs QEMU while another client holds the first.
    pub second_monitor: bool,
    /// The user and group, by number, that QEMU runs as from its beginning, without any privilege. `None`: those of
    /// this process.
    pub user: Option<u32>,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

/// Execution of a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// QEMU translates them.
    Tcg,
    /// The processor runs them. Where KVM is itself nested or paravirtual, stock kernels may not run: use the
    /// bare-metal guest.
    Kvm,
}

/// Kind of a guest's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ram {
    /// QEMU's default: anonymous and private.
    Anonymous,
    /// A shared file in a directory, such as `/dev/shm`.
    File(PathBuf),
    /// A shared memfd.
    Memfd,
    /// A shared memfd of huge pages of 2 MiB; the machine must have reserved them.
    Hugetlb,
}

/// A device of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A standard VGA card: RAM blocks of its own, one of them a ROM.
    Vga,
    /// A USB 3 controller with a tablet and a keyboard.
    Usb,
    /// A disk.
    Disk(Disk),
    /// A virtio network card on a tap of the host, in the VMs' network.
    Net(Net),
    /// A virtio balloon, to be moved by QMP `balloon`.
    Balloon,
    /// A virtio random number generator.
    Rng,
    /// A virtio serial controller with a port whose other end is nowhere.
    VirtioSerial,
    /// A second serial controller, with the port over which the agent requests free page hints from the guest. Its
    /// socket is `guest.sock`.
    GuestPort,
}

/// A virtio disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Its name for QEMU: `id` of the drive, or name of the node.
    pub id: String,
    /// The image.
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: String,
    /// Past the host's page cache (`cache=none`).
    pub direct: bool,
    /// `threads`, `native` or `io_uring`.
    pub aio: String,
    /// Not writable.
    pub read_only: bool,
    /// Described by `-blockdev`, whose nodes have names, rather than by `-drive`, whose nodes have none.
    pub named_nodes: bool,
}

/// A virtio network card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Net {
    /// Its name for QEMU.
    pub id: String,
    /// The tap; made when it is not there.
    pub tap: String,
    /// Its hardware address.
    pub mac: String,
    /// True if the kernel carries its packets (vhost-net).
    pub vhost: bool,
}

/// Software that runs in a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Boot {
    /// The tiny guest with the load generator.
    Tiny(Load),
    /// The bare-metal guest (see [`bare`]).
    Bare,
    /// Any kernel.
    Kernel {
        /// The kernel.
        kernel: PathBuf,
        /// The initial RAM disk.
        initrd: PathBuf,
        /// The kernel's command line.
        append: String,
    },
}

/// Options of the tiny guest's load generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Memory filled at the start, MiB.
    pub fill_mib: u64,
    /// The part of it that is rewritten over and over, MiB.
    pub wss_mib: u64,
    /// Write rate, MiB/s of pages touched. 0: none.
    pub rate_mib_per_s: u64,
    /// Rate of verifying pages in the background, MiB/s. 0: none.
    pub verify_mib_per_s: u64,
    /// Kind of rewriting.
    pub mode: LoadMode,
    /// Choice and order of the pages to rewrite.
    pub pattern: Pattern,
    /// Threads that read the first disk past the guest's page cache. The disk must be one of
    /// [`crate::disk::known_content`].
    pub disk_threads: u64,
    /// Pause of such a thread between two reads, ms.
    pub disk_pause_ms: u64,
    /// Threads that rewrite its second half past the guest's page cache, and read it back.
    pub disk_writers: u64,
    /// Memory into which the readers read, MiB.
    pub disk_mib: u64,
    /// Its address in the VMs' network, for the first network card.
    pub address: Option<Ipv4Addr>,
    /// TCP port that echoes its input. 0: none.
    pub port: u16,
    /// Makes contents differ between guests, and the order of pages where that is random.
    pub seed: u64,
    /// Share of the filled memory that looks random, in percent; the rest compresses well.
    pub noise_percent: u64,
    /// Memory that was in use before the load began, and is free with its old content, MiB.
    pub litter_mib: u64,
    /// Length of the beginning of its first disk that it has read into its page cache before the load began, MiB.
    pub cache_mib: u64,
    /// A NAS kernel that it computes beside the load. Its memory is not counted in [`GuestSpec::tiny`].
    pub nas: Option<Nas>,
    /// Additions to its kernel's command line.
    pub kernel: String,
}

/// Kind of rewriting of the load generator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadMode {
    /// The whole page anew, with incompressible content.
    Random,
    /// A few bytes of each page.
    Few,
    /// By turns zeros and random content.
    Zero,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            fill_mib: 64,
            wss_mib: 32,
            rate_mib_per_s: 0,
            verify_mib_per_s: 4,
            mode: LoadMode::Random,
            pattern: Pattern::Sequential,
            disk_threads: 0,
            disk_pause_ms: 2,
            disk_writers: 0,
            disk_mib: 16,
            address: None,
            port: 0,
            seed: 1,
            noise_percent: 100,
            litter_mib: 0,
            cache_mib: 0,
            nas: None,
            kernel: String::new(),
        }
    }
}

impl Disk {
    /// Returns a disk past the host's page cache, through `-drive`.
    pub fn new(id: &str, path: &Path, format: &str) -> Self {
        Self {
            id: id.to_owned(),
            path: path.to_owned(),
            format: format.to_owned(),
            direct: true,
            aio: "threads".to_owned(),
            read_only: false,
            named_nodes: false,
        }
    }
}

impl Net {
    /// Returns a card for the `n`th VM: tap `vmN`, and a hardware address of its own.
    pub fn new(n: u8) -> Self {
        Self {
            id: "net0".to_owned(),
            tap: format!("vm{n}"),
            mac: format!("52:54:00:00:00:{n:02x}"),
            vhost: false,
        }
    }
}

impl GuestSpec {
    /// Returns the tiny guest: one processor, 160 MiB of anonymous memory, no devices but the serial port.
    pub fn tiny(name: &str, load: Load) -> Self {
        Self {
            name: name.to_owned(),
            qemu: QemuVersion::Installed,
            machine: "q35".to_owned(),
            accel: Accel::Tcg,
            cpu: None,
            vcpus: 1,
            // The kernel and the unpacked RAM disk need some 80 MiB.
            memory_mib: (load.fill_mib
                + if load.disk_threads > 0 { load.disk_mib } else { 0 }
                + load.litter_mib
                + load.cache_mib
                + 96)
                .next_multiple_of(32),
            ram: Ram::Anonymous,
            numa_nodes: 1,
            devices: Vec::new(),
            boot: Boot::Tiny(load),
            second_monitor: false,
            user: None,
            extra: Vec::new(),
        }
    }

    /// Returns the bare-metal guest, with one or two processors.
    pub fn bare(name: &str, accel: Accel, vcpus: u32) -> Self {
        Self { accel, vcpus, memory_mib: 128, boot: Boot::Bare, ..Self::tiny(name, Load::default()) }
    }

    /// Adds every kind of device that the end-to-end tests need except disk and network: VGA, USB, balloon, random
    /// numbers, virtio serial.
    #[must_use]
    pub fn with_many_devices(mut self) -> Self {
        self.devices.extend([Device::Vga, Device::Usb, Device::Balloon, Device::Rng, Device::VirtioSerial]);
        self
    }

    /// Returns QEMU's arguments. Files that the guest needs (sockets, logs) are in `directory`.
    pub fn arguments(&self, environment: &Environment, directory: &Path) -> Result<Vec<String>> {
        let mut line = CommandLine::default();
        let file = |name: &str| directory.join(name).display().to_string();
        line.option("-name", &self.name);
        line.flags(["-no-user-config", "-nodefaults"]);
        line.option("-display", "none");
        self.processor_and_memory(&mut line);
        // The log has the whole output, also while no client is connected, and continues after a migration within one
        // file system.
        let chardev = format!(
            "socket,id=serial0,path={},server=on,wait=off,logfile={},logappend=on",
            file("serial.sock"),
            file("serial.log")
        );
        line.option("-chardev", &chardev).option("-serial", "chardev:serial0");
        line.option("-qmp", &format!("unix:{},server=on,wait=off", file("qmp.sock")));
        if self.second_monitor {
            line.option("-qmp", &format!("unix:{},server=on,wait=off", file("lab.sock")));
        }
        self.boot(&mut line, environment, directory)?;
        for device in &self.devices {
            match device {
                Device::GuestPort => line.guest_port(&file("guest.sock")),
                device => line.device(device),
            }
        }
        line.0.extend(self.extra.iter().cloned());
        Ok(line.0)
    }

    fn processor_and_memory(&self, line: &mut CommandLine) {
        let (accel, all) = match self.accel {
            Accel::Tcg => ("tcg", "max"),
            Accel::Kvm => ("kvm", "host,-arch-capabilities"),
        };
        line.option("-accel", accel).option("-cpu", self.cpu.as_deref().unwrap_or(all));
        line.option("-smp", &self.processors()).option("-m", &self.memory_mib.to_string());
        if self.numa_nodes > 1 {
            for node in 0..self.numa_nodes {
                let id = format!("ram{node}");
                line.option("-object", &self.memory(&id, self.memory_mib / self.numa_nodes));
                line.option("-numa", &format!("node,nodeid={node},memdev={id}"));
            }
            line.option("-machine", &self.machine);
        } else if self.ram == Ram::Anonymous {
            line.option("-machine", &self.machine);
        } else {
            line.option("-object", &self.memory("ram", self.memory_mib));
            line.option("-machine", &format!("{},memory-backend=ram", self.machine));
        }
    }

    /// Returns QEMU's processor arguments. Where there can be no second processor, an emulating QEMU translates the
    /// guest's locked instructions without a barrier of the host, although its devices work in threads of their own: a
    /// virtio driver may then miss an interrupt, and wait for ever.
    fn processors(&self) -> String {
        match (self.accel, self.vcpus) {
            (Accel::Tcg, 1) => "1,maxcpus=2".to_owned(),
            (_, vcpus) => vcpus.to_string(),
        }
    }

    /// Returns an object that provides memory.
    fn memory(&self, id: &str, mib: u64) -> String {
        match &self.ram {
            Ram::Anonymous => format!("memory-backend-ram,id={id},size={mib}M"),
            Ram::File(directory) => {
                let path = directory.join(format!("{}.{id}", self.name));
                format!("memory-backend-file,id={id},size={mib}M,mem-path={},share=on", path.display())
            }
            Ram::Memfd => format!("memory-backend-memfd,id={id},size={mib}M,share=on"),
            Ram::Hugetlb => {
                format!("memory-backend-memfd,id={id},size={mib}M,share=on,hugetlb=on,hugetlbsize=2M")
            }
        }
    }

    fn boot(&self, line: &mut CommandLine, environment: &Environment, directory: &Path) -> Result<()> {
        match &self.boot {
            Boot::Tiny(load) => {
                line.kernel(&environment.kernel()?, &environment.tiny_initrd()?, &self.append(load));
            }
            Boot::Kernel { kernel, initrd, append } => line.kernel(kernel, initrd, append),
            Boot::Bare => {
                let image = directory.join("bare.img");
                fs::write(&image, bare::image()).context(|| format!("cannot write {}", image.display()))?;
                line.device(&Device::Disk(Disk {
                    read_only: true,
                    direct: false,
                    ..Disk::new("boot", &image, "raw")
                }));
            }
        }
        Ok(())
    }

    /// Returns the tiny guest's kernel command line.
    fn append(&self, load: &Load) -> String {
        let mode = match load.mode {
            LoadMode::Random => "random",
            LoadMode::Few => "few",
            LoadMode::Zero => "zero",
        };
        let mut words = vec![
            "console=ttyS0,115200 quiet panic=-1".to_owned(),
            format!(
                "load.fill={} load.wss={} load.rate={}",
                load.fill_mib, load.wss_mib, load.rate_mib_per_s
            ),
            format!("load.verify={} load.mode={mode} load.pattern={}", load.verify_mib_per_s, load.pattern),
            format!("load.seed={} load.noise={}", load.seed, load.noise_percent),
            format!(
                "load.disk_threads={} load.disk_pause={} load.disk_writers={} load.disk={} load.port={}",
                load.disk_threads, load.disk_pause_ms, load.disk_writers, load.disk_mib, load.port
            ),
        ];
        let mut devices = Vec::new();
        if self.devices.iter().any(|device| matches!(device, Device::Disk(_))) {
            devices.push("/sys/block/vda");
        }
        if let Some(address) = load.address {
            words.push(format!("guest.ip={address}/24 guest.gateway={VM_GATEWAY}"));
            devices.push("/sys/class/net/eth0");
        }
        if !devices.is_empty() {
            words.push(format!("guest.wait={}", devices.join(",")));
        }
        for (word, mib) in [("litter", load.litter_mib), ("cache", load.cache_mib)] {
            if mib > 0 {
                words.push(format!("guest.{word}={mib}"));
            }
        }
        words.extend(load.nas.iter().map(|nas| format!("guest.nas={}", nas.words())));
        words.push(load.kernel.clone());
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulated_guest_may_always_have_a_second_processor() {
        for qemu in [QemuVersion::Installed, QemuVersion::Newer] {
            let spec = GuestSpec { qemu, vcpus: 1, ..GuestSpec::tiny("vm1", Load::default()) };
            assert_eq!(spec.processors(), "1,maxcpus=2");
        }
    }
}
