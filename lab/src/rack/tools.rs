//! The disk with what a run brings along to all hosts: the program, the guests, and a QEMU of another version. Hosts
//! mount it read-only.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::TOOLS_BYTES;
use crate::environment::{Environment, QemuVersion};
use crate::error::{Context, Result};
use crate::run::run;

/// The place at which hosts mount the disk.
pub(super) const MOUNTED: &str = "/mnt/rack";
/// The program that starts this machine's QEMU on a host.
pub(super) const BROUGHT_QEMU: &str = "/mnt/rack/qemu/qemu-system-x86_64";
/// The directory of that QEMU's firmware.
pub(super) const BROUGHT_FIRMWARE: &str = "/mnt/rack/qemu/share";

/// Files that hosts of a rack need.
#[derive(Debug, Clone)]
pub struct Tools {
    whimbrel: PathBuf,
    /// More files, with their names on the disk.
    files: Vec<(PathBuf, String)>,
}

impl Tools {
    /// Returns the program under test, and the tiny guest.
    pub fn new(whimbrel: &Path) -> Self {
        Self { whimbrel: whimbrel.to_owned(), files: Vec::new() }
    }

    /// Adds a file, which hosts have as `/mnt/rack/NAME`.
    #[must_use]
    pub fn with_file(mut self, file: &Path, name: &str) -> Self {
        self.files.push((file.to_owned(), name.to_owned()));
        self
    }

    /// Makes the disk: always of the same size, so that states fit. With `brings_qemu` it has this machine's QEMU, and
    /// the libraries that it needs.
    pub(super) fn write(&self, environment: &Environment, image: &Path, brings_qemu: bool) -> Result<()> {
        let tree = image.with_extension("tree");
        for part in ["kernel", "tiny"] {
            make(&tree.join(part))?;
        }
        copy(&environment.kernel()?, &tree.join("kernel/vmlinuz"))?;
        copy(&environment.tiny_initrd()?, &tree.join("tiny/initrd.gz"))?;
        let mut strip = Command::new("strip");
        run(strip.arg("--strip-all").arg("-o").arg(tree.join("whimbrel")).arg(&self.whimbrel))?;
        if brings_qemu {
            bring_qemu(environment, &tree.join("qemu"))?;
        }
        for (file, name) in &self.files {
            copy(file, &tree.join(name))?;
        }
        let mut command = Command::new("mke2fs");
        command.args(["-q", "-t", "ext4", "-m", "0", "-O", "^has_journal,^metadata_csum"]);
        command.args(["-E", "lazy_itable_init=0", "-d"]).arg(&tree).arg(image);
        run(command.arg(format!("{}k", TOOLS_BYTES >> 10)))?;
        fs::remove_dir_all(&tree).context(|| format!("cannot remove {}", tree.display()))
    }
}

/// Copies this machine's QEMU with its firmware, and with all libraries but the C library's: the host's is newer.
fn bring_qemu(environment: &Environment, to: &Path) -> Result<()> {
    let qemu = environment.qemu(QemuVersion::Installed)?.program;
    let (libraries, firmware, modules) = (to.join("lib"), to.join("share"), to.join("modules"));
    make(&libraries)?;
    make(&firmware)?;
    make(&modules)?;
    make(&to.join("bin"))?;
    copy(&qemu, &to.join("bin/qemu-system-x86_64"))?;
    for library in libraries_of(&run(Command::new("ldd").arg(&qemu))?) {
        copy(&library, &libraries.join(library.file_name().unwrap_or_default()))?;
    }
    for file in ["share/qemu/linuxboot_dma.bin", "share/qemu/linuxboot.bin", "share/qemu/kvmvapic.bin"]
        .into_iter()
        .chain(["share/seabios/bios-256k.bin", "share/seabios/vgabios-stdvga.bin"])
        .chain(["lib/ipxe/qemu/efi-virtio.rom"])
    {
        let file = Path::new("/usr").join(file);
        if file.exists() {
            copy(&file, &firmware.join(file.file_name().unwrap_or_default()))?;
        }
    }
    // An agent asks a QEMU for its abilities without KVM, and the host's modules are of another version.
    let emulation = Path::new("/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so");
    if emulation.exists() {
        copy(emulation, &modules.join("accel-tcg-x86_64.so"))?;
    }
    // The process is QEMU itself, and finds its libraries all the same.
    let script = format!(
        "#!/bin/sh\nexport LD_LIBRARY_PATH={MOUNTED}/qemu/lib QEMU_MODULE_DIR={MOUNTED}/qemu/modules\nexec {MOUNTED}/qemu/bin/qemu-system-x86_64 -L {BROUGHT_FIRMWARE} \"$@\"\n"
    );
    let program = to.join("qemu-system-x86_64");
    let context = || format!("cannot write {}", program.display());
    fs::write(&program, script).context(context)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).context(context)
}

/// Returns the libraries in the output of `ldd`, without those of the C library.
fn libraries_of(ldd: &str) -> Vec<PathBuf> {
    let own = ["libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "libresolv.so", "libutil.so"];
    let found = ldd.lines().filter_map(|line| line.split("=> ").nth(1)?.split(' ').next());
    found.filter(|path| !own.iter().any(|own| path.contains(own))).map(PathBuf::from).collect()
}

fn make(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).context(|| format!("cannot make {}", directory.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).context(|| format!("cannot copy {}", from.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_without_those_of_the_c_library() {
        let ldd = "\tlinux-vdso.so.1 (0x1)\n\tlibfdt.so.1 => /lib/libfdt.so.1 (0x2)\n\tlibc.so.6 => /lib/libc.so.6 (0x3)\n\
            \tlibm.so.6 => /lib/libm.so.6 (0x4)\n\t/lib64/ld-linux-x86-64.so.2 (0x5)\n";
        assert_eq!(libraries_of(ldd), [PathBuf::from("/lib/libfdt.so.1")]);
    }
}
