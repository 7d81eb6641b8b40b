//! Memory to order: one mapping, and commands for it on standard input, each answered with a line. Offsets and lengths
//! in bytes.
//!
//! | command | does |
//! |---|---|
//! | `map KIND LEN` | maps, and answers the address; kinds: `anonymous`, `huge`, `memfd`, `disk-file`, `private-file`, `private-sparse-file`, `hugetlb-memfd`, `hugetlb` |
//! | `write OFFSET LEN SEED` | writes values made from SEED |
//! | `stripes OFFSET LEN SEED` | writes to every second page |
//! | `read OFFSET LEN` | reads every page |
//! | `drop OFFSET LEN` | discards: `MADV_DONTNEED`, or a hole in the file if shared |
//! | `unmap-pages OFFSET LEN` | `MADV_DONTNEED` also if shared: the page stays in the file |
//! | `pageout OFFSET LEN` | to swap |
//! | `fork-write OFFSET LEN SEED` | a child writes, and ends |
//! | `fork-stay OFFSET LEN SEED` | a child writes, and stays |
//! | `remap OFFSET LEN` | maps fresh memory over a part |
//! | `direct-read PATH` / `direct-wait` | submits / awaits reads from a file straight into memory |
//! | `storm` / `calm` | starts / ends two threads that write all over |

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::libc;

const PAGE: usize = 4096;

#[derive(Clone, Copy)]
struct Memory {
    base: usize,
    len: usize,
    shared: bool,
}

impl Memory {
    fn map(kind: &str, len: usize) -> Self {
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // Room for aligning to 2 MiB, so that huge pages fit.
        let room = len + (2 << 20);
        let (flags, fd) = match kind {
            "anonymous" | "huge" => (private, -1),
            "hugetlb" => (private | libc::MAP_HUGETLB, -1),
            "memfd" => (libc::MAP_SHARED, memfd(0, len)),
            "disk-file" => (libc::MAP_SHARED, disk_file(len)),
            "private-sparse-file" => (libc::MAP_PRIVATE, memfd(0, len)),
            // The file is not empty.
            "private-file" => (libc::MAP_PRIVATE, filled_memfd(len)),
            "hugetlb-memfd" => (libc::MAP_SHARED, memfd(libc::MFD_HUGETLB, len)),
            other => panic!("no kind {other}"),
        };
        // SAFETY: a new mapping, to which no pointer exists.
        let reserved = unsafe { libc::mmap(std::ptr::null_mut(), room, libc::PROT_NONE, private, -1, 0) };
        let base = (reserved as usize).next_multiple_of(2 << 20);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: over a part of the reservation just made.
        let mapped =
            unsafe { libc::mmap(base as *mut libc::c_void, len, access, flags | libc::MAP_FIXED, fd, 0) };
        assert_ne!(mapped, libc::MAP_FAILED, "no memory of kind {kind}");
        let memory = Self { base, len, shared: flags & libc::MAP_SHARED != 0 };
        if kind == "huge" {
            memory.advise(0, len, libc::MADV_HUGEPAGE);
        }
        memory
    }

    fn advise(&self, offset: usize, len: usize, advice: i32) {
        assert!(offset + len <= self.len, "beyond the mapping");
        // SAFETY: within the mapping, which is only touched through volatile accesses.
        let result = unsafe { libc::madvise((self.base + offset) as *mut libc::c_void, len, advice) };
        assert_eq!(result, 0, "madvise {advice}: {}", std::io::Error::last_os_error());
    }

    fn unmap(&self, offset: usize, len: usize) {
        // SAFETY: memory of `map`, which no code uses any more.
        let result = unsafe { libc::munmap((self.base + offset) as *mut libc::c_void, len) };
        assert_eq!(result, 0, "munmap");
    }

    fn remap(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "beyond the mapping");
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let start = (self.base + offset) as *mut libc::c_void;
        // SAFETY: over a part of the mapping, which is only touched through volatile accesses.
        let mapped = unsafe { libc::mmap(start, len, access, flags, -1, 0) };
        assert_ne!(mapped, libc::MAP_FAILED, "no memory");
    }

    fn write(&self, offset: usize, len: usize, seed: u64) {
        assert!(offset + len <= self.len, "beyond the mapping");
        for at in offset..offset + len {
            let value = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at as u64) >> 8) as u8;
            // SAFETY: within the mapping.
            unsafe { ((self.base + at) as *mut u8).write_volatile(value) };
        }
    }

    fn read(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "beyond the mapping");
        for at in (offset..offset + len).step_by(PAGE) {
            // SAFETY: within the mapping.
            unsafe { ((self.base + at) as *const u8).read_volatile() };
        }
    }

    fn fork(&self, stay: bool, offset: usize, len: usize, seed: u64) {
        let (reader, writer) = std::io::pipe().expect("pipe");
        // SAFETY: the child only writes memory and a pipe, and ends without cleaning up.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: all arguments are integers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            self.write(offset, len, seed);
            let _ = (&writer).write(b".");
            if stay {
                // SAFETY: waits until this child is killed with its parent.
                unsafe { libc::pause() };
            }
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        drop(writer);
        let _ = std::io::Read::read(&mut &reader, &mut [0]);
        if !stay {
            // SAFETY: waits for the child just made.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        }
    }
}

