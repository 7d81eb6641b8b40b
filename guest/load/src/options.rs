//! Settings of the load generator: `load.KEY=VALUE` words of the kernel's command line, `KEY=VALUE` arguments, or,
//! while it runs, `set KEY=VALUE …` on its input.

use std::str::FromStr;

use whimbrel_guest_load::Pattern;

/// Way to write a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The whole page anew.
    Random,
    /// Four words of the page; the rest stays.
    Few,
    /// By turns all zeros and all anew.
    Zero,
}

/// Settings of the load generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// Memory filled at the start, MiB; an increase allocates more.
    pub(crate) fill_mib: usize,
    /// The first part of it, which is rewritten over and over, MiB.
    pub(crate) wss_mib: usize,
    /// Write rate, MiB/s of pages touched. 0: none.
    pub(crate) rate_mib_per_s: u64,
    /// Rate of verifying pages in the background, MiB/s. 0: none.
    pub(crate) verify_mib_per_s: u64,
    /// Way to rewrite pages.
    pub(crate) mode: Mode,
    /// Choice and order of the pages.
    pub(crate) pattern: Pattern,
    /// Threads that read the first disk past the page cache. Fixed for the run.
    pub(crate) disk_threads: usize,
    /// Pause of such a thread between two reads, ms. 0: none. Fixed for the run.
    pub(crate) disk_pause_ms: u64,
    /// Threads that rewrite its second half and read it back; the readers keep to the first half then. Fixed for the
    /// run.
    pub(crate) disk_writers: usize,
    /// True if the disk flushes each write before it acknowledges it. Fixed for the run.
    pub(crate) disk_sync: bool,
    /// Memory into which the readers read, MiB, all together. Fixed for the run.
    pub(crate) disk_mib: usize,
    /// TCP port that answers each byte with the same byte. 0: none. Fixed for the run.
    pub(crate) port: u16,
    /// Makes content differ between runs, and the order of pages. Fixed for the run.
    pub(crate) seed: u64,
    /// Share of memory that looks random, in percent; the rest compresses well. Fixed for the run.
    pub(crate) noise_percent: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            fill_mib: 16,
            wss_mib: 16,
            rate_mib_per_s: 0,
            verify_mib_per_s: 32,
            mode: Mode::Random,
            pattern: Pattern::Sequential,
            disk_threads: 0,
            disk_pause_ms: 0,
            disk_writers: 0,
            disk_sync: false,
            disk_mib: 16,
            port: 0,
            seed: 1,
            noise_percent: 100,
        }
    }
}

impl Options {
    /// Applies one `KEY=VALUE`. The error describes the fault.
    pub(crate) fn set(&mut self, word: &str) -> Result<(), String> {
        fn number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
            value.parse().map_err(|_| format!("{key}={value}: not a number that fits"))
        }
        let (key, value) = word.split_once('=').ok_or_else(|| format!("{word}: expected KEY=VALUE"))?;
        match key {
            "fill" => self.fill_mib = number(key, value)?,
            "wss" => self.wss_mib = number(key, value)?,
            "rate" => self.rate_mib_per_s = number(key, value)?,
            "verify" => self.verify_mib_per_s = number(key, value)?,
            "disk_threads" => self.disk_threads = number(key, value)?,
            "disk_pause" => self.disk_pause_ms = number(key, value)?,
            "disk_writers" => self.disk_writers = number(key, value)?,
            "disk_sync" => self.disk_sync = number::<u8>(key, value)? != 0,
            "disk" => self.disk_mib = number(key, value)?,
            "port" => self.port = number(key, value)?,
            "seed" => self.seed = number(key, value)?,
            "noise" => self.noise_percent = number(key, value)?,
            "mode" => {
                self.mode = match value {
                    "random" => Mode::Random,
                    "few" => Mode::Few,
                    "zero" => Mode::Zero,
                    _ => return Err(format!("mode={value}: expected random, few or zero")),
                }
            }
            "pattern" => {
                self.pattern = value.parse().map_err(|wrong| format!("pattern={value}: {wrong}"))?;
            }
            _ => return Err(format!("unknown setting {key}")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_mistakes_named() {
        let mut options = Options::default();
        options.set("mode=few").unwrap();
        options.set("rate=150").unwrap();
        options.set("pattern=hot-spot:90/10").unwrap();
        assert_eq!((options.mode, options.rate_mib_per_s), (Mode::Few, 150));
        assert_eq!(options.pattern.to_string(), "hot-spot:90/10");
        for wrong in ["mode=slow", "pattern=hot-spot:90", "rate=x", "port=70000", "fill", "colour=red"] {
            assert!(options.set(wrong).is_err(), "{wrong}");
        }
    }
}
