//! Keys in files: as `tsig-keygen` writes them, or the secret alone.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::name::Name;
use crate::tsig::{Algorithm, Key, SHORTEST_SECRET};

/// Largest file that is read.
const LARGEST_FILE: u64 = 16 << 10;

/// Error of a file with a key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyFileError {
    /// It cannot be read.
    #[error("cannot read the key file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Others than its owner could read it, or it is another user's.
    #[error(
        "the key file {} can be read by others: `chown root` and `chmod 600` it, and make a new key if others may have \
         read this one",
        path.display()
    )]
    Readable {
        /// The file.
        path: PathBuf,
    },
    /// It has another content.
    #[error("the key file {} has no key: it needs what tsig-keygen writes, or the secret alone in base 64", path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// The key has another name or algorithm than the configuration.
    #[error("the key in {} is {found}, and the configuration has {configured}: change one of them", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// Name or algorithm in the file.
        found: String,
        /// Name or algorithm in the configuration.
        configured: String,
    },
    /// The secret is too short to be one.
    #[error("the secret in {} is shorter than 16 bytes: make a key with tsig-keygen", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the key with this name and algorithm from a file.
pub(crate) fn load(path: &Path, name: &Name, algorithm: Algorithm) -> Result<Key, KeyFileError> {
    let owned = || path.to_owned();
    let read_error = |source| KeyFileError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read_error)?;
    // Of the file that is open: the path may lead to another one in the next moment.
    let metadata = file.metadata().map_err(read_error)?;
    let is_ours = [0, rustix::process::geteuid().as_raw()].contains(&metadata.uid());
    if !is_ours || metadata.mode() & 0o077 != 0 {
        return Err(KeyFileError::Readable { path: owned() });
    }
    let mut text = String::new();
    file.take(LARGEST_FILE).read_to_string(&mut text).map_err(read_error)?;
    let stated = StatedKey::parse(&text).ok_or_else(|| KeyFileError::NoKey { path: owned() })?;
    let other = |found: &str, configured: String| {
        Err(KeyFileError::Other { path: owned(), found: found.to_owned(), configured })
    };
    if let Some(found) = stated.name
        && found.parse::<Name>().as_ref() != Ok(name)
    {
        return other(found, name.to_string());
    }
    if let Some(found) = stated.algorithm
        && !found.eq_ignore_ascii_case(algorithm.name())
    {
        return other(found, algorithm.to_string());
    }
    let secret = decode_base64(stated.secret).ok_or_else(|| KeyFileError::NoKey { path: owned() })?;
    if secret.len() < SHORTEST_SECRET {
        return Err(KeyFileError::TooShort { path: owned() });
    }
    Ok(Key::new(name.clone(), algorithm, &secret))
}

/// Key as a file has it.
#[derive(Debug, PartialEq, Eq)]
struct StatedKey<'a> {
    name: Option<&'a str>,
    algorithm: Option<&'a str>,
    secret: &'a str,
}

impl<'a> StatedKey<'a> {
    /// Parses `key "NAME" { algorithm ALGORITHM; secret "SECRET"; };`, or a secret.
    fn parse(text: &'a str) -> Option<Self> {
        let lines = text.lines().map(str::trim_start);
        let statements = lines.filter(|line| !line.starts_with('#') && !line.starts_with("//"));
        let is_between = |letter: char| letter.is_whitespace() || "{};\"".contains(letter);
        let words = statements.flat_map(|line| line.split(is_between)).filter(|word| !word.is_empty());
        match words.collect::<Vec<_>>()[..] {
            [secret] => Some(Self { name: None, algorithm: None, secret }),
            ["key", name, "algorithm", algorithm, "secret", secret]
            | ["key", name, "secret", secret, "algorithm", algorithm] => {
                Some(Self { name: Some(name), algorithm: Some(algorithm), secret })
            }
            _ => None,
        }
    }
}

/// Decodes base 64 (RFC 4648, section 4). Returns nothing if the text is not in this form.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    let padding = text.len() - digits.len();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut bytes = Vec::new();
    let (mut value, mut bits) = (0_u32, 0);
    for letter in digits.bytes() {
        let digit = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        value = ((value << 6) | u32::from(digit)) & 0xffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((value >> bits) as u8);
        }
    }
    Some(bytes)
}
