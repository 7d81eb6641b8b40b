//! Files that `scripts/setup` has made on this machine: QEMU in two versions, guests' kernel and disks.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Reports what a test could not try on this machine, although the test passes: `make test` lists it at its end, from
/// the file that `WHIMBREL_NOT_TRIED` names.
pub fn not_tried(what: impl AsRef<str>) {
    // One line, so that lines of several tests stay whole.
    let what = what.as_ref().lines().collect::<Vec<_>>().join("; ");
    // Past the harness, which keeps what passing tests print.
    drop(writeln!(std::io::stderr(), "NOT TRIED: {what}"));
    if let Some(list) = std::env::var_os("WHIMBREL_NOT_TRIED") {
        let list = OpenOptions::new().append(true).create(true).open(list);
        drop(list.and_then(|mut list| list.write_all(format!("{what}\n").as_bytes())));
    }
}

/// The QEMU of the distribution, or the newer one of its backports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QemuVersion {
    /// Installed by the distribution's package (Debian 12: 7.2).
    #[default]
    Installed,
    /// Unpacked from the distribution's backports (Debian 12: 10.0).
    Newer,
}

/// A QEMU that can be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    /// `qemu-system-x86_64`.
    pub program: PathBuf,
    /// `qemu-img` of the same version.
    pub img: PathBuf,
    /// Directories with its firmware, if they are not where it was built for.
    pub data_dirs: Vec<PathBuf>,
}

/// Paths that `scripts/setup` keeps in its cache.
#[derive(Debug, Clone)]
pub struct Environment {
    cache: PathBuf,
}

impl Environment {
    /// Returns the cache of this workspace, or the one that the environment variable `WHIMBREL_CACHE` names.
    pub fn discover() -> Self {
        let cache = std::env::var_os("WHIMBREL_CACHE")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(".cache"), PathBuf::from);
        Self { cache }
    }

    /// Returns the directory of the cache.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Returns the QEMU of a version. [`Error::Missing`] where setup found no newer one: such a test has to report that
    /// it was skipped.
    pub fn qemu(&self, version: QemuVersion) -> Result<Qemu> {
        match version {
            QemuVersion::Installed => {
                let program = PathBuf::from("/usr/bin/qemu-system-x86_64");
                Ok(Qemu {
                    program: existing(program)?,
                    img: existing("/usr/bin/qemu-img".into())?,
                    data_dirs: Vec::new(),
                })
            }
            QemuVersion::Newer => {
                let usr = self.cache.join("qemu-10/usr");
                // Boot ROMs of network cards are not in the backport: the distribution's serve as well.
                let data_dirs =
                    vec![usr.join("share/qemu"), usr.join("share/seabios"), "/usr/lib/ipxe/qemu".into()];
                Ok(Qemu {
                    program: existing(usr.join("bin/qemu-system-x86_64"))?,
                    img: existing(usr.join("bin/qemu-img"))?,
                    data_dirs,
                })
            }
        }
    }

    /// Returns all versions that this machine has.
    pub fn qemu_versions(&self) -> Vec<QemuVersion> {
        [QemuVersion::Installed, QemuVersion::Newer]
            .into_iter()
            .filter(|version| self.qemu(*version).is_ok())
            .collect()
    }

    /// Returns the path of the guests' kernel.
    pub fn kernel(&self) -> Result<PathBuf> {
        existing(self.cache.join("kernel/vmlinuz"))
    }

    /// Returns the path of the tiny guest's initial RAM disk: drivers and load generator.
    pub fn tiny_initrd(&self) -> Result<PathBuf> {
        existing(self.cache.join("tiny/initrd.gz"))
    }

    /// Returns the path of the Debian guest's initial RAM disk.
    pub fn debian_initrd(&self) -> Result<PathBuf> {
        existing(self.cache.join("debian/initrd.gz"))
    }

    /// Returns the path of the Debian guest's root disk (qcow2). Never to be written: make an overlay.
    pub fn debian_disk(&self) -> Result<PathBuf> {
        existing(self.cache.join("debian/root.qcow2"))
    }

    /// Returns the path of the key to the Debian guest's SSH server.
    pub fn debian_ssh_key(&self) -> Result<PathBuf> {
        existing(self.cache.join("debian/ssh-key"))
    }

    /// Returns the path of the file by which a client knows that server, under the name `guest`.
    pub fn debian_known_hosts(&self) -> Result<PathBuf> {
        existing(self.cache.join("debian/known_hosts"))
    }

    /// Returns the path of the file with the SHA-256 of the large file that the Debian guest serves.
    pub fn debian_large_digest(&self) -> Result<PathBuf> {
        existing(self.cache.join("debian/large.sha256"))
    }

    /// Returns the path of the root disk of the Debian guest with PostgreSQL (qcow2). Never to be written: make an
    /// overlay.
    pub fn database_disk(&self) -> Result<PathBuf> {
        existing(self.cache.join("database/root.qcow2"))
    }

    /// Returns the path of the root disk of the Debian guest with services, whose disk is moved for measurements
    /// (qcow2). Never to be written: make a copy.
    pub fn services_disk(&self) -> Result<PathBuf> {
        existing(self.cache.join("services/root.qcow2"))
    }

    /// Returns the directory with the disk and the kernels of the rack's machines. Never to be written: make overlays.
    pub fn rack(&self) -> Result<PathBuf> {
        existing(self.cache.join("rack/root.qcow2"))?;
        Ok(self.cache.join("rack"))
    }

    /// Returns true if running a guest under this machine's KVM is worth an attempt. `/dev/kvm` alone proves nothing,
    /// so callers that need KVM try the bare-metal guest.
    pub fn has_kvm(&self) -> bool {
        OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
    }
}

impl Qemu {
    /// Returns QEMU's arguments that name its firmware directories.
    pub fn arguments(&self) -> Vec<String> {
        self.data_dirs.iter().flat_map(|directory| ["-L".into(), directory.display().to_string()]).collect()
    }
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    if path.exists() { Ok(path) } else { Err(Error::Missing { path }) }
}
