//! The record of what was tried: `make rack` writes docs/tried-on.md from it.

use std::cell::RefCell;

use lab::rack::Rack;
use lab::rack::tried::Row;

/// A test under way. It counts as failed unless [`Trial::works`] is reached.
pub(crate) struct Trial(RefCell<Row>);

impl Trial {
    /// Begins, for a guest on KVM whose network card the kernel serves, without disks.
    #[track_caller]
    pub(crate) fn begin(rack: &Rack, subject: &str) -> Self {
        Self(RefCell::new(Row::new(rack, subject).unwrap()))
    }

    /// Sets the storage of the guest's disk.
    pub(crate) fn storage(self, storage: &str) -> Self {
        storage.clone_into(&mut self.0.borrow_mut().storage);
        self
    }

    /// Sets what was measured or seen beside the result.
    pub(crate) fn notes(&self, notes: &str) {
        notes.clone_into(&mut self.0.borrow_mut().notes);
    }

    /// Ends it with success.
    pub(crate) fn works(&self) {
        self.0.borrow_mut().works = true;
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let row = self.0.borrow();
        // A record that cannot be written is missed by whoever reads the page; the test's result is what counts.
        if let Err(error) = row.record() {
            eprintln!("the result of {} could not be recorded: {error}", row.subject);
        }
    }
}
