//! Disk images for tests.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use whimbrel_guest_load::{PAGE_BYTES, fill_disk, wrong_disk_block};

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

/// Returns the blocks of a raw image of [`known_content`] that have content which was never written there: neither
/// that of the beginning nor, in the second half, that of the first `versions` rewrites by the tiny guest's writers.
pub fn foreign_blocks(path: &Path, versions: u32) -> Result<Vec<u64>> {
    let image = std::fs::read(path).context(|| format!("cannot read {}", path.display()))?;
    let blocks = (image.len() / PAGE_BYTES) as u64;
    let is_foreign = |number: &u64| {
        let at = *number as usize * PAGE_BYTES;
        let block = &image[at..at + PAGE_BYTES];
        let last = if *number < blocks / 2 { 0 } else { versions };
        (0..=last).all(|version| wrong_disk_block(*number, version, block).is_some())
    };
    Ok((0..blocks).filter(is_foreign).collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_was_never_written_is_found() {
        let path = std::env::temp_dir().join(format!("foreign-{}", std::process::id()));
        write(&path, 1).unwrap();
        assert_eq!(foreign_blocks(&path, 3).unwrap(), [0_u64; 0]);
        let mut image = std::fs::read(&path).unwrap();
        for (block, version) in [(2, 1), (130, 1), (140, 3), (150, 4)] {
            fill_disk(block as u64, version, &mut image[block * PAGE_BYTES..(block + 1) * PAGE_BYTES]);
        }
        std::fs::write(&path, image).unwrap();
        assert_eq!(foreign_blocks(&path, 3).unwrap(), [2, 150]);
        std::fs::remove_file(&path).unwrap();
    }
}