fn memfd(flags: libc::c_uint, len: usize) -> i32 {
    // SAFETY: a valid name.
    let fd = unsafe { libc::memfd_create(c"victim".as_ptr(), flags | libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "no memfd");
    // SAFETY: all arguments are integers.
    unsafe { libc::ftruncate(fd, len as i64) };
    fd
}

/// Creates a file without a name that can be dropped from memory without swap.
fn disk_file(len: usize) -> i32 {
    // SAFETY: a valid path.
    let fd =
        unsafe { libc::open(c"/var/tmp".as_ptr(), libc::O_TMPFILE | libc::O_RDWR | libc::O_CLOEXEC, 0o600) };
    assert!(fd >= 0, "no file");
    // SAFETY: all arguments are integers.
    unsafe { libc::ftruncate(fd, len as i64) };
    fd
}

fn filled_memfd(len: usize) -> i32 {
    let fd = memfd(0, len);
    let bytes: Vec<u8> = (0..len).map(|at| (at / 4096 * 7) as u8).collect();
    // SAFETY: as many bytes as there are.
    let written = unsafe { libc::pwrite(fd, bytes.as_ptr().cast(), len, 0) };
    assert_eq!(written, len as isize, "the file is filled");
    fd
}

pub(super) fn serve(_: &[String]) {
    println!("ready");
    let mut memory = Memory { base: 0, len: 0, shared: false };
    let mut direct: Option<DirectRead> = None;
    let calm = Arc::new(AtomicBool::new(false));
    let mut storm: Vec<JoinHandle<()>> = Vec::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse().ok()).unwrap_or(0usize);
        let (offset, len, seed) = (number(1), number(2), number(3) as u64);
        match words[0] {
            "map" => memory = Memory::map(words[1], len),
            "write" => memory.write(offset, len, seed),
            "stripes" => {
                for at in (offset..offset + len).step_by(2 * PAGE) {
                    memory.write(at, 8, seed);
                }
            }
            "read" => memory.read(offset, len),
            "drop" if memory.shared => memory.advise(offset, len, libc::MADV_REMOVE),
            "drop" | "unmap-pages" => memory.advise(offset, len, libc::MADV_DONTNEED),
            "pageout" => memory.advise(offset, len, libc::MADV_PAGEOUT),
            "fork-write" => memory.fork(false, offset, len, seed),
            "fork-stay" => memory.fork(true, offset, len, seed),
            "remap" => memory.remap(offset, len),
            "unmap" => memory.unmap(offset, len),
            "direct-read" => direct = Some(DirectRead::submit(memory, words[1])),
            "direct-wait" => direct = direct.take().and_then(DirectRead::wait),
            "storm" => storm.extend((1..3).map(|seed| start_storm(memory, seed, calm.clone()))),
            "calm" => {
                calm.store(true, Ordering::Relaxed);
                storm.drain(..).for_each(|thread| thread.join().expect("a storm ends"));
                calm.store(false, Ordering::Relaxed);
            }
            other => panic!("no command {other}"),
        }
        println!("{}", memory.base);
    }
}

fn start_storm(memory: Memory, seed: u64, calm: Arc<AtomicBool>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut state = seed;
        while !calm.load(Ordering::Relaxed) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
            memory.write((state >> 16) as usize % (memory.len - 8), 8, state);
        }
    })
}

/// Part of the kernel's `struct iocb` that is used here.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    data: u64,
    key: u32,
    flags: u32,
    opcode: u16,
    priority: u16,
    fd: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    reserved: [u64; 2],
}

const _: () = assert!(size_of::<Request>() == 64);

/// Reads of 1 MiB each that the disk performs by DMA: it writes into memory behind the page table.
struct DirectRead {
    context: usize,
    count: usize,
    _file: std::fs::File,
    _requests: Vec<Request>,
}

impl DirectRead {
    fn submit(memory: Memory, path: &str) -> Self {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::OpenOptionsExt;
        const PIECE: usize = 1 << 20;
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_DIRECT).open(path).expect("O_DIRECT");
        let count = memory.len / PIECE;
        let requests: Vec<Request> = (0..count)
            .map(|i| Request {
                data: 0,
                key: 0,
                flags: 0,
                opcode: 0,
                priority: 0,
                fd: file.as_raw_fd() as u32,
                buffer: (memory.base + i * PIECE) as u64,
                len: PIECE as u64,
                offset: (i * PIECE) as i64,
                reserved: [0; 2],
            })
            .collect();
        let pointers: Vec<*const Request> = requests.iter().map(std::ptr::from_ref).collect();
        let mut context = 0usize;
        // SAFETY: writable for the context.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, count, &raw mut context) };
        assert_eq!(made, 0, "no asynchronous I/O");
        // SAFETY: valid requests; their buffers are never unmapped.
        let sent = unsafe { libc::syscall(libc::SYS_io_submit, context, count, pointers.as_ptr()) };
        assert_eq!(sent, count as i64, "not all were submitted");
        Self { context, count, _file: file, _requests: requests }
    }

    fn wait(self) -> Option<Self> {
        let mut done = 0;
        while done < self.count {
            let mut events = vec![[0u64; 4]; self.count];
            // SAFETY: room for as many events as are requested.
            let some = unsafe {
                libc::syscall(libc::SYS_io_getevents, self.context, 1, self.count, events.as_mut_ptr(), 0)
            };
            assert!(events.iter().all(|event| event[2] == 0 || event[2] == 1 << 20), "a read failed");
            done += usize::try_from(some).unwrap_or(0);
        }
        // SAFETY: a context that was made above.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
        None
    }
}
