//! Use of each page of memory: `/proc/kpageflags`, 64 bits for each page, as documented in the kernel's
//! `Documentation/admin-guide/mm/pagemap.rst`. The bits are the same from Linux 4.x on.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::protocol::{Cache, Pages};

const LOCKED: u32 = 0;
const REFERENCED: u32 = 2;
const UPTODATE: u32 = 3;
const DIRTY: u32 = 4;
const LRU: u32 = 5;
const ACTIVE: u32 = 6;
const SLAB: u32 = 7;
const WRITEBACK: u32 = 8;
const BUDDY: u32 = 10;
const MMAP: u32 = 11;
const ANON: u32 = 12;
const SWAPCACHE: u32 = 13;
const SWAPBACKED: u32 = 14;
const UNEVICTABLE: u32 = 18;
const HWPOISON: u32 = 19;

/// Bits that a page of the cache that could be reclaimed at once does not have.
const NOT_CLEAN: u64 = 1 << LOCKED
    | 1 << DIRTY
    | 1 << SLAB
    | 1 << WRITEBACK
    | 1 << BUDDY
    | 1 << MMAP
    | 1 << ANON
    | 1 << SWAPCACHE
    | 1 << SWAPBACKED
    | 1 << UNEVICTABLE
    | 1 << HWPOISON;

/// Bits that a free page may have. (Pages that were reported to a balloon are marked up to date.)
const FREE: u64 = 1 << BUDDY | 1 << UPTODATE;

const WORD: usize = 8;
/// Pages whose flags are read at a time: 64 KiB.
const BATCH: u64 = 8192;

/// Use of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// Unused: the page belongs to the buddy allocator.
    Free,
    /// A copy of a file's content that is not mapped.
    Cache {
        /// True if it was not used recently.
        cold: bool,
    },
    /// Anything else.
    Other,
}

impl PageUse {
    /// Returns the use for flags of `/proc/kpageflags`.
    pub fn of(flags: u64) -> Self {
        let has = |bit: u32| flags & 1 << bit != 0;
        if has(BUDDY) {
            // The kernel determines without a lock whether a page is within a free block: a page that seems to have
            // another use as well is not free.
            return if flags & !FREE == 0 { Self::Free } else { Self::Other };
        }
        if has(LRU) && has(UPTODATE) && flags & NOT_CLEAN == 0 {
            return Self::Cache { cold: !has(ACTIVE) && !has(REFERENCED) };
        }
        Self::Other
    }

    /// Returns true if the page belongs to the chosen part of the page cache.
    pub fn is_cache(self, cache: Cache) -> bool {
        match (self, cache) {
            (Self::Cache { .. }, Cache::All) => true,
            (Self::Cache { cold }, Cache::Cold) => cold,
            _ => false,
        }
    }
}

/// The kernel's record of its memory.
#[derive(Debug)]
pub struct KernelMemory {
    flags: File,
    memory: Vec<Pages>,
    poisoned: bool,
}

