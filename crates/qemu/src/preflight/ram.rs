//! Kind of the guest's memory on the destination, if the user does not choose it.

use super::facts::MemoryFeatures;
use super::input::SourceFacts;
use crate::command::RamPlan;
use crate::describe::VmDescription;
use crate::ram::RamKind;

/// Size of a normal page in bytes.
const PAGE_BYTES: u64 = 4096;

/// Returns a plan that keeps every property of the guest's memory that the destination can provide, and its reason.
///
/// A shared memfd is the fast way to receive, so it is the default. Memory of hugetlbfs, and memory that was shared
/// before, always uses one. Anonymous memory stays anonymous if this host provides transparent huge pages only for
/// anonymous memory, or merges equal pages (KSM), which it does only for anonymous memory.
pub fn choose(source: &SourceFacts, here: &MemoryFeatures) -> (RamPlan, &'static str) {
    let hugepage_bytes = hugepage_bytes(source);
    let memfd = RamPlan::Memfd { hugepage_bytes };
    if hugepage_bytes.is_some() {
        return (memfd, "the source uses huge pages (hugetlbfs)");
    }
    // The guest's own memory is the largest block; video memory and ROMs are always anonymous.
    let main = source.ram_blocks.iter().max_by_key(|block| block.used_bytes);
    if main.is_some_and(|block| matches!(block.kind, RamKind::SharedFile(_))) {
        return (memfd, "the source uses shared memory");
    }
    if here.huge_pages_anonymous && !here.huge_pages_shared {
        return (RamPlan::Anonymous, "this host has transparent huge pages only for anonymous memory");
    }
    if here.ksm && can_be_merged(&source.vm) {
        return (RamPlan::Anonymous, "this host merges equal pages (KSM), only in anonymous memory");
    }
    (memfd, "anonymous memory has no advantage on this host")
}

/// Returns the size in bytes of the largest huge pages of hugetlbfs in the guest's memory, if there are any.
pub fn hugepage_bytes(source: &SourceFacts) -> Option<u64> {
    let pages = source.ram_blocks.iter().map(|block| block.page_size_bytes);
    pages.max().filter(|bytes| *bytes > PAGE_BYTES)
}

/// Returns true if QEMU offers the guest's memory to KSM. It does unless an option forbids it.
fn can_be_merged(vm: &VmDescription) -> bool {
    let refused = |key: &str, option: &crate::cmdline::QemuOption| {
        option.parse_value().get(key).as_deref() == Some("off")
    };
    let mut options = vm.options.iter();
    !options.any(|option| match option.name.as_str() {
        "machine" => refused("mem-merge", option),
        "object" => {
            let memory =
                option.parse_value().get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-"));
            memory && refused("merge", option)
        }
        _ => false,
    })
}
