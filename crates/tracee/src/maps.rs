//! Memory map of a process: its addresses and their backing.
//!
//! [`mappings`] reads `/proc/PID/maps`, which is fast. [`detailed_mappings`] reads
//! `/proc/PID/smaps`, for which the kernel walks all page tables (some 100 ms for a large guest,
//! while the process runs on): for pre-flight and tests, never for a round.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::{AddressRange, Process, ProcessError, abi};

/// Identity of the file behind a mapping, as the kernel reports it in every process's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// Major and minor number of the device that holds the file.
    pub device: (u32, u32),
    /// Number of the file on that device.
    pub inode: u64,
}

/// Kind of memory of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private memory without a file: QEMU's default for RAM.
    Anonymous,
    /// A file that is shared: `memory-backend-memfd`, `memory-backend-file,share=on`.
    SharedFile(FileId),
    /// A file of which this process gets a private copy as soon as it writes. Neither the file nor
    /// the page table alone shows the content, and holes cannot be distinguished from data.
    PrivateFile(FileId),
}

/// One line of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses of the mapping.
    pub range: AddressRange,
    /// True if it may be read.
    pub readable: bool,
    /// True if it may be written.
    pub writable: bool,
    /// True if it may be executed.
    pub executable: bool,
    /// Kind of memory.
    pub backing: Backing,
    /// Offset of the mapping in the file, in bytes.
    pub offset: u64,
    /// Name as the kernel writes it: a path (with ` (deleted)` behind it if so), or `[heap]`.
    pub name: Option<PathBuf>,
    /// Details from `smaps`; `None` from [`mappings`].
    pub details: Option<Details>,
}

/// Details of `/proc/PID/smaps` beyond the map. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// Size of the pages that the kernel manages here: 4096, or that of a hugetlbfs page.
    pub page_size: u64,
    /// Resident memory.
    pub resident: u64,
    /// Memory in swap.
    pub swapped: u64,
    /// Resident memory in transparent huge pages, anonymous ones and those of shared memory.
    pub huge: u64,
    /// Two-letter flags of the kernel, as in `VmFlags`.
    pub flags: Vec<String>,
}

impl Details {
    /// Returns true if a flag is set: `uw` and `um` mean registered with a userfaultfd (write
    /// protection, missing pages), `ht` hugetlbfs, `hg`/`nh` huge pages advised for or against,
    /// `mg` KSM.
    pub fn has_flag(&self, flag: &str) -> bool {
        self.flags.iter().any(|one| one == flag)
    }
}

impl Mapping {
    /// Returns the file behind the mapping, if any.
    pub fn file(&self) -> Option<FileId> {
        match self.backing {
            Backing::Anonymous => None,
            Backing::SharedFile(file) | Backing::PrivateFile(file) => Some(file),
        }
    }
}

/// Returns the map of a process, in order of addresses.
pub fn mappings(process: &Process) -> Result<Vec<Mapping>, ProcessError> {
    let text = process.read_bytes("maps")?;
    let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| parse_head(line).ok_or(ProcessError::Malformed { pid: process.pid(), file: "maps" }))
        .collect()
}

/// Returns the map of a process with [`Details`].
pub fn detailed_mappings(process: &Process) -> Result<Vec<Mapping>, ProcessError> {
    let text = process.read_bytes("smaps")?;
    parse_smaps(&text).ok_or(ProcessError::Malformed { pid: process.pid(), file: "smaps" })
}

/// Returns the mapping that contains an address.
#[cfg(feature = "testing")]
pub fn mapping_at(process: &Process, address: u64) -> Result<Option<Mapping>, ProcessError> {
    Ok(mappings(process)?.into_iter().find(|mapping| mapping.range.contains(address)))
}

/// Returns the mappings that `range` touches, with the size of their pages in bytes.
pub(crate) fn mappings_in(
    process: &Process,
    range: AddressRange,
) -> Result<Vec<(Mapping, u64)>, ProcessError> {
    let mut found = Vec::new();
    let maps = File::open(process.path("maps")).map_err(|source| process.explain("read", source))?;
    let mut detailed = None;
    for mapping in mappings(process)? {
        if mapping.range.intersection(&range).is_none() {
            continue;
        }
        let start = mapping.range.start;
        let page_size = if let Ok((_, _, page_size)) = abi::procmap_query(&maps, start) {
            page_size
        } else {
            // Before Linux 6.11 only smaps has it.
            if detailed.is_none() {
                detailed = Some(detailed_mappings(process)?);
            }
            let mut all = detailed.iter().flatten();
            all.find(|one| one.range.contains(start))
                .and_then(|one| one.details.as_ref())
                .map_or(crate::PAGE_SIZE, |details| details.page_size)
        };
        found.push((mapping, page_size));
    }
    process.check_alive()?;
    Ok(found)
}

