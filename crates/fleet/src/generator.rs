//! A seeded request trace: days of a tournament, second by second.
//!
//! The paper's trace, of the website of the Australian Open, is not public. This one has what makes such a trace hard
//! to follow: a daily cycle, sessions that begin at a set hour, crowds that come within a minute, and finals that
//! exceed all days before. Its parameters were chosen before the first simulation, and were not changed afterwards.
//!
//! | part | value |
//! |---|---|
//! | visitors at rest | 6% of the usual peak at 4:00, 14% at 16:00, a cosine between them |
//! | sessions | 11:00 to 18:00 and 19:00 to 23:00, which add 55% and 70%; they begin and end within 20 minutes |
//! | growth | sessions have 60% of it on the first day, 100% on the last, a straight line between them |
//! | slow chance | the logarithm of the rate wanders with a deviation of 0.12 and a memory of 10 minutes |
//! | crowds | 1.5 an hour in sessions, 0.2 outside; each adds an exponential share, with mean 35%, of the rate; it comes within 20 to 60 s, and leaves with a half-life of 4 minutes |
//! | requests | of each second, a Poisson number of the rate; the usual peak is 200 a second |

use crate::random::Random;

const DAY_S: usize = 86_400;
const PEAK_PER_S: f64 = 200.0;
const AT_REST: (f64, f64) = (0.06, 0.14);
const SESSIONS: [(f64, f64, f64); 2] = [(11.0, 18.0, 0.55), (19.0, 23.0, 0.70)];
const EDGE_H: f64 = 1.0 / 3.0;
const FIRST_DAY: f64 = 0.6;
const WANDER: f64 = 0.12;
const MEMORY_S: f64 = 600.0;
const CROWDS_PER_H: (f64, f64) = (1.5, 0.2);
const CROWD_MEAN: f64 = 0.35;
const CROWD_RISE_S: (f64, f64) = (20.0, 60.0);
const CROWD_HALF_LIFE_S: f64 = 240.0;

/// Most days of a trace.
pub const MOST_DAYS: usize = 60;

/// Crowd that comes and leaves.
struct Crowd {
    began: usize,
    rise_s: f64,
    size: f64,
}

impl Crowd {
    fn share(&self, second: usize) -> f64 {
        let age_s = (second - self.began) as f64;
        if age_s < self.rise_s {
            return self.size * age_s / self.rise_s;
        }
        self.size * (-(age_s - self.rise_s) / CROWD_HALF_LIFE_S).exp2()
    }
}

/// Returns the requests in each second of `days` days of a tournament.
pub fn tournament(days: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    let mut crowds: Vec<Crowd> = Vec::new();
    let (keep, fresh) = ((-1.0 / MEMORY_S).exp(), (1.0 - (-2.0 / MEMORY_S).exp()).sqrt());
    let mut wander = random.normal() * WANDER;
    (0..days * DAY_S)
        .map(|second| {
            wander = wander * keep + random.normal() * WANDER * fresh;
            let (at_rest, session) = visitors(second, days);
            let per_h = if session > 0.0 { CROWDS_PER_H.0 } else { CROWDS_PER_H.1 };
            if random.unit() < per_h / 3600.0 {
                let (low, high) = CROWD_RISE_S;
                let rise_s = low + (high - low) * random.unit();
                crowds.push(Crowd { began: second, rise_s, size: CROWD_MEAN * random.exponential() });
            }
            let share: f64 = crowds.iter().map(|crowd| crowd.share(second)).sum();
            if second % 600 == 0 {
                crowds.retain(|crowd| second - crowd.began < 60 || crowd.share(second) > 0.001);
            }
            random.poisson(PEAK_PER_S * (at_rest + session) * wander.exp() * (1.0 + share))
        })
        .collect()
}

/// Returns the visitors at rest and of sessions, as shares of the usual peak.
fn visitors(second: usize, days: usize) -> (f64, f64) {
    let hour = (second % DAY_S) as f64 / 3600.0;
    let (low, high) = AT_REST;
    let turn = ((hour - 4.0) / 24.0 * std::f64::consts::TAU).cos();
    let at_rest = low + (high - low) * (1.0 - turn) / 2.0;
    let grown = if days > 1 { (second / DAY_S) as f64 / (days - 1) as f64 } else { 1.0 };
    let session: f64 = SESSIONS
        .iter()
        .map(|(from, to, size)| size * ((hour - from) / EDGE_H).min((to - hour) / EDGE_H).clamp(0.0, 1.0))
        .sum();
    (at_rest, session * (FIRST_DAY + (1.0 - FIRST_DAY) * grown))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(counts: &[u32]) -> f64 {
        counts.iter().map(|count| f64::from(*count)).sum::<f64>() / counts.len() as f64
    }

    #[test]
    fn the_same_seed_gives_the_same_trace() {
        assert_eq!(tournament(1, 4), tournament(1, 4));
        assert_ne!(tournament(1, 4), tournament(1, 5));
    }

    #[test]
    fn days_have_nights_sessions_and_growth() {
        let counts = tournament(3, 4);
        let hours = |day: usize, from: usize, to: usize| {
            let at = |hour: usize| day * DAY_S + hour * 3600;
            mean(&counts[at(from)..at(to)])
        };
        for day in 0..3 {
            assert!(hours(day, 3, 5) * 4.0 < hours(day, 12, 17), "day {day}");
            assert!(hours(day, 3, 5) * 4.0 < hours(day, 20, 22), "day {day}");
        }
        assert!(hours(0, 12, 22) * 1.2 < hours(2, 12, 22));
    }
}
