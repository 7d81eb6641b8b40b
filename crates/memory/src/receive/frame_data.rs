//! Data of a frame, taken by its runs one after another.

/// Position in a frame's data. Data that runs have passed stays together until it is taken, so that one call writes it.
#[derive(Debug)]
pub(super) struct FrameData<'a> {
    data: &'a [u8],
    /// Begin of the passed data that was not taken yet, in bytes.
    passed: usize,
    /// Begin of the next run's data, in bytes.
    next: usize,
}

impl<'a> FrameData<'a> {
    /// Begins with the data of the first run.
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self { data, passed: 0, next: 0 }
    }

    /// Passes the data of a run, which [`take_passed`](Self::take_passed) returns.
    pub(super) fn pass(&mut self, bytes: usize) {
        self.next += bytes;
    }

    /// Takes the data that was passed since the last call. It precedes that of the next run.
    pub(super) fn take_passed(&mut self) -> &'a [u8] {
        let passed = &self.data[self.passed..self.next];
        self.passed = self.next;
        passed
    }

    /// Takes the data of a run. Passed data has to be taken before.
    pub(super) fn take(&mut self, bytes: usize) -> &'a [u8] {
        debug_assert_eq!(self.passed, self.next, "passed data would be taken by this run");
        self.pass(bytes);
        self.take_passed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_taken_once_and_in_order() {
        let bytes: Vec<u8> = (0..10).collect();
        let mut data = FrameData::new(&bytes);
        data.pass(2);
        data.pass(3);
        assert_eq!(data.take_passed(), [0, 1, 2, 3, 4]);
        assert!(data.take_passed().is_empty());
        assert_eq!(data.take(2), [5, 6]);
        data.pass(3);
        assert_eq!(data.take_passed(), [7, 8, 9]);
    }
}
