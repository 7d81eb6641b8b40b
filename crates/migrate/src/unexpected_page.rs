//! An unexpected page: one that was still to arrive while the guest runs, and was present already.
//!
//! No such page is present when the waits begin: that is checked, and the migration ends if one is. A page that appears
//! later was written around the waits, by a process that has also mapped the guest's memory, or by a defect here or in
//! the kernel. Its content is foreign or old; the guest may have read it, and may have written to it since.
//!
//! So the page is not replaced, which would undo the guest's own writes or tear them. The guest does not run on with it
//! either, as it would not on hardware with corrupted memory: it would write results that depend on the page to its
//! disks.
//!
//! - As long as no virtual CPU has run, this copy is discarded, and the source goes on with memory that is right.
//! - After that the guest is stopped. The remaining pages arrive nevertheless, so that it does not depend on the other
//!   host as well; both hosts report the page to their users, who decide whether the guest is started again or goes on.
//!
//! Zero pages in a file's memory are only checked if a thread waits for them: to place the others would use memory. An
//! agent that takes over cannot distinguish such a page from one that its predecessor had placed and not yet recorded.

use host::{ArrivalArtifacts, Context, DestinationDetails};
use proto::limits::PAGE_BYTES;
use proto::message::{Finding, PageRequest, RamBlock as ProposedBlock, Severity};
use store::journal::MigrationRecord;

/// Returns a message about the page.
pub(crate) fn page_message(PageRequest { block, page }: PageRequest, ram: &[ProposedBlock]) -> String {
    let name = ram.get(usize::from(block)).map_or("?", |block| &*block.name);
    let offset = page * PAGE_BYTES;
    format!(
        "a missing page of its memory (RAM block {name}, at or after {offset:#x}) was written by something \
         else before it arrived, and cannot be trusted"
    )
}

/// Returns the page that the journal has for an arrived or arriving VM.
pub(crate) fn of_record(record: &MigrationRecord) -> Option<PageRequest> {
    artifacts(record)?.missing_pages?.unexpected_page.map(|unexpected_page| unexpected_page.page)
}

fn artifacts(record: &MigrationRecord) -> Option<ArrivalArtifacts> {
    serde_json::from_value::<DestinationDetails>(record.details.clone()).ok().map(|details| details.artifacts)
}

/// Returns a finding for a VM that arrived, or is arriving, with such a page, as long as it runs in the same QEMU, and
/// not in one that was started since.
pub fn finding(context: &Context, record: &MigrationRecord, pid: Option<u32>) -> Option<Finding> {
    let page = of_record(record)?;
    if pid.is_some() && pid != artifacts(record)?.process.map(|(pid, _)| pid) {
        return None;
    }
    let proposal = context.journal.proposal(record.id()).ok().flatten();
    Some(Finding {
        severity: Severity::Warning,
        code: "unexpected-page".to_owned(),
        what: page_message(page, proposal.as_ref().map_or(&[], |proposal| &proposal.ram)),
        advice: "find out which program writes to its memory; restart it from its disks, or resume it as it \
                 is with `cont` on its monitor"
            .to_owned(),
    })
}
