//! Dirty log of all participants.

use ::memory::{DirtyLog, DirtyLogError, PageSet, ScanError, ScanStats};
use qemu::qmp::Qmp;

use super::Member;

/// Returns the error of a participant for whose blocks there are no sets of pages. Its log would lose pages.
pub(super) fn no_room(name: &str) -> ScanError {
    let error = "there is no room for the pages of its blocks; please report this";
    ScanError { block: name.to_owned(), source: DirtyLogError::Other(error.into()) }
}

/// Combined dirty log of the participants.
pub(super) struct Log<'a> {
    pub(super) members: &'a mut [Member],
    pub(super) qmp: Option<&'a mut Qmp>,
}

impl DirtyLog for Log<'_> {
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        let mut all = ScanStats::default();
        // The last ones first: QEMU has to answer a request for them, which needs time in which memory is written.
        for member in self.members.iter_mut().rev().filter(|member| member.is_prepared) {
            let blocks = into.get_mut(member.blocks.clone()).ok_or_else(|| no_room(member.profile.name))?;
            let scan = member.participant.scan(self.qmp.as_deref_mut(), blocks)?;
            all.pages += scan.pages;
            all.duration_us += scan.duration_us;
        }
        Ok(all)
    }
}
