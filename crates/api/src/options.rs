//! Options of a migration, defined once: for requests, the command line, the configuration and the report.
//!
//! An option that is added here is a field of [`MigrationOptions`] (HTTP and, with the feature `cli`, the arguments of
//! `whimbrel migrate`) and of [`MigrationSettings`] (the table `[migration]` of the configuration, and the report).

use serde::{Deserialize, Serialize};

#[cfg(feature = "comparison")]
use crate::choices::Restraints;
use crate::choices::{
    Compress, DeltaUse, HintedMemory, NetworkCheck, OnLimit, StopPolicy, ThrottleCpu, ThrottleWrites,
};
#[cfg(feature = "cli")]
use crate::rate::Rate;

/// Defines both structures from one list: documentation, feature of the builds that have it if not all do, argument of
/// the command line, name, type, default. Values of an option that only some builds have are written only where they
/// are not the default.
macro_rules! options {
    ($(
        $(#[doc = $doc:literal])* $(#[cfg($($cfg:tt)*)])? #[arg($($arg:tt)*)]
        $name:ident: $type:ty = $default:expr;
    )*) => {
        /// Options of a request; those that are absent have the value of the source's configuration.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        #[cfg_attr(feature = "cli", derive(clap::Args))]
        pub struct MigrationOptions {
            $(
                $(#[doc = $doc])*
                $(#[cfg($($cfg)*)])?
                #[serde(skip_serializing_if = "Option::is_none")]
                #[cfg_attr(feature = "cli", arg($($arg)*))]
                pub $name: Option<$type>,
            )*
        }

        /// Values of all options of a migration.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct MigrationSettings {
            $(
                $(#[doc = $doc])*
                $(#[cfg($($cfg)*)] #[serde(skip_serializing_if = "is_default")])?
                pub $name: $type,
            )*
        }

        impl Default for MigrationSettings {
            fn default() -> Self {
                Self { $($(#[cfg($($cfg)*)])? $name: $default,)* }
            }
        }

        impl MigrationSettings {
            /// Returns these values, replaced by those of a request.
            #[must_use]
            pub fn with(&self, options: &MigrationOptions) -> Self {
                Self { $($(#[cfg($($cfg)*)])? $name: options.$name.unwrap_or(self.$name),)* }
            }
        }
    };
}

options! {
    /// Policy for the stop of the VM: `pattern` stops it when more rounds do not shorten the downtime any further,
    /// `hybrid` after one pass over all of memory, and the remaining pages are sent by post-copy: until they have
    /// arrived the VM needs both hosts. `sla`: by rounds, with a CPU throttle, or as `hybrid`, whichever is expected to
    /// keep --max-downtime and --max-total (pattern)
    #[arg(long, value_name = "pattern|hybrid|sla", hide_possible_values = true)]
    policy: StopPolicy = StopPolicy::Pattern;

    /// Longest downtime, in milliseconds (300)
    #[arg(long = "max-downtime", value_name = "MS")]
    max_downtime_ms: u64 = 300;

    /// With the policy `sla`: longest total time; 0 for no limit (0)
    #[arg(long = "max-total", value_name = "SECONDS", value_parser = seconds_in_ms)]
    max_total_ms: u64 = 0;

    /// Maximum number of rounds of pre-copy (30)
    #[arg(long, value_name = "N")]
    max_rounds: u32 = 30;

    /// With the policy `hybrid`: number of passes over the dirty pages before post-copy begins (1)
    #[arg(long, value_name = "N")]
    hybrid_passes: u32 = 1;

    /// Action when the rounds or the time are used up, or rounds make no progress for a while: `abort` leaves the VM at
    /// the source, `stop` stops the VM and sends the rest in any length of time, `post-copy` sends the rest after the
    /// VM has resumed at the destination (abort)
    #[arg(long, value_name = "abort|stop|post-copy", hide_possible_values = true)]
    on_limit: OnLimit = OnLimit::Abort;

    /// Limit on the sending rate: 500M or 512Mi bytes per second, 1.5Gbit, none (none)
    #[arg(long = "bandwidth", value_name = "RATE", value_parser = bytes_per_s)]
    bandwidth_bytes_per_s: u64 = 0;

    /// Number of data streams, 1 to 64 (4)
    #[arg(long, value_name = "N")]
    streams: u16 = 4;

    /// Limit on the VM's writes to disks that are copied: `off` none, `drain` at most two fifths of the sending rate,
    /// `threshold` slower the more it has written (off)
    #[arg(long, value_name = "off|drain|threshold", hide_possible_values = true)]
    throttle_writes: ThrottleWrites = ThrottleWrites::Off;

    /// Throttle of the VM's processors: `off` none, `drain` to a speed at which it dirties half of what is sent, if it
    /// would dirty more and could not be stopped in time (off)
    #[arg(long, value_name = "off|drain", hide_possible_values = true)]
    throttle_cpu: ThrottleCpu = ThrottleCpu::Off;

    /// Send copied disks completely, also content that the destination has in its templates or from an earlier copy
    #[arg(long = "no-references", num_args = 0, default_missing_value = "false")]
    references: bool = true;

    /// Compression of pages: `auto` chooses by link and processors, `none`, `lz4`, `zstd`, or `zstd:LEVEL` with a level
    /// from 1 to 19 (auto)
    #[arg(long = "compress", value_name = "auto|none|lz4|zstd[:LEVEL]")]
    compression: Compress = Compress::Auto;

    /// Send only the changes of pages that were sent before: `auto` where the link is slower than computing them,
    /// `always`, `never` (auto)
    #[arg(long, value_name = "auto|always|never", hide_possible_values = true)]
    deltas: DeltaUse = DeltaUse::Auto;

    /// Memory that is not sent because the VM does not need it: `none`, `free` memory, page cache that is `cold` as
    /// well, or `all` of the page cache; a program in the VM has to report it (free)
    #[arg(long, value_name = "none|free|cold|all", hide_possible_values = true)]
    free_page_hints: HintedMemory = HintedMemory::Free;

    /// Check that the VM's networks are the same at the destination, by frames that are sent there: `off` for a VM that
    /// moves to another network, `warn` if one is not proven, `require` refuses the migration then (warn)
    #[arg(long, value_name = "off|warn|require", hide_possible_values = true)]
    network_check: NetworkCheck = NetworkCheck::Warn;

    /// Ways in which copying may restrain itself while the VM waits for processors: `none`, `niceness`, `all` (all)
    #[cfg(feature = "comparison")]
    #[arg(long, value_name = "none|niceness|all", hide = true)]
    restraints: Restraints = Restraints::All;
}

#[cfg(feature = "comparison")]
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Parses a number of seconds, and returns it in milliseconds.
#[cfg(feature = "cli")]
fn seconds_in_ms(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.parse::<u64>().map(|seconds| seconds.saturating_mul(1000))
}

/// Parses a rate, and returns it in bytes per second; 0 for none.
#[cfg(feature = "cli")]
fn bytes_per_s(text: &str) -> Result<u64, crate::rate::BadRate> {
    text.parse().map(|Rate(rate)| rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_replaces_single_values() {
        let configured = MigrationSettings { streams: 2, references: false, ..MigrationSettings::default() };
        let options = MigrationOptions { max_downtime_ms: Some(50), ..MigrationOptions::default() };
        let expected = MigrationSettings { max_downtime_ms: 50, ..configured.clone() };
        assert_eq!(configured.with(&options), expected);
    }

    #[test]
    fn absent_options_are_not_written_and_unknown_ones_refused() {
        let options = MigrationOptions { streams: Some(3), ..MigrationOptions::default() };
        assert_eq!(serde_json::to_string(&options).unwrap(), r#"{"streams":3}"#);
        assert!(serde_json::from_str::<MigrationOptions>(r#"{"straems":3}"#).is_err());
        assert!(serde_json::from_str::<MigrationSettings>(r#"{"straems":3}"#).is_err());
    }
}
