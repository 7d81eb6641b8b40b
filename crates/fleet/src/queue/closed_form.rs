//! Waits of the M/M/k queue in closed form (Kleinrock 1975, section 3.5).

/// M/M/k queue: Poisson arrivals, exponential service, `servers` servers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mmk {
    /// Number of servers.
    pub servers: u32,
    /// Arrivals per second.
    pub arrivals_per_s: f64,
    /// Mean time of service, in seconds.
    pub service_s: f64,
}

impl Mmk {
    /// Returns the share of time for which a server is busy.
    pub fn load(&self) -> f64 {
        self.offered() / f64::from(self.servers)
    }

    /// Returns the probability that a request waits (Erlang's C).
    pub fn wait_probability(&self) -> f64 {
        // Erlang's B by its recursion, which needs no factorials.
        let blocked = (1..=self.servers).fold(1.0, |blocked, servers| {
            let product = self.offered() * blocked;
            product / (f64::from(servers) + product)
        });
        blocked / (1.0 - self.load() * (1.0 - blocked))
    }

    /// Returns the mean wait before service, in seconds.
    pub fn mean_wait_s(&self) -> f64 {
        self.wait_probability() / self.drain_rate()
    }

    /// Returns the probability that a request waits for longer than `wait_s`.
    pub fn wait_exceeds(&self, wait_s: f64) -> f64 {
        self.wait_probability() * (-self.drain_rate() * wait_s).exp()
    }

    /// Mean number of busy servers.
    fn offered(&self) -> f64 {
        self.arrivals_per_s * self.service_s
    }

    /// Rate at which a queue with all servers busy becomes shorter, per second.
    fn drain_rate(&self) -> f64 {
        f64::from(self.servers) / self.service_s - self.arrivals_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With one server the probability to wait is the load, and the mean wait is load × service ÷ (1 − load).
    #[test]
    fn one_server_is_mm1() {
        let queue = Mmk { servers: 1, arrivals_per_s: 8.0, service_s: 0.1 };
        assert!((queue.wait_probability() - 0.8).abs() < 1e-12);
        assert!((queue.mean_wait_s() - 0.4).abs() < 1e-12);
    }

    /// Erlang's C for two servers: 2ρ² ÷ (1 + ρ).
    #[test]
    fn two_servers_are_as_in_the_books() {
        let queue = Mmk { servers: 2, arrivals_per_s: 15.0, service_s: 0.1 };
        assert!((queue.wait_probability() - 2.0 * 0.75_f64.powi(2) / 1.75).abs() < 1e-12);
    }
}