impl KernelMemory {
    /// Opens the files of the kernel whose `/proc` and `/boot` are below `root`, which is `/` except in tests.
    ///
    /// # Errors
    /// Fails if the kernel does not permit it: that needs root.
    pub fn open(root: &Path) -> io::Result<Self> {
        let read = |name: &str| fs::read_to_string(root.join(name));
        let memory = system_ram(&read("proc/iomem")?);
        if memory.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "/proc/iomem shows no memory: run this program as root",
            ));
        }
        let release = read("proc/sys/kernel/osrelease").unwrap_or_default();
        let config = read(&format!("boot/config-{}", release.trim())).unwrap_or_default();
        let poisoned = checks_free_pages(&read("proc/cmdline")?, &config);
        Ok(Self { flags: File::open(root.join("proc/kpageflags"))?, memory, poisoned })
    }

    /// Returns all memory, in ascending order.
    pub fn memory(&self) -> &[Pages] {
        &self.memory
    }

    /// Returns true if the kernel checks the content of free pages when it allocates them. (Filling pages with zeros
    /// when they are freed, `init_on_free`, does no harm: a page that is not sent is a zero page.)
    pub fn poisoned(&self) -> bool {
        self.poisoned
    }

    /// Passes the use of each page to `visit`, in ascending order, in runs.
    ///
    /// # Errors
    /// Fails if the kernel does not report it, or `visit` fails.
    pub fn scan(&self, mut visit: impl FnMut(Pages, PageUse) -> io::Result<()>) -> io::Result<()> {
        let mut bytes = vec![0; BATCH as usize * WORD];
        for range in &self.memory {
            let mut first = range.start;
            while first < range.end {
                let count = BATCH.min(range.end - first);
                let bytes = &mut bytes[..count as usize * WORD];
                self.flags.read_exact_at(bytes, first * WORD as u64)?;
                let uses = bytes.as_chunks().0.iter().map(|flags| PageUse::of(u64::from_le_bytes(*flags)));
                let (mut start, mut before) = (first, None);
                for (page, now) in (first..).zip(uses) {
                    if let Some(before) = before.replace(now).filter(|before| *before != now) {
                        visit(start..page, before)?;
                        start = page;
                    }
                }
                first += count;
                before.map_or(Ok(()), |last| visit(start..first, last))?;
            }
        }
        Ok(())
    }
}

