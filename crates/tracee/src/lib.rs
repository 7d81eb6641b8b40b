//! Operations on another process.
//!
//! For a QEMU that already runs, unmodified, Whimbrel must find out which pages its guest writes, and must read and
//! write its memory. This crate does that from outside:
//!
//! | module | does |
//! |---|---|
//! | [`Process`] | names a process so that it cannot be mistaken for another |
//! | [`Kernel`] | checks that this kernel has the needed features |
//! | [`Injector`] | makes the process run single system calls (ptrace, from a small process of its own) |
//! | [`WriteTracker`] | returns the pages that were written since the last call (userfaultfd, `PAGEMAP_SCAN`) |
//! | [`WriteMeter`] | counts the pages that were written since it was started, for a measurement |
//! | [`PageFaultHandler`] | makes threads wait for missing pages, and places the pages |
//! | [`CpuLimit`] | limits the processor time of some of its threads (control groups) |
//! | [`maps`], [`Pagemap`] | memory map, and which pages exist |
//! | [`RemoteMemory`], [`RamFile`] | reads and writes RAM, anonymous or in a file |
//!
//! ([`allocator`] is about this process, [`FileLease`] about a file, [`unsent_bytes`] about a socket, [`Tap`] and
//! [`PacketSocket`] about network devices: none of these operations has a safe interface.)
//!
//! It is the only crate with `unsafe`, and it knows nothing of virtual machines or migrations. Everything that changes
//! the other process has an undo that works when it is dropped and when this process dies. There are two exceptions:
//! missing pages have none, on purpose, and the next process has to undo a limit on processors.

mod abi;
pub mod allocator;
mod arch;
mod cpu_limit;
mod discarded;
mod inject;
mod kernel;
mod lease;
pub mod maps;
mod packets;
mod page_faults;
mod pagemap;
mod process;
mod ram_file;
mod range;
mod remote;
mod tap;
mod tracker;
mod unsent;

pub use cpu_limit::{CpuLimit, CpuLimitError, PERIOD as CPU_LIMIT_PERIOD};
#[doc(hidden)]
pub use inject::is_holding_thread;
pub use inject::{InjectError, Injector, LastingUserfaultfd, injector_main};
pub use kernel::{Feature, Kernel, MissingFeatures};
pub use lease::FileLease;
pub use packets::{FilterStep, PacketSocket, Received, VIRTIO_HEADER_BYTES};
pub use page_faults::{PageFaultError, PageFaultHandler};
pub use pagemap::Pagemap;
pub use process::{Process, ProcessError, Signal, Status, ThreadTimes};
pub use ram_file::{FileRange, RamFile, RamFileError, RamFileKind};
pub use range::{AddressRange, PAGE_SIZE, intersect, merge_from, subtract};
pub use remote::{RemoteError, RemoteMemory};
pub use tap::Tap;
pub use tracker::{TrackError, TrackerStart, WriteMeter, WriteTracker, WrittenMemory, write_fault_cost};
pub use unsent::unsent_bytes;
