//! Blocks that are written to before the guest runs, and in which pages are placed from then on.
//!
//! The streams continue, and so do the blocks that they write to: only the writers behind these blocks change.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::ram::{BlockWriter, DiscardMethod, RamError};

/// Switch between two writers of each block. No frame may be in flight to the blocks at that moment.
#[derive(Clone, Default)]
pub struct WriterSwitch(Arc<OnceLock<Vec<Box<dyn BlockWriter>>>>);

struct SwitchedWriter {
    first: Box<dyn BlockWriter>,
    then: WriterSwitch,
    block: usize,
}

impl WriterSwitch {
    /// Wraps the blocks that are used until the switch.
    pub fn before(&self, first: Vec<Box<dyn BlockWriter>>) -> Vec<Box<dyn BlockWriter>> {
        let switched =
            |(block, first)| Box::new(SwitchedWriter { first, then: self.clone(), block }) as Box<_>;
        first.into_iter().enumerate().map(switched).collect()
    }

    /// Directs all later writes to these blocks. A second call has no effect.
    pub fn switch(&self, to: Vec<Box<dyn BlockWriter>>) {
        drop(self.0.set(to));
    }

    /// Returns true after the switch.
    pub fn is_switched(&self) -> bool {
        self.0.get().is_some()
    }
}

impl SwitchedWriter {
    fn now(&self) -> &dyn BlockWriter {
        let then = self.then.0.get().and_then(|blocks| blocks.get(self.block));
        &**then.unwrap_or(&self.first)
    }
}

impl BlockWriter for SwitchedWriter {
    fn name(&self) -> &str {
        self.first.name()
    }

    fn bytes(&self) -> u64 {
        self.first.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        self.now().read(offset, into)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        self.now().write(offset, data)
    }

    fn write_runs(&self, runs: &[Range<u64>], data: &[u8]) -> Result<(), RamError> {
        self.now().write_runs(runs, data)
    }

    /// After the switch pages are placed one by one, so that threads that wait for them go on.
    fn allow_direct_placement(&self, range: Range<u64>) -> bool {
        !self.then.is_switched() && self.first.allow_direct_placement(range)
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        self.now().drop_pages(range)
    }

    fn discard_method(&self) -> DiscardMethod {
        self.first.discard_method()
    }

    fn discard_range(&self, range: Range<u64>) -> Result<(), RamError> {
        self.first.discard_range(range)
    }

    fn is_preallocated(&self) -> bool {
        self.first.is_preallocated()
    }

    fn mapped_ranges(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, RamError> {
        self.first.mapped_ranges(range)
    }

    fn first_mapped(&self, range: Range<u64>) -> Result<Option<u64>, RamError> {
        self.first.first_mapped(range)
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        self.now().take_discardable()
    }
}
