//! Recent rate at which pages are sent, as the throttles of the guest need it.

use proto::limits::PAGE_BYTES;

/// Pages of a part before the sending rate is known, and the minimum for a measurement of this rate: the duration of a
/// smaller part depends on its beginning and end, unless it is long.
pub(super) const LEAST_PAGES: u64 = 4096;
const LONG_US: u64 = 500_000;

/// Recent sending rate, in bytes of the guest's memory and disks per second, once it is known.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SendingRate(Option<u64>);

impl SendingRate {
    /// Learns from `pages` sent pages. The destination had `there` of them already, or an earlier version of them:
    /// pages that the guest writes now will have to be sent in full.
    pub(super) fn learn(&mut self, pages: u64, there: u64, duration_us: u64) {
        let pages = pages.saturating_sub(there);
        // If the destination had most of the pages, the duration allows no conclusion about the rest.
        let is_conclusive = pages >= LEAST_PAGES || (pages > 0 && duration_us >= LONG_US);
        if is_conclusive && pages >= there {
            let rate = pages.saturating_mul(PAGE_BYTES).saturating_mul(1_000_000) / duration_us.max(1);
            self.0 = Some(rate);
        }
    }

    pub(super) fn bytes_per_s(self) -> Option<u64> {
        self.0
    }
}
