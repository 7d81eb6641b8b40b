//! Traces of VMs: days, each with a VM a line, whose values are CPU use in percent each five minutes.

use std::io::BufRead;

use super::error::{LineError, TraceError, number};

/// Values of a day: one each five minutes.
pub const STEPS_PER_DAY: usize = 288;

/// CPU use of the VMs of a day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Day {
    /// The day, as YYYYMMDD.
    pub name: String,
    /// CPU use of each VM in percent, [`STEPS_PER_DAY`] values.
    pub vms: Vec<Vec<u8>>,
}

/// Reads days. Empty lines are ignored: VMs have no order that a missing line could shift.
pub fn read_days(reader: impl BufRead) -> Result<Vec<Day>, TraceError> {
    let mut days: Vec<Day> = Vec::new();
    let mut heading = 0;
    for (at, text) in reader.lines().enumerate() {
        let text = text.map_err(|source| TraceError::Read { line: at, source })?;
        let line = at + 1;
        let words = text.trim();
        if let Some(name) = words.strip_prefix('#') {
            complete(days.last(), heading)?;
            days.push(Day { name: day(name.trim(), &days).map_err(|what| what.at(line))?, vms: Vec::new() });
            heading = line;
        } else if !words.is_empty() {
            let day = days.last_mut().ok_or_else(|| LineError::NoDay.at(line))?;
            day.vms.push(vm(words).map_err(|what| what.at(line))?);
        }
    }
    complete(days.last(), heading)?;
    if days.is_empty() { Err(TraceError::Empty) } else { Ok(days) }
}

fn complete(day: Option<&Day>, heading: usize) -> Result<(), TraceError> {
    match day.filter(|day| day.vms.is_empty()) {
        Some(day) => Err(LineError::EmptyDay(day.name.clone()).at(heading)),
        None => Ok(()),
    }
}

fn day(name: &str, before: &[Day]) -> Result<String, LineError> {
    let is_day = name.len() == 8 && name.bytes().all(|digit| digit.is_ascii_digit());
    if !is_day {
        return Err(LineError::BadDay(name.chars().take(40).collect()));
    }
    if before.iter().any(|day| day.name == name) {
        return Err(LineError::DayTwice(name.to_owned()));
    }
    Ok(name.to_owned())
}

fn vm(words: &str) -> Result<Vec<u8>, LineError> {
    let percent = |word| number(word, 100).map(|percent| percent as u8);
    let values: Vec<u8> = words.split_whitespace().map(percent).collect::<Result<_, _>>()?;
    let (found, expected) = (values.len(), STEPS_PER_DAY);
    if found == expected { Ok(values) } else { Err(LineError::NotADay { found, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(first: &str) -> String {
        format!("{first}{}\n", " 7".repeat(STEPS_PER_DAY - 1))
    }

    fn refused(text: &str) -> String {
        read_days(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn days_have_their_vms() {
        let text = format!("# 20110303\n{}{}\n# 20110306\n{}", row("1"), row("100"), row("0"));
        let days = read_days(text.as_bytes()).unwrap();
        let shape: Vec<_> = days.iter().map(|day| (day.name.as_str(), day.vms.len())).collect();
        assert_eq!(shape, [("20110303", 2), ("20110306", 1)]);
        assert_eq!(days[0].vms[1][..3], [100, 7, 7]);
    }

    #[test]
    fn errors_name_the_line() {
        assert!(refused(&row("1")).starts_with("line 1: values before the first line with a day"));
        assert_eq!(refused(&format!("# 20110303\n{}", row("-4"))), "line 2: -4 is negative");
        assert_eq!(refused(&format!("# 20110303\n{}", row("x"))), "line 2: \"x\" is not a whole number");
        assert!(refused(&format!("# 20110303\n{}", row("101"))).starts_with("line 2: 101 is more than 100"));
        assert!(refused("# 20110303\n1 2 3\n").starts_with("line 2: 3 values instead of 288"));
        assert!(refused(&format!("# monday\n{}", row("1"))).starts_with("line 1: \"monday\" is not a day"));
        assert_eq!(
            refused(&format!("\n# 20110303\n# 20110306\n{}", row("1"))),
            "line 2: day 20110303 has no VM"
        );
        let twice = format!("# 20110303\n{}# 20110303\n{}", row("1"), row("1"));
        assert_eq!(refused(&twice), "line 3: day 20110303 is there twice");
        assert!(refused("").starts_with("the trace is empty"));
    }
}
