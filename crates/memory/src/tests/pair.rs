//! A source and a destination, for rounds one by one.

use std::sync::{Arc, Mutex};

use proto::Generation;

use super::fake_ram::{FakeRam, Page};
use super::fake_wire::{WHOLE, connection};
use super::parts::Parts;
use super::references::{FakeTemplates, referring};
use crate::reductions::deltas::tests::PAGE_SEED;
use crate::{
    AcceptedReductions, CompletedRound, ContentIndex, OwedPages, Receiver, RoundStats, Sender, Templates,
};

/// A source, a destination with one template, and one stream between them.
pub(super) struct Pair {
    pub(super) source: FakeRam,
    pub(super) destination: FakeRam,
    _receiver: Receiver,
    pub(super) sender: Sender,
}

impl Pair {
    pub(super) fn referring(source: FakeRam, known: ContentIndex, template: Vec<Page>) -> Self {
        Self::new(source, &referring(Arc::new(known)), template)
    }

    pub(super) fn new(source: FakeRam, saving: &Parts, template: Vec<Page>) -> Self {
        let pages: Vec<u64> = source.0.iter().map(|block| block.pages.len() as u64).collect();
        let destination = FakeRam::new(&pages);
        let templates = Some(Arc::new(FakeTemplates(vec![Mutex::new(template)])) as Arc<dyn Templates>);
        let presumed = AcceptedReductions { templates, delta_seed: Some(PAGE_SEED) };
        let mut receiver = Receiver::with_reductions(destination.writers(), presumed, 1, |_, _| {});
        receiver.begin(Generation(1));
        let (near, far) = connection(WHOLE, WHOLE);
        receiver.attach(Generation(1), 0, far).unwrap();
        let sender = Sender::with_reductions(source.readers(), saving.reductions(), vec![near]).unwrap();
        Self { source, destination, _receiver: receiver, sender }
    }

    /// Runs a round of the pages owed and those written since.
    pub(super) fn round(self, owed: OwedPages) -> (Self, OwedPages, RoundStats) {
        let readable = owed.clear_marks(&mut self.source.log()).unwrap().skip_drain();
        let CompletedRound { sender, owed, stats } = self.sender.send_round(readable).unwrap();
        (Self { sender, ..self }, owed, stats)
    }

    pub(super) fn is_equal(&self) -> bool {
        self.source.first_difference(&self.destination).is_none()
    }
}
