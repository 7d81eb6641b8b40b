//! What the guest's memory is to be made of on the destination, where nobody says.

use super::SourceFacts;
use super::facts::MemoryFeatures;
use crate::command::RamPlan;
use crate::describe::VmDescription;
use crate::ram::RamKind;

/// Size of usual pages, in bytes.
const PAGE_BYTES: u64 = 4096;

/// A plan that takes nothing from the guest that it had and that the destination could give it, and why.
///
/// A shared memfd is the fast way to receive, so it is the rule. Memory of hugetlbfs, and memory that was shared
/// before, goes into one in any case. Anonymous memory stays anonymous where this host gives transparent huge pages
/// to such memory alone, or looks for equal pages (KSM), which it does in such memory alone.
pub fn choose(source: &SourceFacts, here: &MemoryFeatures) -> (RamPlan, &'static str) {
    let hugepage_bytes = hugepage_bytes(source);
    let memfd = RamPlan::Memfd { hugepage_bytes };
    if hugepage_bytes.is_some() {
        return (memfd, "the source has huge pages of hugetlbfs");
    }
    // The guest's own memory is the largest block; video memory and ROMs are always anonymous.
    let main = source.ram_blocks.iter().max_by_key(|block| block.used_bytes);
    if main.is_some_and(|block| matches!(block.kind, RamKind::SharedFile(_))) {
        return (memfd, "the source has shared memory");
    }
    if here.huge_pages_anonymous && !here.huge_pages_shared {
        return (RamPlan::Anonymous, "this host has transparent huge pages for anonymous memory alone");
    }
    if here.ksm && may_be_merged(&source.vm) {
        return (RamPlan::Anonymous, "this host merges equal pages, in anonymous memory alone");
    }
    (memfd, "anonymous memory has no advantage on this host")
}

/// Size of the largest huge pages of hugetlbfs among the guest's memory, if there are any.
pub fn hugepage_bytes(source: &SourceFacts) -> Option<u64> {
    let pages = source.ram_blocks.iter().map(|block| block.page_size_bytes);
    pages.max().filter(|bytes| *bytes > PAGE_BYTES)
}

/// Whether QEMU offers the guest's memory to KSM. It does unless it is told not to.
fn may_be_merged(vm: &VmDescription) -> bool {
    let refused =
        |key: &str, option: &crate::cmdline::Given| option.parsed().get(key).as_deref() == Some("off");
    let mut options = vm.options.iter();
    !options.any(|option| match option.name.as_str() {
        "machine" => refused("mem-merge", option),
        "object" => {
            let memory =
                option.parsed().get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-"));
            memory && refused("merge", option)
        }
        _ => false,
    })
}
