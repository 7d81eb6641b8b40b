//! Guests from files: `vm run FILE.toml`.
//!
//! ```toml
//! name = "web1"
//! qemu = "/usr/bin/qemu-system-x86_64"   # optional
//! args = ["-machine", "q35", "-m", "1G", "-drive", "file=/srv/web1.qcow2,if=virtio,cache=none"]
//! cwd = "/srv"                           # optional
//! [env]                                  # optional
//! LANG = "C"
//! ```
//!
//! `docs/vm.example.toml` explains every key. The options are QEMU's own. A monitor of ours is added, so that the agent
//! always has one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cmdline::{self, OptionPolicy};
use crate::command::{LOG_FILE, QMP_FILE, monitor};
use crate::process::Launch;

/// Program for files that do not name one.
pub const DEFAULT_QEMU: &str = "qemu-system-x86_64";

/// Description of a guest in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmFile {
    /// Name: letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// Program; [`DEFAULT_QEMU`] if it is missing.
    #[serde(default = "default_qemu")]
    pub qemu: PathBuf,
    /// QEMU's options.
    pub args: Vec<String>,
    /// Environment variables.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Working directory.
    #[serde(default)]
    pub cwd: Option<PathBuf>,
}

/// Error of a file.
#[derive(Debug, thiserror::Error)]
pub enum VmFileError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The file is not TOML, or has other keys or types.
    #[error("{path}:{line}: {what}")]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Description of the error, naming the key.
        what: String,
    },
    /// A value is not allowed.
    #[error("{path}:{line}: {key}: {what}")]
    Value {
        /// Path of the file.
        path: PathBuf,
        /// Line number of the key, from 1.
        line: usize,
        /// Name of the key.
        key: &'static str,
        /// Description of the error.
        what: String,
    },
}

fn default_qemu() -> PathBuf {
    DEFAULT_QEMU.into()
}

impl VmFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, VmFileError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| VmFileError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Parses a file's text; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, VmFileError> {
        let file: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let line = line_at(text, at);
            let what = match key_in(text.lines().nth(line - 1).unwrap_or_default()) {
                Some(key) => format!("{key}: {}", error.message()),
                None => error.message().to_owned(),
            };
            VmFileError::Syntax { path: path.to_owned(), line, what }
        })?;
        file.check(text, path)?;
        Ok(file)
    }

    fn check(&self, text: &str, path: &Path) -> Result<(), VmFileError> {
        let wrong = |key: &'static str, what: String| {
            let starts = |line: &str| {
                line.trim_start().strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
            };
            let line = text.lines().position(starts).map_or(1, |at| at + 1);
            Err(VmFileError::Value { path: path.to_owned(), line, key, what })
        };
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let first = self.name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !first || self.name.len() > 63 || !self.name.bytes().all(letters) {
            return wrong(
                "name",
                "must be 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first".to_owned(),
            );
        }
        if self.args.iter().any(|argument| argument.contains('\0')) {
            return wrong("args", "must not contain zero bytes".to_owned());
        }
        for option in cmdline::parse(&self.args) {
            let why = match option.name.as_str() {
                "daemonize" | "pidfile" => "the agent tracks its processes",
                "incoming" | "loadvm" => "a guest from a file is started without earlier state",
                "name" => "the name is that of the key `name`",
                name => match cmdline::option_spec(name).map(|option_spec| option_spec.policy) {
                    Some(OptionPolicy::Refuse(why)) => why,
                    _ => continue,
                },
            };
            return wrong("args", format!("-{} is not allowed: {why}", option.name));
        }
        Ok(())
    }

    /// Returns the parameters of a start, with all files in `run_dir`.
    pub fn launch(&self, run_dir: &Path) -> Launch {
        let qmp = run_dir.join(QMP_FILE);
        let mut argv =
            vec![self.qemu.clone().into_os_string(), "-name".into(), format!("guest={}", self.name).into()];
        argv.extend(self.args.iter().map(OsString::from));
        argv.extend(monitor(&qmp).map(OsString::from));
        Launch {
            argv,
            env: self.env.clone().into_iter().collect(),
            cwd: self.cwd.clone(),
            log: run_dir.join(LOG_FILE),
            qmp,
            scope: Some(format!("whimbrel-vm-{}", self.name)),
            oom_score_adj: 0,
        }
    }
}