/// Parses a line such as `55d0c0000000-55d0c0021000 rw-s 00000000 00:01 1028    /memfd:ram
/// (deleted)`.
fn parse_head(line: &[u8]) -> Option<Mapping> {
    // The name may contain any byte but a newline; the fields before it are ASCII.
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = field()?.split_once('-')?;
    let range = AddressRange::new(hex(start)?, hex(end)?);
    let permissions = field()?.as_bytes();
    let offset = hex(field()?)?;
    let (major, minor) = field()?.split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode: u64 = field()?.parse().ok()?;
    let name = fields.next().unwrap_or_default().trim_ascii_start();
    let [read, write, execute, shared] = *permissions else { return None };
    let file = FileId { device, inode };
    let backing = match (inode, shared) {
        (0, _) => Backing::Anonymous,
        (_, b's') => Backing::SharedFile(file),
        _ => Backing::PrivateFile(file),
    };
    Some(Mapping {
        range,
        readable: read == b'r',
        writable: write == b'w',
        executable: execute == b'x',
        backing,
        offset,
        name: (!name.is_empty()).then(|| PathBuf::from(OsString::from_vec(name.to_vec()))),
        details: None,
    })
}

fn parse_smaps(text: &[u8]) -> Option<Vec<Mapping>> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        // A head begins with a lower-case hexadecimal number, a detail with a capital letter.
        if !line[0].is_ascii_uppercase() {
            found.push(Mapping { details: Some(Details::default()), ..parse_head(line)? });
            continue;
        }
        let details = found.last_mut()?.details.as_mut()?;
        let (key, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
        let bytes = || Some(value.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024);
        match key {
            "KernelPageSize" => details.page_size = bytes()?,
            "Rss" => details.resident = bytes()?,
            "Swap" => details.swapped = bytes()?,
            "AnonHugePages" | "ShmemPmdMapped" => details.huge += bytes()?,
            "VmFlags" => details.flags = value.split_whitespace().map(str::to_owned).collect(),
            _ => {}
        }
    }
    Some(found)
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// Returns true if the kernel's name of a mapping is that of one of the C libraries.
pub(crate) fn is_libc(name: &Path) -> bool {
    let name = name.file_name().unwrap_or_default().as_encoded_bytes();
    name.starts_with(b"libc.so") || name.starts_with(b"libc-") || name.starts_with(b"ld-musl")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_every_kind() {
        let line = b"7f10-7f20 rw-s 00001000 00:01 1028                       /memfd:pc.ram (deleted)";
        let mapping = parse_head(line).unwrap();
        assert_eq!(mapping.range, AddressRange::new(0x7f10, 0x7f20));
        let file = FileId { device: (0, 1), inode: 1028 };
        assert_eq!(mapping.backing, Backing::SharedFile(file));
        assert_eq!(mapping.offset, 0x1000);
        assert_eq!(mapping.name.as_deref(), Some(Path::new("/memfd:pc.ram (deleted)")));
        assert!(mapping.readable && mapping.writable && !mapping.executable);

        let anonymous = parse_head(b"1000-2000 ---p 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.backing, anonymous.name), (Backing::Anonymous, None));
        let private = parse_head(b"1000-2000 r-xp 00000000 fe:00 77 /usr/lib/a b \xff.so").unwrap();
        assert!(matches!(private.backing, Backing::PrivateFile(_)));
        for bad in [&b""[..], b"x-y rw-p 0 0:0 0", b"1000 rw-p 0 00:00 0", b"1-2 rw- 0 00:00 0"] {
            assert_eq!(parse_head(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn details_belong_to_the_line_before_them() {
        let text = b"1000-2000 rw-p 00000000 00:00 0 \nRss:  8 kB\nKernelPageSize:  2048 kB\n\
            Swap: 4 kB\nAnonHugePages: 2048 kB\nVmFlags: rd wr uw ht \n3000-4000 r--p 00000000 00:00 0 \nRss: 0 kB\n";
        let found = parse_smaps(text).unwrap();
        let details = found[0].details.as_ref().unwrap();
        assert_eq!((details.page_size, details.resident, details.swapped), (2 << 20, 8192, 4096));
        assert!(details.has_flag("uw") && !details.has_flag("um"));
        assert_eq!(found[1].details.as_ref().unwrap().resident, 0);
        assert_eq!(parse_smaps(b"Rss: 1 kB\n"), None);
    }

    #[test]
    fn this_process_has_a_stack_and_an_executable() {
        let me = Process::open(std::process::id()).unwrap();
        let exe = std::env::current_exe().unwrap();
        let found = mappings(&me).unwrap();
        assert!(found.iter().any(|one| one.executable && one.name.as_deref() == Some(&exe)));
        assert!(found.windows(2).all(|two| two[0].range.end <= two[1].range.start));
        let detailed = detailed_mappings(&me).unwrap();
        let stack = detailed.iter().find(|one| one.name.as_deref() == Some(Path::new("[stack]")));
        assert_eq!(stack.unwrap().details.as_ref().unwrap().page_size, 4096);
        let here = std::ptr::from_ref(&me) as u64;
        let found = mappings_in(&me, AddressRange::with_len(here, 1)).unwrap();
        assert!(matches!(&found[..], [(mapping, 4096)] if mapping.range.contains(here)));
    }
}
