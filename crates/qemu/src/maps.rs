//! Mappings of another process, from `/proc/PID/maps`.
//!
//! `smaps` has more details, but the kernel walks every page table of the guest's memory for it
//! while it holds the process's memory lock; reading `maps` is fast whatever the size of the guest.

use std::io;

/// One line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) executable: bool,
    pub(crate) shared: bool,
    /// Offset of `start` within the file, in bytes.
    pub(crate) offset: u64,
    pub(crate) device: (u32, u32),
    pub(crate) inode: u64,
    /// Path of the file or `[heap]` and the like; empty for anonymous memory.
    pub(crate) name: String,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let trimmed = rest.trim_start();
            let (head, tail) = trimmed.split_at(trimmed.find(' ').unwrap_or(trimmed.len()));
            rest = tail;
            head
        };
        let (start, end) = field().split_once('-')?;
        let flags = field().as_bytes();
        let offset = u64::from_str_radix(field(), 16).ok()?;
        let (major, minor) = field().split_once(':')?;
        let inode = field().parse().ok()?;
        let flag = |at: usize, letter| flags.get(at) == Some(&letter);
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            readable: flag(0, b'r'),
            writable: flag(1, b'w'),
            executable: flag(2, b'x'),
            shared: flag(3, b's'),
            offset,
            device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode,
            name: rest.trim_start().to_owned(),
        })
    }
}

/// All mappings of a process, in the order of their addresses.
#[derive(Debug, Clone, Default)]
pub(crate) struct Maps(Vec<Mapping>);

impl Maps {
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        // Names of files may contain any bytes.
        let bytes = std::fs::read(format!("/proc/{pid}/maps"))?;
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    pub(crate) fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(Mapping::parse).collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.0.iter()
    }

    /// Returns the mapping that contains `address`.
    pub(crate) fn at(&self, address: u64) -> Option<&Mapping> {
        let next = self.0.partition_point(|mapping| mapping.end <= address);
        self.0.get(next).filter(|mapping| mapping.start <= address)
    }

    /// Returns true if readable and writable mappings without a gap cover the range.
    pub(crate) fn covers(&self, start: u64, length: u64) -> bool {
        let Some(end) = start.checked_add(length) else { return false };
        let mut at = start;
        while at < end {
            match self.at(at) {
                Some(mapping) if mapping.readable && mapping.writable => at = mapping.end,
                _ => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000200000 rw-s 00001000 00:1a 77                         /dev/shm/a file (deleted)
7f0000200000-7f0000400000 rw-p 00000000 00:00 0 
7f0000401000-7f0000402000 ---p 00000000 00:00 0 
";

    #[test]
    fn lines_are_read() {
        let maps = Maps::parse(TEXT);
        assert_eq!(maps.at(0x55d0_c000_0010).unwrap().name, "[heap]");
        let file = maps.at(0x7f00_001f_ffff).unwrap();
        assert_eq!((file.shared, file.offset, file.inode), (true, 0x1000, 77));
        assert_eq!(file.device, (0, 0x1a));
        assert_eq!(file.name, "/dev/shm/a file (deleted)");
        assert_eq!(maps.at(0x7f00_0020_0000).unwrap().name, "");
        assert!(maps.at(0x7f00_0040_0000).is_none());
    }

    #[test]
    fn cover_goes_over_neighbours_but_not_over_gaps() {
        let maps = Maps::parse(TEXT);
        assert!(maps.covers(0x7f00_0000_0000, 0x40_0000));
        assert!(!maps.covers(0x7f00_0000_0000, 0x40_0001));
        assert!(!maps.covers(0x7f00_0040_1000, 0x1000), "a guard page is not memory");
        assert!(!maps.covers(u64::MAX, 2));
    }
}
