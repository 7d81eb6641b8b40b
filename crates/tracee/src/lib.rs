//! All that Whimbrel does to another process.
//!
//! A QEMU that already runs, unmodified, has to tell which pages its guest writes, and to let its
//! memory be read and written. This crate does that from outside:
//!
//! | module | does |
//! |---|---|
//! | [`Process`] | names a process so that it cannot be mistaken for another |
//! | [`Kernel`] | says whether this kernel has what is needed |
//! | [`Injector`] | makes the process run single system calls (ptrace, from a small process of its own) |
//! | [`WriteTracker`] | tells which pages were written since it was last asked (userfaultfd, `PAGEMAP_SCAN`) |
//! | [`MissingPages`] | has threads wait for pages that are not there yet, and places them |
//! | [`CpuLimit`] | holds some of its threads to so much processor time (control groups) |
//! | [`maps`], [`Pagemap`] | what is mapped, and which pages are there at all |
//! | [`RemoteMemory`], [`RamFile`] | reads and writes RAM, anonymous or in a file |
//!
//! ([`heap`] is about this process, [`Lease`] about a file, [`unsent_bytes`] about a socket: all have no safe interface.)
//!
//! It is the only crate with `unsafe`, and it knows nothing of virtual machines or
//! migrations. Everything that changes the other process has an undo that works when it is dropped
//! and when this process dies; only for missing pages there is none, on purpose, and for a limit on
//! processors it is for the next one to call.

mod abi;
mod arch;
mod cpu_limit;
mod given_back;
pub mod heap;
mod inject;
mod kernel;
mod lease;
pub mod maps;
mod missing;
mod pagemap;
mod process;
mod ram_file;
mod range;
mod remote;
mod tracker;
mod unsent;

pub use cpu_limit::{CpuLimit, CpuLimitError, PERIOD as CPU_LIMIT_PERIOD};
#[doc(hidden)]
pub use inject::holds_a_thread;
pub use inject::{InjectError, Injector, LeftUserfaultfd, injector_main};
pub use kernel::{Feature, Kernel, MissingFeatures};
pub use lease::Lease;
pub use missing::{MissingError, MissingPages};
pub use pagemap::Pagemap;
pub use process::{Process, ProcessError, Signal, Status, ThreadTimes};
pub use ram_file::{FileRange, RamFile, RamFileError, RamFileKind};
pub use range::{AddressRange, PAGE_SIZE, intersect, merge_from, subtract};
pub use remote::{RemoteError, RemoteMemory};
pub use tracker::{TrackError, TrackerStart, WriteTracker};
pub use unsent::unsent_bytes;