/// Returns the whole pages of "System RAM" in `/proc/iomem`, with neighbours merged.
fn system_ram(iomem: &str) -> Vec<Pages> {
    let line = |line: &str| {
        // Entries inside of another one are indented.
        let (range, name) = line.split_once(" : ").filter(|_| !line.starts_with(' '))?;
        let (first, last) = range.split_once('-').filter(|_| name == "System RAM")?;
        let (first, last) = (u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
        let pages = first.div_ceil(4096)..last.checked_add(1)? / 4096;
        (pages.start < pages.end).then_some(pages)
    };
    let mut all: Vec<Pages> = Vec::new();
    for pages in iomem.lines().filter_map(line) {
        match all.last_mut() {
            Some(last) if last.end == pages.start => last.end = pages.end,
            _ => all.push(pages),
        }
    }
    all
}

/// Returns true if the kernel fills free pages with a pattern and checks it on allocation, by its command line and its
/// configuration.
fn checks_free_pages(command_line: &str, config: &str) -> bool {
    let mut looks = config.lines().any(|line| line == "CONFIG_DEBUG_PAGEALLOC_ENABLE_DEFAULT=y");
    for word in command_line.split_ascii_whitespace() {
        if let Some(("page_poison" | "debug_pagealloc", value)) = word.split_once('=') {
            looks |= is_yes(value);
        }
    }
    looks
}

/// Returns true if the kernel parses a word of its command line as yes (`kstrtobool`): only the first letters count.
fn is_yes(value: &str) -> bool {
    let mut letters = value.chars().map(|letter| letter.to_ascii_lowercase());
    match letters.next() {
        Some('y' | 't' | '1') => true,
        Some('o') => letters.next() == Some('n'),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pages_are_used_for() {
        let of = |bits: &[u32]| PageUse::of(bits.iter().fold(0, |flags, bit| flags | 1 << bit));
        assert_eq!(of(&[]), PageUse::Other);
        assert_eq!(of(&[BUDDY]), PageUse::Free);
        assert_eq!(of(&[BUDDY, UPTODATE]), PageUse::Free);
        // Tails of other allocations, offline pages, page tables.
        for bit in [LRU, SLAB, HWPOISON, 16, 22, 23, 26, 32] {
            assert_eq!(of(&[BUDDY, bit]), PageUse::Other, "{bit}");
        }
        assert_eq!(of(&[UPTODATE, LRU]), PageUse::Cache { cold: true });
        assert_eq!(of(&[UPTODATE, LRU, ACTIVE]), PageUse::Cache { cold: false });
        assert_eq!(of(&[UPTODATE, LRU, REFERENCED]), PageUse::Cache { cold: false });
        for bit in [LOCKED, DIRTY, WRITEBACK, MMAP, ANON, SWAPBACKED, SWAPCACHE, UNEVICTABLE, HWPOISON] {
            assert_eq!(of(&[UPTODATE, LRU, bit]), PageUse::Other, "{bit}");
        }
        assert_eq!((of(&[LRU]), of(&[UPTODATE])), (PageUse::Other, PageUse::Other));
        let (cold, warm) = (PageUse::Cache { cold: true }, PageUse::Cache { cold: false });
        assert!(cold.is_cache(Cache::All) && cold.is_cache(Cache::Cold) && !cold.is_cache(Cache::None));
        assert!(warm.is_cache(Cache::All) && !warm.is_cache(Cache::Cold));
        assert!(!PageUse::Free.is_cache(Cache::All) && !PageUse::Other.is_cache(Cache::All));
    }

    #[test]
    fn memory_is_what_the_kernel_calls_so() {
        let iomem = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n000a0000-000bffff : PCI\n\
                     00100000-1fffffff : System RAM\n  01000000-018fffff : Kernel code\n20000000-20ffffff : System RAM\n\
                     100000000-13fffffff : System RAM\n";
        assert_eq!(system_ram(iomem), [1..0x9f, 0x100..0x21000, 0x10_0000..0x14_0000]);
        assert_eq!(system_ram("00000000-00000000 : System RAM\n"), [0..0; 0]);
    }

    #[test]
    fn kernels_that_look_at_free_pages_are_known() {
        for line in ["page_poison=1", "quiet page_poison=On", "debug_pagealloc=yes ro", "page_poison=true"] {
            assert!(checks_free_pages(line, ""), "{line}");
        }
        for line in ["", "page_poison=0", "debug_pagealloc=off", "init_on_free=1", "page_poison"] {
            assert!(
                !checks_free_pages(line, "# CONFIG_DEBUG_PAGEALLOC_ENABLE_DEFAULT is not set\n"),
                "{line}"
            );
        }
        assert!(checks_free_pages("", "CONFIG_A=y\nCONFIG_DEBUG_PAGEALLOC_ENABLE_DEFAULT=y\n"));
    }

    #[test]
    fn pages_are_told_in_runs() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc")).unwrap();
        let put = |name: &str, text: &[u8]| fs::write(root.path().join(name), text).unwrap();
        put("proc/iomem", b"00002000-00006fff : System RAM\n10000000-14ffffff : System RAM\n");
        put("proc/cmdline", b"quiet\n");
        let mut flags = vec![0_u64; 0x15000];
        flags[3..5].fill(1 << BUDDY);
        flags[5] = 1 << LRU | 1 << UPTODATE;
        flags[0x10000..0x15000].fill(1 << BUDDY);
        let bytes: Vec<u8> = flags.iter().flat_map(|flags| flags.to_le_bytes()).collect();
        put("proc/kpageflags", &bytes);
        let kernel = KernelMemory::open(root.path()).unwrap();
        assert!(!kernel.poisoned());
        let mut reported: Vec<(Pages, PageUse)> = Vec::new();
        kernel
            .scan(|pages, used| {
                match reported.last_mut() {
                    Some((last, before)) if *before == used && last.end == pages.start => {
                        last.end = pages.end;
                    }
                    _ => reported.push((pages, used)),
                }
                Ok(())
            })
            .unwrap();
        let cache = PageUse::Cache { cold: true };
        let expected = [(2..3, PageUse::Other), (3..5, PageUse::Free), (5..6, cache), (6..7, PageUse::Other)];
        assert_eq!(reported[..4], expected);
        assert_eq!(reported[4..], [(0x10000..0x15000, PageUse::Free)]);
        // The view of an unprivileged user.
        put("proc/iomem", b"00000000-00000000 : System RAM\n");
        assert_eq!(KernelMemory::open(root.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