fn line_at(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// Returns the key that a line sets.
fn key_in(line: &str) -> Option<&str> {
    let key = line.split_once('=')?.0.trim();
    (!key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)))
        .then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VmFile, String> {
        VmFile::parse(text, Path::new("a.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_becomes_a_command_line() {
        let file = parse("name = \"web1\"\nargs = [\"-m\", \"1G\"]\n[env]\nA = \"b\"\n").unwrap();
        let launch = file.launch(Path::new("/run/web1"));
        let words: Vec<&str> = launch.argv.iter().filter_map(|word| word.to_str()).collect();
        assert_eq!(
            words,
            [
                "qemu-system-x86_64",
                "-name",
                "guest=web1",
                "-m",
                "1G",
                "-chardev",
                "socket,id=whimbrel-qmp,path=/run/web1/whimbrel-qmp.sock,server=on,wait=on",
                "-mon",
                "chardev=whimbrel-qmp,mode=control"
            ]
        );
        assert_eq!(launch.env, [("A".to_owned(), "b".to_owned())]);
    }

    fn example() -> String {
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vm.example.toml")).unwrap()
    }

    #[test]
    fn the_example_can_be_used_and_shows_the_defaults() {
        let file = parse(&example()).unwrap();
        assert_eq!((file.qemu, file.cwd, file.env.len()), (DEFAULT_QEMU.into(), None, 0));
        assert!(example().contains(&format!("Default: \"{DEFAULT_QEMU}\"")));
        // Names in the text: at most 63 letters are allowed, and these options are refused.
        assert!(parse(&format!("name = \"{}\"\nargs = []\n", "a".repeat(63))).is_ok());
        assert!(parse(&format!("name = \"{}\"\nargs = []\n", "a".repeat(64))).is_err());
        for option in ["-daemonize", "-pidfile", "-incoming", "-loadvm", "-name"] {
            assert!(example().contains(&format!("`{option}`")), "{option}");
            assert!(parse(&format!("name = \"a\"\nargs = [\"{option}\", \"x\"]\n")).is_err(), "{option}");
        }
    }

    #[test]
    fn the_example_names_every_key() {
        let is_key = |rest: &str| !rest.starts_with(' ') && rest.contains(" = ");
        let with_all_keys = |line: &str| match line.strip_prefix('#') {
            Some(rest) if is_key(rest) => rest.to_owned(),
            _ => line.to_owned(),
        };
        let text: Vec<String> = example().lines().map(with_all_keys).collect();
        let file = parse(&text.join("\n")).unwrap();
        assert!(file.cwd.is_some() && !file.env.is_empty());
        for key in toml::from_str::<toml::Table>(&toml::to_string(&file).unwrap()).unwrap().keys() {
            let begins = [format!("{key} = "), format!("[{key}]")];
            assert!(
                text.iter().any(|line| begins.iter().any(|begin| line.starts_with(begin))),
                "{key} is missing in docs/vm.example.toml"
            );
        }
    }

    #[test]
    fn errors_name_file_line_and_key() {
        for (text, message) in [
            ("name = \"a\"\n\nargs = 3\n", "a.toml:3: args: invalid type: integer `3`, expected a sequence"),
            ("name = \"a\"\nargs = []\nfrob = 1\n", "a.toml:3: frob: unknown field `frob`"),
            ("args = []\n", "a.toml:1: "),
            ("name = \"a\"\nargs = [\n", "a.toml:2: args: unclosed array"),
            ("\nname = \"../a\"\nargs = []\n", "a.toml:2: name: must be"),
            ("name = \"a\"\nargs = [\"-daemonize\"]\n", "a.toml:2: args: -daemonize is not allowed"),
            ("name = \"a\"\nargs = [\"-snapshot\"]\n", "a.toml:2: args: -snapshot is not allowed"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(message), "{error:?} is not {message:?}");
        }
        let error = VmFile::read(Path::new("/nonexistent/a.toml")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nonexistent/a.toml");
    }
}
