//! Servers and their common queue, exact at every event.

use std::collections::VecDeque;

/// Receiver of the simulation's results.
pub trait Observer {
    /// Records a request at the moment when its service begins: the time that it waited, and the time that its service
    /// lasts, in seconds.
    fn record(&mut self, wait_s: f64, service_s: f64);
}

/// Servers with one queue: first come, first served.
///
/// A request that waits is not bound to a server before one is free, so that servers that are added take waiting
/// requests at once. A server that is removed ends the request that it serves.
#[derive(Clone, Debug, Default)]
pub struct ServerBank {
    /// Ends of the services under way; the earliest is the last.
    busy_until: Vec<f64>,
    idle: usize,
    /// Busy servers that are switched off when they are free: the first ones that become free.
    leaving: usize,
    /// Arrival and duration of service of the requests that wait.
    waiting: VecDeque<(f64, f64)>,
}

impl ServerBank {
    /// Returns a bank of idle servers.
    pub fn new(servers: usize) -> Self {
        Self { busy_until: Vec::with_capacity(servers + 1), idle: servers, ..Self::default() }
    }

    /// Returns the number of servers that are to serve further requests.
    pub fn servers(&self) -> usize {
        self.idle + self.busy_until.len() - self.leaving
    }

    /// Accepts a request at `now` that needs a service of `service_s`.
    ///
    /// Calls of all methods have times that never fall.
    #[inline]
    pub fn arrive(&mut self, now: f64, service_s: f64, observer: &mut impl Observer) {
        self.advance(now, observer);
        if self.idle > 0 {
            self.idle -= 1;
            self.serve(now, now, service_s, observer);
        } else {
            self.waiting.push_back((now, service_s));
        }
    }

    /// Changes the number of servers at `now`.
    pub fn set_servers(&mut self, now: f64, servers: usize, observer: &mut impl Observer) {
        self.advance(now, observer);
        while self.servers() > servers {
            if self.idle > 0 {
                self.idle -= 1;
            } else {
                self.leaving += 1;
            }
        }
        while self.servers() < servers {
            if self.leaving > 0 {
                self.leaving -= 1;
            } else if let Some((arrival, service_s)) = self.waiting.pop_front() {
                self.serve(now, arrival, service_s, observer);
            } else {
                self.idle += 1;
            }
        }
    }

    /// Carries out all ends of services up to `now`.
    #[inline]
    pub fn advance(&mut self, now: f64, observer: &mut impl Observer) {
        while let Some(end) = self.busy_until.last().copied().filter(|end| *end <= now) {
            self.busy_until.pop();
            if self.leaving > 0 {
                self.leaving -= 1;
            } else if let Some((arrival, service_s)) = self.waiting.pop_front() {
                self.serve(end, arrival, service_s, observer);
            } else {
                self.idle += 1;
            }
        }
    }

    #[inline]
    fn serve(&mut self, start: f64, arrival: f64, service_s: f64, observer: &mut impl Observer) {
        observer.record(start - arrival, service_s);
        let end = start + service_s;
        let at = self.busy_until.iter().rposition(|other| *other >= end).map_or(0, |before| before + 1);
        self.busy_until.insert(at, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Observer for Vec<(f64, f64)> {
        fn record(&mut self, wait_s: f64, service_s: f64) {
            self.push((wait_s, service_s));
        }
    }

    #[test]
    fn requests_are_served_in_the_order_of_arrival() {
        let (mut bank, mut seen) = (ServerBank::new(2), Vec::new());
        for (at, service) in [(0.0, 10.0), (1.0, 2.0), (1.5, 4.0), (2.0, 1.0)] {
            bank.arrive(at, service, &mut seen);
        }
        bank.advance(100.0, &mut seen);
        assert_eq!(seen, [(0.0, 10.0), (0.0, 2.0), (1.5, 4.0), (5.0, 1.0)]);
    }

    /// Two requests wait for one server; a second server takes the first of them at the moment when it is added.
    #[test]
    fn an_added_server_takes_a_waiting_request() {
        let (mut bank, mut seen) = (ServerBank::new(1), Vec::new());
        for at in [0.0, 1.0, 2.0] {
            bank.arrive(at, 10.0, &mut seen);
        }
        bank.set_servers(3.0, 2, &mut seen);
        bank.advance(100.0, &mut seen);
        assert_eq!(seen, [(0.0, 10.0), (2.0, 10.0), (8.0, 10.0)]);
    }

    /// One of two busy servers is removed: the first that ends its request leaves, and the waiting request gets the
    /// other.
    #[test]
    fn a_removed_server_ends_its_request() {
        let (mut bank, mut seen) = (ServerBank::new(2), Vec::new());
        for (at, service) in [(0.0, 5.0), (0.0, 7.0), (1.0, 1.0)] {
            bank.arrive(at, service, &mut seen);
        }
        bank.set_servers(2.0, 1, &mut seen);
        assert_eq!(bank.servers(), 1);
        bank.advance(100.0, &mut seen);
        assert_eq!(seen, [(0.0, 5.0), (0.0, 7.0), (6.0, 1.0)]);
        assert_eq!(bank.servers(), 1);
    }

    #[test]
    fn a_server_that_was_to_leave_can_stay() {
        let (mut bank, mut seen) = (ServerBank::new(2), Vec::new());
        bank.arrive(0.0, 5.0, &mut seen);
        bank.arrive(0.0, 5.0, &mut seen);
        bank.set_servers(1.0, 1, &mut seen);
        bank.set_servers(2.0, 2, &mut seen);
        bank.advance(10.0, &mut seen);
        assert_eq!((bank.servers(), bank.idle), (2, 2));
    }
}
