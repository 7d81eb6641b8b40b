//! Missing pages, and the threads that wait for them: post-copy.
//!
//! The ranges are registered with a userfaultfd of the process in mode "missing": a thread that touches a missing page
//! waits until the page is placed. A page is placed in one step (`UFFDIO_COPY`), in anonymous and in shared memory
//! alike, so no thread sees half of one; and a page that exists is not overwritten, whichever process placed it,
//! because its process may have written to it since.
//!
//! **There is no undo.** After unregistering, waiting threads read zeros (docs/traps.md, trap 10), so nothing here does
//! that by itself: a second descriptor stays inside the process ([`crate::Injector::create_lasting_userfaultfd`]), and
//! with it the threads continue to wait when the agent dies, until another one takes over
//! ([`PageFaultHandler::take_over`]). [`PageFaultHandler::end`] is for the time when every page has been placed.
//!
//! A range may be unmapped in the meantime, as QEMU does with the memory of a device that is unplugged: no thread can
//! wait there, and memory that is mapped there later is not managed here.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::abi::{self, UFFD_MSG_BYTES};
use crate::range::{AddressRange, PAGE_SIZE, merge_from};
use crate::{Process, ProcessError, maps};

/// Maximum number of messages about waits that are read at once.
const MAX_MESSAGES: usize = 64;

