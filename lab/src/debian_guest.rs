//! The Debian guest: a server of usual services, without a service manager.

use std::path::Path;

use crate::disk::overlay;
use crate::environment::{Environment, QemuVersion};
use crate::error::Result;
use crate::lab::{Lab, VM_GATEWAY, vm_address};
use crate::spec::{Boot, Device, Disk, GuestSpec, Load, Net};

/// Returns the Debian guest as the `n`th VM: its own disk, over the prepared one, is in the shared directory.
pub fn debian_guest(lab: &Lab, environment: &Environment, name: &str, n: u8) -> Result<GuestSpec> {
    let disk = lab.shared_directory()?.join(format!("{name}.qcow2"));
    overlay(&environment.qemu(QemuVersion::Installed)?, &disk, &environment.debian_disk()?, "qcow2")?;
    server(environment, name, n, &disk, "")
}

/// Returns a Debian guest with this root disk, number `n` in the laboratory's network; `more` is added to the kernel's
/// command line.
pub(crate) fn server(
    environment: &Environment,
    name: &str,
    n: u8,
    disk: &Path,
    more: &str,
) -> Result<GuestSpec> {
    let address = vm_address(n);
    Ok(GuestSpec {
        memory_mib: 512,
        boot: Boot::Kernel {
            kernel: environment.kernel()?,
            initrd: environment.debian_initrd()?,
            append: format!(
                "console=ttyS0 quiet panic=-1 guest.ip={address}/24 guest.gateway={VM_GATEWAY} {more}"
            ),
        },
        devices: vec![
            Device::Disk(Disk::new("disk0", disk, "qcow2")),
            Device::Net(Net::new(n)),
            Device::Balloon,
            Device::Rng,
        ],
        ..GuestSpec::tiny(name, Load::default())
    })
}
