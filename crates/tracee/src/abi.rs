//! Kernel constants and calls that tracking needs, verified at compile time where possible.
//!
//! Structures are from `linux-raw-sys`, which is generated from the kernel's own headers. Each call
//! is wrapped once, so that the reason why it is sound is in one place.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use nix::libc;
use rustix::ioctl::opcode;

pub(crate) use raw::{
    page_region, pm_scan_arg, uffdio_api, uffdio_copy, uffdio_range, uffdio_register, uffdio_writeprotect,
    uffdio_zeropage,
};

/// Reads a page table, and write-protects pages in the same step.
const PAGEMAP_SCAN: u32 = opcode::read_write::<pm_scan_arg>(b'f', 16) as u32;
/// Queries one mapping of a process, since Linux 6.11.
const PROCMAP_QUERY: u32 = opcode::read_write::<raw::procmap_query>(b'f', 17) as u32;

const _: () = assert!(PAGEMAP_SCAN == 0xC060_6610);
const _: () = assert!(PROCMAP_QUERY == 0xC068_6611);
const _: () = assert!(size_of::<pm_scan_arg>() == 96 && size_of::<page_region>() == 24);
const _: () =
    assert!(linux_raw_sys::ioctl::UFFDIO_API == opcode::read_write::<uffdio_api>(0xAA, 0x3F) as u32);
const _: () = assert!(
    linux_raw_sys::ioctl::UFFDIO_REGISTER == opcode::read_write::<uffdio_register>(0xAA, 0x00) as u32
);
const _: () =
    assert!(linux_raw_sys::ioctl::UFFDIO_UNREGISTER == opcode::read::<uffdio_range>(0xAA, 0x01) as u32);
const _: () = assert!(
    linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT == opcode::read_write::<uffdio_writeprotect>(0xAA, 0x06) as u32
);

const _: () =
    assert!(linux_raw_sys::ioctl::UFFDIO_COPY == opcode::read_write::<uffdio_copy>(0xAA, 0x03) as u32);
const _: () = assert!(
    linux_raw_sys::ioctl::UFFDIO_ZEROPAGE == opcode::read_write::<uffdio_zeropage>(0xAA, 0x04) as u32
);
const _: () = assert!(linux_raw_sys::ioctl::UFFDIO_WAKE == opcode::read::<uffdio_range>(0xAA, 0x02) as u32);

/// Features of a userfaultfd that [`crate::PageFaultHandler`] requests: threads also wait for pages of shared memory.
pub(crate) const MISSING_FEATURES: u64 = raw::UFFD_FEATURE_MISSING_SHMEM as u64;
/// Calls that it needs for each range.
pub(crate) const PLACING_CALLS: u64 =
    1 << raw::_UFFDIO_WAKE | 1 << raw::_UFFDIO_COPY | 1 << raw::_UFFDIO_ZEROPAGE;
/// Length of a message of a userfaultfd in bytes.
pub(crate) const UFFD_MSG_BYTES: usize = size_of::<raw::uffd_msg>();
const _: () = assert!(UFFD_MSG_BYTES == 32);

/// Features of a userfaultfd that a [`crate::WriteTracker`] requests.
pub(crate) const TRACKING_FEATURES: u64 = (raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_WP_UNPOPULATED
    | raw::UFFD_FEATURE_WP_ASYNC) as u64;

/// Calls an ioctl whose argument is a structure.
///
/// # Safety
/// `T` must be the structure that `request` expects, and every pointer in it must be valid for the kernel's use.
pub(crate) unsafe fn ioctl<T>(fd: &impl AsFd, request: u32, argument: &mut T) -> io::Result<i32> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; the caller guarantees the rest.
    let result = unsafe { libc::ioctl(fd, libc::c_ulong::from(request), std::ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Creates a userfaultfd of this process itself, for user-mode faults only: every user may create one.
pub(crate) fn own_userfaultfd() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | raw::UFFD_USER_MODE_ONLY as i32;
    // SAFETY: the only argument is a set of flags.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Initialises a userfaultfd with `features`; returns the features and calls that the kernel has.
/// Without features it is only a query, which is possible once.
pub(crate) fn uffd_api(uffd: &impl AsFd, features: u64) -> io::Result<uffdio_api> {
    let mut argument = uffdio_api { api: u64::from(raw::UFFD_API), features, ioctls: 0 };
    // SAFETY: the structure of this request, without pointers.
    unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_API, &mut argument) }?;
    Ok(argument)
}

/// Registers `len` bytes at `start` for write protection.
pub(crate) fn uffd_register_wp(uffd: &impl AsFd, start: u64, len: u64) -> io::Result<()> {
    uffd_register(uffd, start, len, raw::UFFDIO_REGISTER_MODE_WP).map(drop)
}

/// Registers `len` bytes at `start`: from now on threads that touch a missing page wait. Returns the calls that the
/// range supports.
pub(crate) fn uffd_register_missing(uffd: &impl AsFd, start: u64, len: u64) -> io::Result<u64> {
    uffd_register(uffd, start, len, raw::UFFDIO_REGISTER_MODE_MISSING)
}

fn uffd_register(uffd: &impl AsFd, start: u64, len: u64, mode: u32) -> io::Result<u64> {
    let range = uffdio_range { start, len };
    let mut argument = uffdio_register { range, mode: u64::from(mode), ioctls: 0 };
    // SAFETY: the structure of this request, without pointers: the addresses in it belong to the
    // traced process and only name ranges.
    unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_REGISTER, &mut argument) }?;
    Ok(argument.ioctls)
}

/// Ends the registration, and the protection with it.
pub(crate) fn uffd_unregister(uffd: &impl AsFd, start: u64, len: u64) -> io::Result<()> {
    let mut argument = uffdio_range { start, len };
    // SAFETY: as in `uffd_register_wp`.
    unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_UNREGISTER, &mut argument) }.map(drop)
}

