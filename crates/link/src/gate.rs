//! Limit on the number of connections that are in their handshake at once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Counting semaphore for handshakes, of which at most half may come from one address: clients that open connections
/// and send nothing do not keep the others out.
#[derive(Debug)]
pub(crate) struct Gate {
    inside: Mutex<GateState>,
    changed: Condvar,
    share: usize,
}

#[derive(Debug)]
struct GateState {
    /// Free slots; None when closed.
    free: Option<usize>,
    by_address: HashMap<IpAddr, usize>,
}

/// A slot that is released when dropped.
pub(crate) struct HandshakeSlot {
    gate: Arc<Gate>,
    address: Option<IpAddr>,
}

impl Gate {
    pub(crate) fn new(places: usize) -> Self {
        let inside = GateState { free: Some(places.max(1)), by_address: HashMap::new() };
        Self { inside: Mutex::new(inside), changed: Condvar::new(), share: places.div_ceil(2).max(1) }
    }

    fn inside(&self) -> MutexGuard<'_, GateState> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a slot; None when the gate is closed.
    pub(crate) fn acquire(gate: &Arc<Self>) -> Option<HandshakeSlot> {
        let mut inside = gate.inside();
        loop {
            match inside.free {
                None => return None,
                Some(0) => inside = gate.changed.wait(inside).unwrap_or_else(PoisonError::into_inner),
                Some(places) => {
                    inside.free = Some(places - 1);
                    return Some(HandshakeSlot { gate: Arc::clone(gate), address: None });
                }
            }
        }
    }

    pub(crate) fn close(&self) {
        self.inside().free = None;
        self.changed.notify_all();
    }
}

impl HandshakeSlot {
    /// Records the client's address. False if too many of that address are inside.
    pub(crate) fn assign_address(&mut self, address: IpAddr) -> bool {
        let mut inside = self.gate.inside();
        let count = inside.by_address.entry(address).or_default();
        let admitted = *count < self.gate.share;
        if admitted {
            *count += 1;
            self.address = Some(address);
        }
        admitted
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        let mut inside = self.gate.inside();
        if let Some(places) = inside.free.as_mut() {
            *places += 1;
        }
        if let Some(address) = self.address
            && let Some(count) = inside.by_address.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                inside.by_address.remove(&address);
            }
        }
        drop(inside);
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_gets_half_of_the_places() {
        let gate = Arc::new(Gate::new(4));
        let [noisy, other] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let mut inside = Vec::new();
        for _ in 0..2 {
            let mut slot = Gate::acquire(&gate).unwrap();
            assert!(slot.assign_address(noisy));
            inside.push(slot);
        }
        let mut surplus = Gate::acquire(&gate).unwrap();
        assert!(!surplus.assign_address(noisy));
        drop(surplus);
        let mut slot = Gate::acquire(&gate).unwrap();
        assert!(slot.assign_address(other));
        inside.clear();
        let mut readmitted = Gate::acquire(&gate).unwrap();
        assert!(readmitted.assign_address(noisy));
        drop((readmitted, slot));
        assert!(gate.inside().by_address.is_empty());
        gate.close();
        assert!(Gate::acquire(&gate).is_none());
    }
}
