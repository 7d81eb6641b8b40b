//! What both hosts' drivers exchange about the guest's network.

use std::time::{Duration, Instant};

use proto::message::{CardFrames, Finding, Message, Severity};

use super::SourceDriver;
use super::failure::Failure;
use super::inbox::SourceNotice;

/// Longest wait for the destination's message about first frames, for which the destination itself waits a second.
const FIRST_FRAMES_WAIT: Duration = Duration::from_millis(1500);

impl SourceDriver {
    /// Sends the addresses that the guest has claimed to a destination that announces them. The guest still runs.
    pub(super) fn send_claims(&mut self) -> Result<(), Failure> {
        if !self.agreement.has_network {
            return Ok(());
        }
        match self.resources.participants.network_message() {
            Some(message) => self.send_message(&message),
            None => Ok(()),
        }
    }

    /// Waits for the times of the guest's first frames, which the destination sends after RUNNING. Nothing depends on
    /// them but the report.
    pub(super) fn await_first_frames(&mut self) {
        let is_expected = self.agreement.has_network && self.reporter.stop_clock.measured.total_us > 0;
        let Some(control) = self.connections.control.as_ref().filter(|_| is_expected).map(|it| it.link)
        else {
            return;
        };
        let until = Instant::now() + FIRST_FRAMES_WAIT;
        while let Some(notice) = self.inbox.wait(until) {
            match notice {
                SourceNotice::Message { message: Message::FirstFrames { epoch, cards }, .. }
                    if epoch == self.terms.epoch() =>
                {
                    return self.record_first_frames(cards);
                }
                SourceNotice::Lost { link, .. } if link == control => return,
                // The handover is over: later questions are answered from the journal.
                _ => {}
            }
        }
    }

    /// Records the destination's measurement.
    pub(super) fn record_first_frames(&mut self, cards: Vec<CardFrames>) {
        // They are sent once.
        self.agreement.has_network = false;
        let host = self.terms.destination.clone();
        self.controls.report(|report| {
            report.findings.extend(cards.iter().filter_map(|card| silence(card, host.as_str())));
            report.network = cards;
        });
    }
}

/// Returns a warning about a card that nothing reached.
fn silence(card: &CardFrames, host: &str) -> Option<Finding> {
    if card.first_in_us.is_some() {
        return None;
    }
    let CardFrames { mac, interface, first_out_us, .. } = card;
    let (heard, advice) = if first_out_us.is_some() {
        (
            "the guest sends, and nothing was sent to it",
            "if clients do not reach it, see if the bridge, the VLAN and the switches' ports there are those of the \
             network that it had at the source, and if a firewall or port security keeps its address back",
        )
    } else {
        (
            "the guest sends nothing either",
            "if it is not idle, see if its program runs, and if its interface is up and in the bridge of the network \
             that it had at the source",
        )
    };
    Some(Finding {
        severity: Severity::Warning,
        code: "not-reached".to_owned(),
        what: format!("no frame for {mac} reached {interface} on {host} within a second: {heard}"),
        advice: advice.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_card_that_nothing_reached_is_reported() {
        let card = |first_in_us, first_out_us| CardFrames {
            mac: "52:54:00:00:00:01".to_owned(),
            interface: "tap7".to_owned(),
            first_in_us,
            first_out_us,
        };
        assert_eq!(silence(&card(Some(9), None), "b"), None);
        let finding = silence(&card(None, Some(9)), "b").unwrap();
        assert!(finding.what.contains("reached tap7 on b") && finding.what.contains("the guest sends"));
        assert!(silence(&card(None, None), "b").unwrap().what.contains("sends nothing"));
    }
}
