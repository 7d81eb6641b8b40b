//! A viewer of a film that arrives over the network: frames that are due one after the other at a constant rate.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Time from one frame to the next.
pub(super) const FRAME: Duration = Duration::from_millis(40);
/// Bytes of a frame: a megabyte a second.
pub(super) const FRAME_BYTES: usize = 40_000;
/// Time of the film that a player buffers before it begins to show.
const BUFFER: Duration = Duration::from_secs(2);

/// Observations of a film during the migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FilmReport {
    /// Frames that arrived.
    pub frames: u64,
    /// Frames that arrived later than the next one was due: a viewer without a buffer sees the picture freeze.
    pub late_frames: u64,
    /// The longest time between two frames, ms.
    pub longest_gap_ms: f64,
    /// The longest time between two frames before the migration, ms.
    pub usual_gap_ms: f64,
    /// Times at which a player with a buffer of two seconds ran empty.
    pub underruns: u64,
}

/// Evaluates the arrival times of frames: those of `during`, and the usual gap in `before`.
pub(super) fn judge_film(
    frames: &[Duration],
    before: &Range<Duration>,
    during: &Range<Duration>,
) -> FilmReport {
    let longest_ms = |window: &Range<Duration>| {
        let gaps = frames.windows(2).filter(|pair| pair[1] >= window.start && pair[0] < window.end);
        gaps.map(|pair| pair[1].saturating_sub(pair[0])).max().unwrap_or_default().as_secs_f64() * 1e3
    };
    let is_seen = |at: &&(usize, Duration)| during.contains(&at.1);
    let numbered: Vec<(usize, Duration)> = frames.iter().copied().enumerate().collect();
    let first = frames.first().copied().unwrap_or_default();
    let due = |number: usize| first + FRAME * number as u32;
    let late = numbered.iter().filter(is_seen).filter(|(number, at)| *at > due(number + 1)).count();
    FilmReport {
        frames: numbered.iter().filter(is_seen).count() as u64,
        late_frames: late as u64,
        longest_gap_ms: longest_ms(during),
        usual_gap_ms: longest_ms(before),
        underruns: underruns(&numbered, first + BUFFER, during),
    }
}

/// Counts underruns. A player that has run out of frames begins anew, with a full buffer.
fn underruns(frames: &[(usize, Duration)], shown_from: Duration, during: &Range<Duration>) -> u64 {
    let (mut shown_from, mut underruns) = (shown_from, 0);
    for (number, at) in frames {
        let due = shown_from + FRAME * *number as u32;
        if *at > due {
            shown_from += at.saturating_sub(due) + BUFFER;
            underruns += u64::from(during.contains(at));
        }
    }
    underruns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a hundred frames in time, then a pause, after which all due frames arrive at once, and then a hundred in
    /// time.
    fn film(pause: Duration) -> Vec<Duration> {
        (0..200_u32)
            .map(|number| {
                let due = FRAME * number;
                if number < 100 { due } else { due.max(FRAME * 99 + pause) }
            })
            .collect()
    }

    #[test]
    fn a_pause_is_seen_with_and_without_a_buffer() {
        let (before, during) = (Duration::ZERO..FRAME * 50, FRAME * 50..FRAME * 1000);
        let viewed = judge_film(&film(FRAME), &before, &during);
        assert_eq!((viewed.frames, viewed.late_frames, viewed.underruns), (150, 0, 0));
        assert!((viewed.longest_gap_ms - 40.0).abs() < 1e-9 && (viewed.usual_gap_ms - 40.0).abs() < 1e-9);

        // Frame 100 is due at once after the 99th, and arrives eight frames late.
        let viewed = judge_film(&film(FRAME * 9), &before, &during);
        assert_eq!((viewed.late_frames, viewed.underruns), (7, 0));
        assert!((viewed.longest_gap_ms - 360.0).abs() < 1e-9, "{viewed:?}");

        let viewed = judge_film(&film(Duration::from_secs(3)), &before, &during);
        assert_eq!(viewed.underruns, 1, "it has two seconds in hand");
        assert!((viewed.usual_gap_ms - 40.0).abs() < 1e-9, "{viewed:?}");
        assert_eq!(judge_film(&[], &before, &during), FilmReport::default());
    }
}
