//! Disk images for tests.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use whimbrel_guest_load::{PAGE_BYTES, fill_disk};

use crate::environment::Qemu;
use crate::error::{Context, Error, Result};
use crate::run::run;

/// Makes an image whose every block can be checked by its number, as the tiny guest's disk readers and writers expect.
pub fn known_content(qemu: &Qemu, path: &Path, format: &str, size_mib: u64) -> Result<()> {
    let raw = if format == "raw" { path.to_owned() } else { path.with_extension("raw") };
    write(&raw, size_mib).context(|| format!("cannot write {}", raw.display()))?;
    if raw != path {
        let mut command = std::process::Command::new(&qemu.img);
        command.args(["convert", "-q", "-f", "raw", "-O", format]).arg(&raw).arg(path);
        run(&mut command)?;
        std::fs::remove_file(&raw).context(|| format!("cannot remove {}", raw.display()))?;
    }
    Ok(())
}

/// Makes a qcow2 image over another one, which is not changed.
pub fn overlay(qemu: &Qemu, path: &Path, base: &Path, base_format: &str) -> Result<()> {
    let mut command = std::process::Command::new(&qemu.img);
    command.args(["create", "-q", "-f", "qcow2", "-F", base_format, "-b"]).arg(base).arg(path);
    run(&mut command).map(drop)
}

/// Checks an image that no QEMU has open, with `qemu-img check`. Clusters that a killed QEMU had allocated and not used
/// yet are no error.
pub fn is_sound(qemu: &Qemu, path: &Path) -> Result<()> {
    const LEAKS_ALONE: i32 = 3;
    let mut command = std::process::Command::new(&qemu.img);
    match run(command.args(["check", "-q"]).arg(path)) {
        Err(Error::Command { status, .. }) if status.code() == Some(LEAKS_ALONE) => Ok(()),
        checked => checked.map(drop),
    }
}

fn write(path: &Path, size_mib: u64) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut mib = vec![0; 1 << 20];
    for n in 0..size_mib {
        fill_disk(n * ((1 << 20) / PAGE_BYTES as u64), 0, &mut mib);
        file.write_all(&mib)?;
    }
    file.into_inner()?.sync_all()
}
