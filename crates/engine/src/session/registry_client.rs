use std::time::Duration;

use proto::message::RegistryRequest;

use super::time::Time;
use crate::handover::registry::RegistryAnswer;

/// One driver's requests to the registry: one at a time, so that a registry that does not answer does not accumulate
/// threads. A request in between waits; a later one replaces it, because the state machine repeats the requests that it
/// needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryClient {
    is_busy: bool,
    waiting: Option<RegistryRequest>,
    silent_since: Option<Time>,
}

impl RegistryClient {
    /// Accepts a driver's request. Returns it if it can be sent now.
    pub fn submit(&mut self, request: RegistryRequest) -> Option<RegistryRequest> {
        if self.is_busy {
            self.waiting = Some(request);
            return None;
        }
        self.is_busy = true;
        Some(request)
    }

    /// Records the answer, and returns the time for which the registry has not answered.
    pub fn record_answer(&mut self, answer: &RegistryAnswer, now: Time) -> Duration {
        if matches!(answer, RegistryAnswer::Record(_)) {
            self.silent_since = None;
            return Duration::ZERO;
        }
        now.since(*self.silent_since.get_or_insert(now))
    }

    /// Records that the answer has arrived. Returns the request that has waited, if there is one, which is to be sent
    /// now.
    pub fn answered(&mut self) -> Option<RegistryRequest> {
        self.is_busy = false;
        self.waiting.take().and_then(|request| self.submit(request))
    }
}

#[cfg(test)]
mod tests {
    use proto::VmName;

    use super::*;

    #[test]
    fn one_question_at_a_time_and_the_latest_waits() {
        let ask = |vm: &str| RegistryRequest::Read { vm: VmName::new(vm).unwrap() };
        let mut client = RegistryClient::default();
        assert_eq!(client.submit(ask("one")), Some(ask("one")));
        assert_eq!(client.submit(ask("two")), None);
        assert_eq!(client.submit(ask("three")), None);
        assert_eq!(client.answered(), Some(ask("three")));
        assert_eq!(client.answered(), None);
        assert_eq!(client.submit(ask("four")), Some(ask("four")));
    }

    #[test]
    fn silence_lasts_from_the_first_failure_to_an_answer() {
        let mut client = RegistryClient::default();
        let mut silence_s = |answer, at_s| {
            let now = Time::since_origin(Duration::from_secs(at_s));
            client.record_answer(&answer, now).as_secs()
        };
        assert_eq!(silence_s(RegistryAnswer::Unreachable, 3), 0);
        assert_eq!(silence_s(RegistryAnswer::Unknown, 5), 2);
        assert_eq!(silence_s(RegistryAnswer::Unreachable, 9), 6);
        assert_eq!(silence_s(RegistryAnswer::Record(None), 10), 0);
        assert_eq!(silence_s(RegistryAnswer::Unreachable, 20), 0);
        assert_eq!(silence_s(RegistryAnswer::Unreachable, 21), 1);
    }
}