/// Error: pages cannot be placed, or threads cannot wait for them.
#[derive(Debug, thiserror::Error)]
pub enum PageFaultError {
    /// The process could not be inspected.
    #[error("cannot find the userfaultfd that was left inside the process")]
    Process(#[from] ProcessError),
    /// Another userfaultfd has registered this range.
    #[error("{range} is watched by another userfaultfd")]
    Taken {
        /// The range.
        range: AddressRange,
    },
    /// The kernel does not support missing pages for memory of this kind.
    #[error("cannot make threads wait for pages of {range}")]
    Unsupported {
        /// The range.
        range: AddressRange,
    },
    /// The range does not consist of whole pages at page addresses.
    #[error("{range} does not consist of whole pages")]
    Unaligned {
        /// The range.
        range: AddressRange,
    },
    /// The process has ended.
    #[error("the process has ended")]
    Ended,
    /// The range is not registered: it never was, or it spans two mappings.
    #[error("no thread waits for pages of {range}, or it is in several mappings")]
    Lost {
        /// The range.
        range: AddressRange,
    },
    /// The range was unmapped since.
    #[error("{range} is not mapped any more")]
    Unmapped {
        /// The range.
        range: AddressRange,
    },
    /// Any other error.
    #[error("cannot {action} {range}")]
    Io {
        /// Attempted action.
        action: &'static str,
        /// The range.
        range: AddressRange,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Ranges of another process in which threads wait for missing pages.
#[derive(Debug)]
pub struct PageFaultHandler {
    process: Process,
    uffd: OwnedFd,
    ranges: Vec<AddressRange>,
}

impl PageFaultHandler {
    /// Registers these ranges: from now on threads of the process wait for missing pages in them. `uffd` is the
    /// descriptor of [`crate::Injector::create_lasting_userfaultfd`].
    ///
    /// # Errors
    /// No range is registered then: earlier ones are unregistered again.
    pub fn begin(process: &Process, uffd: OwnedFd, ranges: &[AddressRange]) -> Result<Self, PageFaultError> {
        let mut this = Self { process: process.try_clone()?, uffd, ranges: Vec::new() };
        for &range in ranges {
            if let Err(error) = this.register(range) {
                // No thread has waited for a page yet, so none can read one as zeros.
                this.end()?;
                return Err(error);
            }
        }
        Ok(this)
    }

    fn register(&mut self, range: AddressRange) -> Result<(), PageFaultError> {
        let calls =
            abi::uffd_register_missing(&self.uffd, range.start, range.len()).map_err(
                |source| match source.raw_os_error() {
                    Some(nix::libc::EBUSY) => PageFaultError::Taken { range },
                    Some(nix::libc::EINVAL | nix::libc::EPERM) => PageFaultError::Unsupported { range },
                    _ => PageFaultError::Io { action: "wait for pages of", range, source },
                },
            )?;
        self.ranges.push(range);
        // Huge pages would have to be placed as a whole.
        if calls & abi::PLACING_CALLS == abi::PLACING_CALLS {
            Ok(())
        } else {
            Err(PageFaultError::Unsupported { range })
        }
    }

    /// Continues the work of another agent, with the descriptor that was left inside the process. Waits that the other
    /// agent has read and not answered are reported again: all threads are woken once (docs/traps.md, trap 15). Nothing
    /// is registered anew: a range that is no longer registered was unmapped, and other memory may be mapped there now.
    ///
    /// # Errors
    /// If the process is gone, or has no such descriptor. Waiting threads continue to wait.
    pub fn take_over(
        process: &Process,
        descriptor: i32,
        ranges: &[AddressRange],
    ) -> Result<Self, PageFaultError> {
        let range = ranges.first().copied().unwrap_or_default();
        let failed =
            |source: io::Error| PageFaultError::Io { action: "take over page faults of", range, source };
        let uffd = pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty());
        let uffd = uffd.map_err(|error| failed(error.into()))?;
        let this = Self { process: process.try_clone()?, uffd, ranges: ranges.to_vec() };
        ranges.iter().try_for_each(|range| this.wake(*range))?;
        Ok(this)
    }

    /// Places whole pages at an address, and wakes the threads that wait for them. Existing pages are not
    /// overwritten. Returns the number of new pages.
    pub fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError> {
        let range = AddressRange::with_len(address, pages.len() as u64);
        let place = |part: AddressRange| {
            let from = (part.start - range.start) as usize;
            abi::uffd_copy(&self.uffd, part.start, &pages[from..])
        };
        self.step_by_step(range, place)
    }

    /// Places pages of zeros.
    pub fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError> {
        self.step_by_step(range, |part| abi::uffd_zeropage(&self.uffd, part.start, part.len()))
    }

    /// Processes a range, skipping all pages that exist.
    fn step_by_step(
        &self,
        range: AddressRange,
        mut place: impl FnMut(AddressRange) -> (u64, io::Result<()>),
    ) -> Result<u64, PageFaultError> {
        if !range.is_aligned(PAGE_SIZE) {
            return Err(PageFaultError::Unaligned { range });
        }
        let (mut left, mut new) = (range, 0);
        while !left.is_empty() {
            let (placed, result) = place(left);
            new += placed / PAGE_SIZE;
            left.start += placed;
            let Err(source) = result else { continue };
            match source.raw_os_error() {
                // Part of the range was placed: the next step returns the reason why it ended there.
                _ if placed > 0 => {}
                // The page exists already. A thread may still wait for it, because its page table entry was being
                // changed during the kernel's check, and placing the page does not wake that thread.
                Some(nix::libc::EEXIST) => {
                    self.wake(AddressRange::with_len(left.start, PAGE_SIZE))?;
                    left.start += PAGE_SIZE;
                }
                // The process is changing its memory map at this moment.
                Some(nix::libc::EAGAIN) => std::thread::yield_now(),
                Some(nix::libc::ESRCH) => return Err(PageFaultError::Ended),
                Some(nix::libc::ENOENT) => return Err(self.placement_error(left)),
                _ => return Err(PageFaultError::Io { action: "place pages of", range: left, source }),
            }
        }
        Ok(new)
    }

    /// Returns the reason why no page can be placed in a range.
    fn placement_error(&self, range: AddressRange) -> PageFaultError {
        let Some(all) = self.ranges.iter().find(|all| all.contains(range.start)) else {
            return PageFaultError::Lost { range };
        };
        match self.parts_of(*all) {
            Ok(parts) => {
                let mapped: u64 = parts.iter().map(|(part, _)| part.len()).sum();
                let is_registered = parts.iter().any(|(_, is_registered)| *is_registered);
                // All of it is mapped and not registered: another process has unregistered it, and its pages read as
                // zeros.
                let is_unmapped = mapped < all.len() && !is_registered;
                if is_unmapped { PageFaultError::Unmapped { range } } else { PageFaultError::Lost { range } }
            }
            Err(error) => error.into(),
        }
    }

    /// Returns the mapped parts of a range, each with true if threads wait for missing pages there.
    fn parts_of(&self, range: AddressRange) -> Result<Vec<(AddressRange, bool)>, ProcessError> {
        let mappings = maps::detailed_mappings(&self.process)?;
        let parts = mappings.iter().filter_map(|mapping| {
            let part =
                AddressRange::new(mapping.range.start.max(range.start), mapping.range.end.min(range.end));
            let is_registered = mapping.details.as_ref().is_some_and(|details| details.has_flag("um"));
            (!part.is_empty()).then_some((part, is_registered))
        });
        Ok(parts.collect())
    }

    /// Makes the kernel report waits for the page at this address once more.
    pub fn report_again(&self, address: u64) {
        // An error means that no thread waits there any more.
        drop(self.wake(AddressRange::with_len(address & !(PAGE_SIZE - 1), PAGE_SIZE)));
    }

    fn wake(&self, range: AddressRange) -> Result<(), PageFaultError> {
        abi::uffd_wake(&self.uffd, range.start, range.len()).map_err(|source| PageFaultError::Io {
            action: "wake the threads that wait for",
            range,
            source,
        })
    }

    /// Waits until threads wait for pages, and appends the pages' addresses, each once and ascending. Returns false,
    /// with nothing appended, if `end` becomes readable or its peer has closed it.
    pub fn wait(&self, end: &impl AsFd, found: &mut Vec<u64>) -> Result<bool, PageFaultError> {
        let range = self.ranges.first().copied().unwrap_or_default();
        let failed = |source: rustix::io::Errno| PageFaultError::Io {
            action: "receive page faults of",
            range,
            source: source.into(),
        };
        loop {
            let mut both = [PollFd::new(&self.uffd, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
            match poll(&mut both, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error)),
            }
            if !both[1].revents().is_empty() {
                return Ok(false);
            }
            let mut messages = [0; MAX_MESSAGES * UFFD_MSG_BYTES];
            let read = match rustix::io::read(&self.uffd, &mut messages) {
                Ok(read) => read,
                // Another reader has read it, or the thread no longer waits.
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(failed(error)),
            };
            let (messages, _) = messages[..read].as_chunks::<UFFD_MSG_BYTES>();
            let first = found.len();
            found.extend(
                messages.iter().filter_map(abi::uffd_fault).map(|address| address & !(PAGE_SIZE - 1)),
            );
            found[first..].sort_unstable();
            found.dedup();
            if found.len() > first {
                return Ok(true);
            }
        }
    }

    /// Returns the registered ranges, joined.
    pub fn ranges(&self) -> Vec<AddressRange> {
        let mut ranges = self.ranges.clone();
        merge_from(&mut ranges, 0);
        ranges
    }

    /// Unregisters all ranges. Must be called only when every page has been placed: a missing page reads as
    /// zeros from here on. After an error it has to be called again.
    pub fn end(&self) -> Result<(), PageFaultError> {
        let each = self.ranges.iter().map(|range| self.unregister_mapped(*range));
        each.fold(Ok(()), Result::and)
    }

    fn unregister_mapped(&self, range: AddressRange) -> Result<(), PageFaultError> {
        let unregister = |range: AddressRange| abi::uffd_unregister(&self.uffd, range.start, range.len());
        let failed = |source| PageFaultError::Io { action: "stop handling page faults of", range, source };
        match unregister(range) {
            // Nothing is mapped there any more, or memory that does not support missing pages.
            Err(source) if source.raw_os_error() == Some(nix::libc::EINVAL) => {
                let parts = self.parts_of(range)?;
                let mut registered = parts.iter().filter(|(_, is_registered)| *is_registered);
                registered.try_for_each(|(part, _)| unregister(*part).map_err(failed))
            }
            done => done.map_err(failed),
        }
    }
}
