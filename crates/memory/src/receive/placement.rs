//! Data that the transport places into memory by itself.

use link::transport::Part;
use proto::pages::{Content, PageRun};

use crate::ram::BlockWriter;

/// Place to which a frame belongs.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    /// Its block.
    pub(super) writer: &'a dyn BlockWriter,
    /// Start of its chunk in the block, in bytes.
    pub(super) base: u64,
}

/// Placement of the data of one frame. Reused.
#[derive(Debug, Default)]
pub(super) struct Placement {
    /// Layout of the frame's data.
    pub(super) layout: Vec<Part>,
    /// Data that is not placed.
    pub(super) bytes: Vec<u8>,
}

impl Placement {
    /// Plans the placement of a frame's data, as far as the block allows it. Keeps the runs that the data plane
    /// applies: all but those of placed data.
    pub(super) fn plan(&mut self, target: Target<'_>, region: u16, runs: &mut Vec<PageRun>) {
        self.layout.clear();
        self.bytes.clear();
        runs.retain(|run| {
            let start = target.base + run.offset_bytes();
            let range = start..start + run.len_bytes();
            if run.content == Content::Data && target.writer.allow_direct_placement(range.clone()) {
                self.layout.push(Part::Memory { region, bytes: range });
                return false;
            }
            match (self.layout.last_mut(), run.data_bytes()) {
                (_, 0) => {}
                (Some(Part::Bytes(last)), bytes) => *last += bytes,
                (_, bytes) => self.layout.push(Part::Bytes(bytes)),
            }
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proto::limits::CHUNK_BYTES;

    use super::*;
    use crate::RamError;

    /// A block that allows the placement of its second chunk.
    struct Half;

    impl BlockWriter for Half {
        fn name(&self) -> &'static str {
            "half"
        }

        fn bytes(&self) -> u64 {
            2 * CHUNK_BYTES
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), RamError> {
            Ok(())
        }

        fn write(&self, _: u64, _: &[u8]) -> Result<(), RamError> {
            Ok(())
        }

        fn allow_direct_placement(&self, range: Range<u64>) -> bool {
            range.start >= CHUNK_BYTES
        }

        fn drop_pages(&self, _: Range<u64>) -> Result<(), RamError> {
            Ok(())
        }

        fn take_discardable(&self) -> Vec<Range<u64>> {
            Vec::new()
        }
    }

    #[test]
    fn only_data_that_the_block_allows_is_placed() {
        let run = |first_page, pages, content| PageRun { first_page, pages, content };
        let all = [
            run(0, 2, Content::Data),
            run(2, 1, Content::Zero),
            run(3, 4, Content::Filled),
            run(7, 1, Content::Filled),
            run(8, 1, Content::Hole),
            run(10, 1, Content::Data),
        ];
        let mut placement = Placement::default();
        let mut runs = all.to_vec();
        placement.plan(Target { writer: &Half, base: 0 }, 5, &mut runs);
        assert_eq!(runs, all);
        assert_eq!(placement.layout, [Part::Bytes(3 * 4096 + 16)]);

        placement.plan(Target { writer: &Half, base: CHUNK_BYTES }, 5, &mut runs);
        let memory = |pages: Range<u64>| {
            let bytes = CHUNK_BYTES + pages.start * 4096..CHUNK_BYTES + pages.end * 4096;
            Part::Memory { region: 5, bytes }
        };
        assert_eq!(placement.layout, [memory(0..2), Part::Bytes(16), memory(10..11)]);
        assert_eq!(runs, all[1..5]);
    }
}
