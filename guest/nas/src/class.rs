//! Names on the command line: of the kernels, and of the sizes of their problems.

use std::fmt;
use std::str::FromStr;

/// Size of a problem, in the specification's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Sample: a second of work at most.
    S,
    /// Workstation: memory of some tens of MiB.
    W,
    /// The smallest of the large ones: up to half a GiB.
    A,
}

/// Name of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelName {
    /// Embarrassingly parallel.
    Ep,
    /// Conjugate gradient.
    Cg,
    /// Integer sort.
    Is,
    /// Multigrid.
    Mg,
    /// Fourier transform.
    Ft,
}

/// Error of an unknown word.
#[derive(Debug, PartialEq, Eq)]
pub struct Unknown {
    word: String,
    known: &'static str,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}", self.word, self.known)
    }
}

impl std::error::Error for Unknown {}

impl FromStr for Class {
    type Err = Unknown;

    fn from_str(word: &str) -> Result<Self, Unknown> {
        match word.to_ascii_uppercase().as_str() {
            "S" => Ok(Self::S),
            "W" => Ok(Self::W),
            "A" => Ok(Self::A),
            _ => Err(Unknown { word: word.into(), known: "a class: S, W or A" }),
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::S => "S",
            Self::W => "W",
            Self::A => "A",
        })
    }
}

impl FromStr for KernelName {
    type Err = Unknown;

    fn from_str(word: &str) -> Result<Self, Unknown> {
        match word.to_ascii_uppercase().as_str() {
            "EP" => Ok(Self::Ep),
            "CG" => Ok(Self::Cg),
            "IS" => Ok(Self::Is),
            "MG" => Ok(Self::Mg),
            "FT" => Ok(Self::Ft),
            _ => Err(Unknown { word: word.into(), known: "a kernel: EP, CG, IS, MG or FT" }),
        }
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ep => "EP",
            Self::Cg => "CG",
            Self::Is => "IS",
            Self::Mg => "MG",
            Self::Ft => "FT",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in [KernelName::Ep, KernelName::Cg, KernelName::Is, KernelName::Mg, KernelName::Ft] {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for class in [Class::S, Class::W, Class::A] {
            assert_eq!(class.to_string().to_lowercase().parse(), Ok(class));
        }
        assert!("LU".parse::<KernelName>().is_err());
        assert!("B".parse::<Class>().is_err());
    }
}
