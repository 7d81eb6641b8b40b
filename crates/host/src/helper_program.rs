//! Helpers: programs of our own beside the agent.

use std::ffi::OsString;
use std::path::PathBuf;

/// The command line of a helper: a program that does nothing but call its function.
#[derive(Clone, Debug)]
pub struct HelperProgram {
    /// Path of the program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}
