use ::memory::RamError;
use tracee::PageFaultError;

/// The kernel's setting for huge pages in the memory of memfds.
pub(super) const SHARED_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Reason for which pages cannot arrive while the guest runs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PostCopyError {
    /// No userfaultfd can be created in QEMU.
    #[error(
        "QEMU cannot be made to wait for pages; it needs CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd = 1"
    )]
    Inject(#[from] tracee::InjectError),
    /// The kernel refuses the registration of QEMU's memory.
    #[error("the kernel does not let QEMU wait for pages")]
    Missing(#[from] PageFaultError),
    /// No page of this RAM block can be discarded.
    #[error("pages of RAM block {0} cannot be discarded: it has huge pages, or is a private file")]
    Block(String),
    /// The memory has more pages than one list can name.
    #[error("there is more memory than one list of pages can describe")]
    TooMuch,
    /// The memory is locked.
    #[error("QEMU's memory is locked (`mem-lock`), so that no page can be discarded")]
    Locked,
    /// The kernel fills huge pages with zeros where one page was written.
    #[error("the kernel uses huge pages for shared memory ({SHARED_HUGE_PAGES} is {0})")]
    HugePages(String),
    /// A page that was to be discarded is present.
    #[error("RAM block {block} still has the page at {offset:#x}, which should be missing")]
    StillThere {
        /// Name of the RAM block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// A discarded page is not in the list of missing pages: it would stay a zero page.
    #[error(
        "the page at {offset:#x} of RAM block {block} was discarded for the source, which does not send it again; please report this"
    )]
    NotInList {
        /// Name of the RAM block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// An access to the guest's memory failed.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The list of pages is malformed.
    #[error("the source's list of missing pages is invalid")]
    Set(#[from] ::memory::BadPageSet),
    /// The file of missing pages, or a thread, cannot be created.
    #[error("cannot track the missing pages")]
    Keep(#[from] std::io::Error),
    /// An operation on QEMU's process failed.
    #[error(transparent)]
    Process(#[from] tracee::ProcessError),
}
