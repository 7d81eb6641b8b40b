//! Guest RAM as bytes, which the data plane reads at the source and writes at the destination.
//!
//! A RAM block is a sequence of bytes from 0 on. [`BlockReader`] and [`BlockWriter`] hide its location:
//!
//! | memory of QEMU | read by | written by | given back by |
//! |---|---|---|---|
//! | shared file (memfd, tmpfs) | `pread` | `pwrite` | punching a hole |
//! | shared file of huge pages | `pread` | `process_vm_writev` | punching whole pages, zeros otherwise |
//! | anonymous | `process_vm_readv` | `process_vm_writev` | zeros; QEMU itself, by an injected call ([`BlockWriter::take_discardable`]) |
//! | private mapping of a file | `process_vm_readv` what the process has, `pread` the rest | `process_vm_writev` | zeros |
//! | private huge pages | `process_vm_readv` | `process_vm_writev` | zeros |
//!
//! A block that was present from end to end before the first page arrived was preallocated at the user's request: none
//! of its memory is given back, and empty pages are filled with zeros.
//!
//! Unmapped pages (holes of the file, pages neither present nor swapped) are not read, and such a hole becomes a hole
//! at the destination (trap 5). Tracking puts a marker in the place of each unmapped page; only its entry in
//! `/proc/PID/pagemap` distinguishes a marker from a page in swap, and only a process with `CAP_SYS_ADMIN` sees that.
//!
//! Huge pages that are not shared cannot be distinguished in this way, so all of them are read, which allocates the
//! missing ones: from the huge pages reserved for them, as QEMU does unless configured otherwise (`reserve=off`). If
//! they are zero, they still become holes at the destination.

mod backing;
mod block;
mod destination;
mod dropped;
mod preallocated;
mod source;
pub mod zero;

pub(crate) use backing::drop_watches;
pub use block::{BlockReader, BlockWriter, DiscardMethod, RamError, RamRegion};
pub use destination::open_destination;
pub(crate) use dropped::DropWatch;
pub use source::open_source;
