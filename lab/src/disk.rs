//! Disk images for tests.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use whimbrel_guest_load::{BLOCKS_AT_ONCE, PAGE_BYTES, fill_disk, wrong_disk_block};

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

/// Returns the number of the tiny guest's writes that a raw image of [`known_content`] has, at least: of a write of
/// several blocks, all of them.
///
/// # Errors
/// [`Error::Config`] for a block with content that was never written there: neither that of the beginning nor, in the
/// second half, that of the first `versions` rewrites.
pub fn rewrites(path: &Path, versions: u32) -> Result<u64> {
    let image = std::fs::read(path).context(|| format!("cannot read {}", path.display()))?;
    let half = (image.len() / PAGE_BYTES / 2) as u64;
    let version_of = |(number, block): (u64, &[u8])| {
        let last = if number < half { 0 } else { versions };
        (0..=last).find(|version| wrong_disk_block(number, *version, block).is_none()).ok_or(number)
    };
    let found = (0..).zip(image.chunks_exact(PAGE_BYTES)).map(version_of).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|number| {
        Error::Config(format!("{}: block {number} has what was never written there", path.display()))
    })?;
    let places = found.chunks(BLOCKS_AT_ONCE);
    Ok(places.map(|place| u64::from(place.iter().copied().min().unwrap_or(0))).sum())
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
    fn writes_are_counted_and_foreign_content_is_found() {
        let path = std::env::temp_dir().join(format!("rewrites-{}", std::process::id()));
        write(&path, 1).unwrap();
        assert_eq!(rewrites(&path, 3).unwrap(), 0);
        let rewrite = |blocks: std::ops::Range<usize>, version| {
            let mut image = std::fs::read(&path).unwrap();
            let bytes = blocks.start * PAGE_BYTES..blocks.end * PAGE_BYTES;
            fill_disk(blocks.start as u64, version, &mut image[bytes]);
            std::fs::write(&path, image).unwrap();
        };
        rewrite(128..132, 2);
        rewrite(140..144, 1);
        // One was cut short.
        rewrite(140..142, 2);
        rewrite(152..155, 1);
        assert_eq!(rewrites(&path, 3).unwrap(), 3);
        for (block, version) in [(2, 1), (150, 4)] {
            rewrite(block..block + 1, version);
            let error = rewrites(&path, 3).unwrap_err().to_string();
            assert!(error.contains(&format!("block {block} ")), "{error}");
            rewrite(block..block + 1, 0);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
