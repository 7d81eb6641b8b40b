//! Options of a migration, defined once: for requests, the command line, the configuration and the report.
//!
//! An option that is added here is a field of [`MigrationOptions`] (HTTP and, with the feature `cli`, the arguments of
//! `whimbrel migrate`) and of [`MigrationSettings`] (the table `[migration]` of the configuration, and the report).
//! The possible values are defined here, too: [`MigrationSettings::check_configured`] holds for the configuration,
//! [`MigrationSettings::check_requested`] for a request.

use proto::limits::STREAMS;
use serde::{Deserialize, Serialize};

#[cfg(feature = "comparison")]
use crate::choices::Restraints;
use crate::choices::{
    Compress, DeltaUse, HintedMemory, NetworkCheck, NewAddressOwner, OnLimit, PacketsAtStop, StopPolicy,
    ThrottleCpu, ThrottleWrites,
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

    /// Maximum number of passes over the dirty pages in pre-copy (30)
    #[arg(long, value_name = "N")]
    max_passes: u32 = 30;

    /// With the policy `hybrid`: number of passes over the dirty pages before post-copy begins (1)
    #[arg(long, value_name = "N")]
    hybrid_passes: u32 = 1;

    /// Action when the passes or the time are used up, or rounds make no progress for a while: `abort` leaves the VM at
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

    /// Send copied disks and memory completely, also content that the destination has: in its templates, from an
    /// earlier copy, or on a disk that both hosts have
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

    /// Packets that arrive for the VM while it is stopped: `hold` delivers them at the destination, `drop` loses them,
    /// and their senders have to send them again (hold)
    #[arg(long, value_name = "hold|drop", hide_possible_values = true)]
    packets_at_stop: PacketsAtStop = PacketsAtStop::Hold;

    /// Owner of the addresses of --new-address: `host` translates them, so that nothing changes in the VM; `vm` has them
    /// configured itself beside its old ones, which something in the VM has to do (host)
    #[arg(long, value_name = "host|vm", hide_possible_values = true)]
    new_address_owner: NewAddressOwner = NewAddressOwner::Host;

    /// Ways in which copying may restrain itself while the VM waits for processors: `none`, `niceness`, `all` (all)
    #[cfg(feature = "comparison")]
    #[arg(long, value_name = "none|niceness|all", hide = true)]
    restraints: Restraints = Restraints::All;
}

/// Option with an impossible value, for which a configuration or a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {advice}")]
pub struct InvalidOption {
    /// Name of the option.
    pub option: &'static str,
    /// The problem, for people.
    pub what: String,
    /// Advice, for people.
    pub advice: String,
}

impl InvalidOption {
    fn new(option: &'static str, what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { option, what: what.into(), advice: advice.into() }
    }
}

impl MigrationSettings {
    /// Checks the values of a configuration. A request may choose any policy for them.
    pub fn check_configured(&self) -> Result<(), InvalidOption> {
        self.check_values()?;
        self.check_passes()
    }

    /// Checks the values of a migration that was requested with these options; with `verify`, both sides are compared.
    pub fn check_requested(&self, options: &MigrationOptions, verify: bool) -> Result<(), InvalidOption> {
        if options.max_total_ms.is_some() {
            self.check_time_limit()?;
        }
        if self.policy == StopPolicy::Hybrid {
            self.check_passes()?;
        } else if options.hybrid_passes.is_some() {
            let what = "a number of passes can be chosen only with --policy hybrid";
            let advice = "omit --hybrid-passes, or choose --policy hybrid";
            return Err(InvalidOption::new("hybrid_passes", what, advice));
        }
        if self.policy == StopPolicy::Sla
            && matches!(options.free_page_hints, Some(HintedMemory::Cold | HintedMemory::All))
        {
            let what =
                "with --policy sla the guest cannot free page cache: the time for it cannot be predicted";
            return Err(InvalidOption::new("free_page_hints", what, "choose --free-page-hints free or none"));
        }
        if verify && self.needs_post_copy() {
            let what = "memory that is sent after the VM was started at the destination cannot be compared";
            let advice = "omit --verify, or choose another --policy and --on-limit";
            return Err(InvalidOption::new("policy", what, advice));
        }
        self.check_values()
    }

    /// Checks each value by itself.
    pub fn check_values(&self) -> Result<(), InvalidOption> {
        let invalid = |option, what: String, advice: String| Err(InvalidOption::new(option, what, advice));
        if !(1..=STREAMS).contains(&self.streams) {
            let what = format!("{} streams are not possible", self.streams);
            return invalid("streams", what, format!("choose 1 to {STREAMS}"));
        }
        if self.max_downtime_ms == 0 && !self.policy.may_have_no_downtime() {
            let default = Self::default().max_downtime_ms;
            let advice = format!("choose 1 or more milliseconds; the default is {default}");
            return invalid("max_downtime_ms", "a downtime of 0 is not possible".to_owned(), advice);
        }
        if self.max_passes == 0 {
            let what = "0 passes are not possible: the first one sends all memory".to_owned();
            return invalid("max_passes", what, "choose 1 or more".to_owned());
        }
        Ok(())
    }