/// Protects `len` bytes at `start`, so that the kernel records the next write to each page.
pub(crate) fn uffd_write_protect(uffd: &impl AsFd, start: u64, len: u64) -> io::Result<()> {
    let range = uffdio_range { start, len };
    let mut argument = uffdio_writeprotect { range, mode: 1 };
    // SAFETY: as in `uffd_register_wp`.
    unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT, &mut argument) }.map(drop)
}

/// Places pages at `address` with the content of `from`, whole pages, and wakes the threads that wait for them. A page
/// is placed at once or not at all. Returns the number of bytes that were placed, and the error if that is not all.
pub(crate) fn uffd_copy(uffd: &impl AsFd, address: u64, from: &[u8]) -> (u64, io::Result<()>) {
    let (src, len) = (from.as_ptr() as u64, from.len() as u64);
    let mut argument = uffdio_copy { dst: address, src, len, mode: 0, copy: 0 };
    // SAFETY: the structure of this request; `src` points to `len` bytes that outlive the call, and the kernel only
    // reads them. `dst` is an address of the other process, which the kernel checks.
    let result = unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_COPY, &mut argument) }.map(drop);
    // A negative number is the error.
    (u64::try_from(argument.copy).unwrap_or(0), result)
}

/// Places pages of zeros, like [`uffd_copy`].
pub(crate) fn uffd_zeropage(uffd: &impl AsFd, start: u64, len: u64) -> (u64, io::Result<()>) {
    let range = uffdio_range { start, len };
    let mut argument = uffdio_zeropage { range, mode: 0, zeropage: 0 };
    // SAFETY: the structure of this request, without pointers.
    let result = unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_ZEROPAGE, &mut argument) }.map(drop);
    (u64::try_from(argument.zeropage).unwrap_or(0), result)
}

/// Wakes all threads that wait for pages in a range: a thread that finds no page waits again, and the kernel reports it
/// again.
pub(crate) fn uffd_wake(uffd: &impl AsFd, start: u64, len: u64) -> io::Result<()> {
    let mut argument = uffdio_range { start, len };
    // SAFETY: the structure of this request, without pointers.
    unsafe { ioctl(uffd, linux_raw_sys::ioctl::UFFDIO_WAKE, &mut argument) }.map(drop)
}

/// Returns the address of a thread's wait for a missing page, in a message of a userfaultfd; none for other messages.
pub(crate) fn uffd_fault(message: &[u8; UFFD_MSG_BYTES]) -> Option<u64> {
    // `event`, seven bytes of padding, then `arg.pagefault`: flags, address.
    let (words, _) = message.as_chunks::<8>();
    let address = u64::from_ne_bytes(*words.get(2)?);
    (u32::from(message[0]) == raw::UFFD_EVENT_PAGEFAULT).then_some(address)
}

/// Condition of a scan: pages whose categories, after inverting those in `inverted`, include all of
/// `required` and, unless it is empty, one of `any_of`. The returned categories are not inverted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScanQuery {
    pub(crate) flags: u64,
    pub(crate) inverted: u64,
    pub(crate) required: u64,
    pub(crate) any_of: u64,
    pub(crate) returned: u64,
}

/// Runs one step of a scan over `[start, end)`: fills `found`, returns the number of entries and
/// the address that the kernel reached.
pub(crate) fn pagemap_scan(
    pagemap: &impl AsFd,
    query: ScanQuery,
    start: u64,
    end: u64,
    found: &mut [page_region],
) -> io::Result<(usize, u64)> {
    let mut argument = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: query.flags,
        start,
        end,
        walk_end: 0,
        vec: found.as_mut_ptr() as u64,
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: query.inverted,
        category_mask: query.required,
        category_anyof_mask: query.any_of,
        return_mask: query.returned,
    };
    // SAFETY: the structure of this request; `vec` points to `vec_len` writable entries that
    // outlive the call.
    let count = unsafe { ioctl(pagemap, PAGEMAP_SCAN, &mut argument) }?;
    Ok((count as usize, argument.walk_end))
}

/// Returns the range of the mapping that contains `address`, and the size of its pages in bytes
/// (Linux 6.11; `ENOTTY` before, `ENOENT` if unmapped).
pub(crate) fn procmap_query(maps: &impl AsFd, address: u64) -> io::Result<(u64, u64, u64)> {
    // SAFETY: a plain structure of integers, for which zeros are valid and mean "not requested".
    let mut argument: raw::procmap_query = unsafe { std::mem::zeroed() };
    argument.size = size_of::<raw::procmap_query>() as u64;
    argument.query_addr = address;
    // SAFETY: the structure of this request; the sizes of both optional buffers are zero, so their
    // addresses are not used.
    unsafe { ioctl(maps, PROCMAP_QUERY, &mut argument) }?;
    Ok((argument.vma_start, argument.vma_end, argument.vma_page_size))
}

/// Asks the kernel to swap out, or to write back, `len` bytes at `start` of the process behind a pidfd. Returns the
/// number of bytes that it has processed, which may be fewer.
pub(crate) fn page_out(pidfd: &impl AsFd, start: u64, len: u64) -> io::Result<u64> {
    let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len as usize };
    let (pidfd, flags) = (pidfd.as_fd().as_raw_fd(), 0);
    // SAFETY: `range` outlives the call; the address in it belongs to the other process, and the kernel checks it.
    // Paging out changes no contents.
    let advised = unsafe {
        libc::syscall(libc::SYS_process_madvise, pidfd, &raw const range, 1, libc::MADV_PAGEOUT, flags)
    };
    u64::try_from(advised).map_err(|_| io::Error::last_os_error())
}
