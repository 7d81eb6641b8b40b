//! Members that do a run together: threads of this process, and those of the peer if there is one.
//!
//! The work is divided into parts, one a member, numbered through both processes. Data that several members need goes
//! between them in messages, inside a process by passing memory. Each collective operation must be called by all
//! members, in the same order; that also keeps them in step.
//!
//! When a member ends early, or the peer does, each member that waits for it fails with [`ExchangeError::Gone`], and so
//! on until all have ended: no member waits for ever.

use std::ops::Range;
use std::panic;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, ScopedJoinHandle};

use crate::exchange::{Element, ExchangeError, Peer};

/// The most parts into which work is divided: the smallest problem of MG has no more parts.
pub const MAX_PARTS: usize = 16;

/// A message. Several members may receive the same one.
type Message<E> = Arc<Vec<E>>;

/// A member's view of its team.
#[derive(Debug)]
pub struct Member<'a, E> {
    part: usize,
    parts: usize,
    /// The members of this process.
    local: Range<usize>,
    /// Channels to each member of this process.
    outboxes: Vec<Sender<Message<E>>>,
    /// Channels from each member of both processes.
    inboxes: Vec<Receiver<Message<E>>>,
    peer: Option<&'a Peer>,
}

/// Runs `work` on `threads` threads at once, each as a member of one team, and returns the result of the first of them.
/// The peer must do the same, with as many threads.
pub fn run<E: Element, R: Send>(
    threads: usize,
    peer: Option<&Peer>,
    work: impl Fn(&Member<'_, E>) -> Result<R, ExchangeError> + Sync,
) -> Result<R, ExchangeError> {
    let (rank, ranks) = peer.map_or((0, 1), |peer| (peer.rank(), 2));
    let parts = ranks * threads;
    let local = rank * threads..(rank + 1) * threads;

    // A channel from every member to each one here.
    let mut senders: Vec<Vec<Sender<Message<E>>>> = vec![Vec::new(); parts];
    let mut inboxes: Vec<Vec<Receiver<Message<E>>>> = Vec::new();
    for _ in local.clone() {
        let (into, out_of): (Vec<_>, Vec<_>) = (0..parts).map(|_| mpsc::channel()).unzip();
        senders.iter_mut().zip(into).for_each(|(senders, sender)| senders.push(sender));
        inboxes.push(out_of);
    }
    let outboxes: Vec<_> = senders.drain(local.clone()).collect();
    // The remaining senders are for the peer's members.
    let remote = Remote { senders, first: (1 - rank) * threads, first_here: local.start };

    thread::scope(|scope| {
        let work = &work;
        let members = local.clone().zip(outboxes).zip(inboxes).map(|((part, outboxes), inboxes)| {
            let member = Member { part, parts, local: local.clone(), outboxes, inboxes, peer };
            // The member is dropped when its work ends: so the others detect its end.
            scope.spawn(move || work(&member))
        });
        let members: Vec<_> = members.collect();
        let receiving = peer.map(|peer| {
            scope.spawn(move || peer.receive(|from, to, elements| remote.deliver(from, to, elements)))
        });
        let results: Vec<_> = members.into_iter().map(ScopedJoinHandle::join).collect();
        if let Some(peer) = peer {
            peer.finish();
        }
        let received = receiving.map(ScopedJoinHandle::join).map_or(Ok(()), unwound);
        let mut results = results
            .into_iter()
            .map(unwound)
            .collect::<Result<Vec<_>, _>>()
            // The network's error has more information than the end of a member.
            .map_err(|error| received.err().unwrap_or(error))?;
        Ok(results.swap_remove(0))
    })
}

/// Continues a panic of a thread in the one that waited for it.
fn unwound<R>(joined: thread::Result<R>) -> R {
    joined.unwrap_or_else(|panicked| panic::resume_unwind(panicked))
}

/// Senders that stand for the peer's members.
struct Remote<E> {
    /// Channels by sender, then by receiver.
    senders: Vec<Vec<Sender<Message<E>>>>,
    /// The peer's first part.
    first: usize,
    /// The first part of this process.
    first_here: usize,
}

impl<E> Remote<E> {
    fn deliver(&self, from: usize, to: usize, elements: Vec<E>) -> Result<(), ExchangeError> {
        let senders = from.checked_sub(self.first).and_then(|from| self.senders.get(from));
        let sender = senders.and_then(|senders| senders.get(to.checked_sub(self.first_here)?));
        let sender =
            sender.ok_or(ExchangeError::Malformed("a message between members that are not there"))?;
        sender.send(Arc::new(elements)).map_err(|_| ExchangeError::Gone)
    }
}

impl<E: Element> Member<'_, E> {
    /// Returns the number of its own part of the work.
    pub fn part(&self) -> usize {
        self.part
    }

    /// Returns the number of parts into which the work is divided.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Returns true for the member that acts for its process.
    pub fn is_leader(&self) -> bool {
        self.part == self.local.start
    }

    /// Returns its own part of `0..total`.
    pub fn range(&self, total: usize) -> Range<usize> {
        self.range_of(self.part, total)
    }

    /// Returns a member's part of `0..total`. The parts follow each other and differ by one at most.
    pub fn range_of(&self, part: usize, total: usize) -> Range<usize> {
        total * part / self.parts..total * (part + 1) / self.parts
    }

    /// Returns the sum of all members' values, place by place, in the order of the parts: the same bits for all.
    pub fn sum<const N: usize>(&self, own: [E; N]) -> Result<[E; N], ExchangeError> {
        let sum = self.collect(own.into(), |sum, more| {
            sum.truncate(more.len());
            sum.iter_mut().zip(more).for_each(|(sum, &more)| *sum = *sum + more);
        })?;
        sum.as_slice().try_into().map_err(|_| ExchangeError::Malformed("a sum of other things"))
    }

    /// Returns the members' pieces of one array, in the order of the parts; `total` is its length.
    pub fn gather(&self, own: Vec<E>, total: usize) -> Result<Arc<Vec<E>>, ExchangeError> {
        let whole = self.collect(own, Vec::extend_from_slice)?;
        if whole.len() == total {
            Ok(whole)
        } else {
            Err(ExchangeError::Malformed("too much or too little of an array"))
        }
    }

    /// Sends each member its block and receives one from each, both in the order of the parts.
    pub fn trade(&self, blocks: Vec<Vec<E>>) -> Result<Vec<Vec<E>>, ExchangeError> {
        for (part, block) in blocks.into_iter().enumerate() {
            self.send(part, Arc::new(block))?;
        }
        (0..self.parts).map(|part| self.receive(part).map(Arc::unwrap_or_clone)).collect()
    }

    /// Exchanges data in a ring of the members. Sends `first` to the one before and `last` to the one after; receives
    /// the last of the one before and the first of the one after. All are of the same length.
    pub fn ring(&self, first: &[E], last: &[E]) -> Result<[Arc<Vec<E>>; 2], ExchangeError> {
        let before = (self.part + self.parts - 1) % self.parts;
        let after = (self.part + 1) % self.parts;
        self.send(before, Arc::new(first.to_vec()))?;
        self.send(after, Arc::new(last.to_vec()))?;
        // Both neighbours may be the same member, which has sent its first one first.
        let from_after = self.receive(after)?;
        let from_before = self.receive(before)?;
        if from_before.len() != last.len() || from_after.len() != first.len() {
            return Err(ExchangeError::Malformed("too much or too little of a border"));
        }
        Ok([from_before, from_after])
    }

    /// Joins the data of all members. Inside a process the leader does it for all; the leaders of two processes trade
    /// their halves, so that each half crosses once.
    fn collect(&self, own: Vec<E>, join: impl Fn(&mut Vec<E>, &[E])) -> Result<Message<E>, ExchangeError> {
        let leader = self.local.start;
        if self.part != leader {
            self.send(leader, Arc::new(own))?;
            return self.receive(leader);
        }
        let others = leader + 1..self.local.end;
        let mut half = own;
        for part in others.clone() {
            join(&mut half, &self.receive(part)?);
        }
        let mut all = Arc::new(half);
        if self.peer.is_some() {
            let other_leader = if leader == 0 { self.local.end } else { 0 };
            self.send(other_leader, Arc::clone(&all))?;
            let theirs = self.receive(other_leader)?;
            let (first, second) = if leader == 0 { (all, theirs) } else { (theirs, all) };
            let mut both = Arc::unwrap_or_clone(first);
            join(&mut both, &second);
            all = Arc::new(both);
        }
        for part in others {
            self.send(part, Arc::clone(&all))?;
        }
        Ok(all)
    }

    fn send(&self, to: usize, message: Message<E>) -> Result<(), ExchangeError> {
        match (to.checked_sub(self.local.start).and_then(|to| self.outboxes.get(to)), self.peer) {
            (Some(outbox), _) => outbox.send(message).map_err(|_| ExchangeError::Gone),
            (None, Some(peer)) => peer.send(self.part, to, &message),
            (None, None) => Err(ExchangeError::Gone),
        }
    }

    fn receive(&self, from: usize) -> Result<Message<E>, ExchangeError> {
        self.inboxes[from].recv().map_err(|_| ExchangeError::Gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::tests::pair;

    /// Does the same in one process and in two, and returns each result.
    fn everywhere<R: Send>(
        threads: usize,
        work: impl Fn(&Member<'_, u32>) -> Result<R, ExchangeError> + Sync,
    ) -> [Result<R, ExchangeError>; 3] {
        let [one, other] = pair();
        thread::scope(|scope| {
            let there = scope.spawn(|| run(threads, Some(&other), &work));
            [run(threads, Some(&one), &work), there.join().unwrap(), run(2 * threads, None, &work)]
        })
    }

    #[test]
    fn all_members_come_to_the_same_sum_and_the_same_array() {
        let work = |member: &Member<'_, u32>| {
            let part = member.part() as u32;
            assert_eq!(member.sum([part, 1])?, [15, 6]);
            let own: Vec<u32> = member.range(100).map(|n| n as u32).collect();
            assert_eq!(*member.gather(own, 100)?, (0..100).collect::<Vec<u32>>());
            assert_eq!(member.sum([1; 3])?, [6; 3]);
            Ok(())
        };
        assert!(everywhere(3, work).iter().all(Result::is_ok));
    }

    #[test]
    fn blocks_and_borders_go_where_they_belong() {
        let work = |member: &Member<'_, u32>| {
            let (part, parts) = (member.part() as u32, member.parts() as u32);
            let blocks = (0..parts).map(|to| vec![part, to]).collect();
            let expected: Vec<_> = (0..parts).map(|from| vec![from, part]).collect();
            assert_eq!(member.trade(blocks)?, expected);
            let [before, after] = member.ring(&[part, 0], &[part, 1])?;
            assert_eq!((before[0], before[1]), ((part + parts - 1) % parts, 1));
            assert_eq!((after[0], after[1]), ((part + 1) % parts, 0));
            Ok(())
        };
        assert!(everywhere(1, work).iter().all(Result::is_ok));
        assert!(everywhere(2, work).iter().all(Result::is_ok));
    }

    #[test]
    fn nobody_waits_for_a_member_that_has_gone() {
        let work = |member: &Member<'_, u32>| {
            if member.part() == 1 {
                return Err(ExchangeError::Malformed("nothing, in this test"));
            }
            member.sum([1]).map(|_| ())
        };
        assert!(everywhere(2, work).iter().all(Result::is_err));
    }

    #[test]
    fn an_array_of_another_length_is_an_error() {
        let work = |member: &Member<'_, u32>| member.gather(vec![1, 2], 5).map(|_| ());
        assert!(everywhere(1, work).iter().all(|end| matches!(end, Err(ExchangeError::Malformed(_)))));
    }

    #[test]
    fn a_message_for_nobody_is_an_error() {
        let remote: Remote<u32> = Remote { senders: vec![vec![mpsc::channel().0]], first: 1, first_here: 0 };
        for (from, to) in [(0, 0), (2, 0), (1, 1)] {
            assert!(
                matches!(remote.deliver(from, to, vec![]), Err(ExchangeError::Malformed(_))),
                "{from} {to}"
            );
        }
    }
}