    /// Checks the number of passes before post-copy.
    fn check_passes(&self) -> Result<(), InvalidOption> {
        let (passes, most) = (self.hybrid_passes, self.max_passes);
        if passes == 0 {
            let what = "0 passes are not possible: all of memory is sent once before post-copy";
            return Err(InvalidOption::new("hybrid_passes", what, "choose 1 or more"));
        }
        if passes > most {
            let what = format!("{passes} passes exceed the maximum of {most}");
            return Err(InvalidOption::new(
                "hybrid_passes",
                what,
                "choose fewer passes, or a higher maximum",
            ));
        }
        Ok(())
    }

    /// Refuses a limit on the total time for policies that do not keep it.
    pub fn check_time_limit(&self) -> Result<(), InvalidOption> {
        if self.policy == StopPolicy::Sla {
            return Ok(());
        }
        let what = format!("the policy `{}` has no limit on the total time", self.policy.name());
        Err(InvalidOption::new("max_total_ms", what, "choose --policy sla, or omit --max-total"))
    }

    /// Returns true if these values require post-copy.
    pub fn needs_post_copy(&self) -> bool {
        self.policy == StopPolicy::Hybrid || self.on_limit == OnLimit::PostCopy
    }
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

    /// Returns the option for which a request is refused that changes the defaults so, if it is refused.
    fn refused(options: &MigrationOptions, verify: bool) -> Option<&'static str> {
        let settings = MigrationSettings::default().with(options);
        settings.check_requested(options, verify).err().map(|invalid| invalid.option)
    }

    #[test]
    fn impossible_values_are_refused_wherever_they_come_from() {
        let default = MigrationSettings::default();
        default.check_configured().unwrap();
        let hybrid = MigrationSettings { policy: StopPolicy::Hybrid, ..default.clone() };
        for (settings, option) in [
            (MigrationSettings { streams: 0, ..default.clone() }, "streams"),
            (MigrationSettings { streams: STREAMS + 1, ..default.clone() }, "streams"),
            (MigrationSettings { max_downtime_ms: 0, ..default.clone() }, "max_downtime_ms"),
            (MigrationSettings { max_passes: 0, hybrid_passes: 0, ..default.clone() }, "max_passes"),
            (MigrationSettings { hybrid_passes: 0, ..hybrid.clone() }, "hybrid_passes"),
            (MigrationSettings { hybrid_passes: 31, ..hybrid.clone() }, "hybrid_passes"),
        ] {
            let requested = settings.check_requested(&MigrationOptions::default(), false);
            assert_eq!(requested.unwrap_err().option, option);
            assert_eq!(settings.check_configured().unwrap_err().option, option);
        }
    }

    #[test]
    fn configured_passes_fit_any_policy_and_requested_ones_theirs() {
        let configured = MigrationSettings { hybrid_passes: 31, ..MigrationSettings::default() };
        assert_eq!(configured.check_configured().unwrap_err().option, "hybrid_passes");
        let few_passes = MigrationOptions { max_passes: Some(3), ..MigrationOptions::default() };
        let five_passes = MigrationSettings { hybrid_passes: 5, ..MigrationSettings::default() };
        five_passes.with(&few_passes).check_requested(&few_passes, false).unwrap();
    }

    #[test]
    fn requested_options_without_effect_are_refused() {
        let none = MigrationOptions::default();
        let sla = MigrationOptions { policy: Some(StopPolicy::Sla), ..none.clone() };
        let hybrid = MigrationOptions { policy: Some(StopPolicy::Hybrid), ..none.clone() };
        let cold = Some(HintedMemory::Cold);
        for (options, verify, option) in [
            (none.clone(), true, None),
            (sla.clone(), true, None),
            (hybrid.clone(), false, None),
            (hybrid.clone(), true, Some("policy")),
            (MigrationOptions { on_limit: Some(OnLimit::PostCopy), ..none.clone() }, true, Some("policy")),
            (MigrationOptions { max_total_ms: Some(1), ..none.clone() }, false, Some("max_total_ms")),
            (MigrationOptions { max_total_ms: Some(1), ..sla.clone() }, false, None),
            (MigrationOptions { hybrid_passes: Some(2), ..none.clone() }, false, Some("hybrid_passes")),
            (MigrationOptions { hybrid_passes: Some(2), ..hybrid.clone() }, false, None),
            (MigrationOptions { free_page_hints: cold, ..sla.clone() }, false, Some("free_page_hints")),
            (MigrationOptions { free_page_hints: cold, ..none.clone() }, false, None),
        ] {
            assert_eq!(refused(&options, verify), option, "{options:?}");
        }
    }
}
