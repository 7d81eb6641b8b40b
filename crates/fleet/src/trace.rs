//! Traces: text with one value a line, or one VM a line. Errors name the line.

mod error;
mod gaps;
pub mod open;
mod planetlab;
mod requests;

pub use error::{LineError, TraceError};
pub use planetlab::{Day, STEPS_PER_DAY, read_days};
pub use requests::{RequestTrace, segments_between};
