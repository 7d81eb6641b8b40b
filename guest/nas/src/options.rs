//! The command line.

use whimbrel_nas::class::{Class, KernelName};
use whimbrel_nas::team::MAX_PARTS;

/// Usage of the program.
pub(crate) const USAGE: &str = "usage: whimbrel-nas KERNEL CLASS [--threads T] [--runs N|forever] \
     [--peer HOST:PORT | --listen PORT]\n\
     KERNEL: EP, CG, IS, MG or FT\n\
     CLASS: S, W or A\n\
     --threads T         threads of this process (1 unless told)\n\
     --runs N|forever    how often the kernel is run (once unless told)\n\
     --listen PORT       shares the work with a second process, which connects here\n\
     --peer HOST:PORT    shares the work with the process that listens there; all other words must be the same";

/// Location of the peer process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerAddress {
    /// It connects to this port.
    Listen(u16),
    /// It listens at this address.
    At(String),
}

/// Settings of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) kernel: KernelName,
    pub(crate) class: Class,
    pub(crate) threads: usize,
    /// Number of runs. `None`: until the program is killed.
    pub(crate) runs: Option<u64>,
    pub(crate) peer: Option<PeerAddress>,
}

impl Options {
    /// Reads the words of the command line after the program's name. The error describes the fault.
    pub(crate) fn read(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut words = words.into_iter();
        let kernel = words.next().ok_or("a kernel is missing")?.parse::<KernelName>().map_err(message)?;
        let class = words.next().ok_or("a class is missing")?.parse::<Class>().map_err(message)?;
        let mut options = Self { kernel, class, threads: 1, runs: Some(1), peer: None };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word}: a value is missing"));
            match word.as_str() {
                "--threads" => options.threads = number(&word, &value()?)?,
                "--runs" => {
                    options.runs = match value()?.as_str() {
                        "forever" => None,
                        value => Some(number(&word, value)?),
                    }
                }
                "--listen" => options.share(PeerAddress::Listen(number(&word, &value()?)?))?,
                "--peer" => options.share(PeerAddress::At(address(&value()?)?))?,
                _ => return Err(format!("{word}: unknown word")),
            }
        }
        let most = MAX_PARTS / options.ranks();
        if !(1..=most).contains(&options.threads) {
            return Err(format!("--threads: expected 1 to {most} of them"));
        }
        if options.runs == Some(0) {
            return Err("--runs: expected one at least".into());
        }
        Ok(options)
    }

    /// Returns the number of processes that share the work.
    pub(crate) fn ranks(&self) -> usize {
        if self.peer.is_some() { 2 } else { 1 }
    }

    fn share(&mut self, place: PeerAddress) -> Result<(), String> {
        match self.peer.replace(place) {
            None => Ok(()),
            Some(_) => Err("--listen and --peer: expected one of them, once".into()),
        }
    }
}

fn message(error: impl std::error::Error) -> String {
    error.to_string()
}

fn number<T: std::str::FromStr>(word: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{word} {value}: not a number that fits"))
}

fn address(value: &str) -> Result<String, String> {
    match value.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(value.to_owned()),
        _ => Err(format!("--peer {value}: expected HOST:PORT")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Options, String> {
        Options::read(line.split_ascii_whitespace().map(str::to_owned))
    }

    #[test]
    fn words_are_read() {
        let plain =
            Options { kernel: KernelName::Cg, class: Class::S, threads: 1, runs: Some(1), peer: None };
        assert_eq!(read("CG S"), Ok(plain.clone()));
        assert_eq!(
            read("ft a --threads 2 --runs forever --peer other:7000"),
            Ok(Options {
                kernel: KernelName::Ft,
                class: Class::A,
                threads: 2,
                runs: None,
                peer: Some(PeerAddress::At("other:7000".into()))
            })
        );
        let listening = Options { runs: Some(3), peer: Some(PeerAddress::Listen(7000)), ..plain };
        assert_eq!(read("cg s --listen 7000 --runs 3"), Ok(listening));
    }

    #[test]
    fn mistakes_are_named() {
        for (line, mistake) in [
            ("", "kernel"),
            ("LU S", "LU"),
            ("CG", "class"),
            ("CG B", "B"),
            ("CG S fast", "fast"),
            ("CG S --threads", "--threads"),
            ("CG S --threads two", "two"),
            ("CG S --threads 0", "1 to 16"),
            ("CG S --threads 17", "1 to 16"),
            ("CG S --threads 9 --listen 7000", "1 to 8"),
            ("CG S --threads 18446744073709551615", "1 to 16"),
            ("CG S --runs 0", "--runs"),
            ("CG S --runs often", "often"),
            ("CG S --peer other", "HOST:PORT"),
            ("CG S --peer :7000", "HOST:PORT"),
            ("CG S --listen 70000", "70000"),
            ("CG S --listen 7000 --peer other:7000", "one of them"),
        ] {
            let error = read(line).unwrap_err();
            assert!(error.contains(mistake), "{line}: {error}");
        }
    }
}
