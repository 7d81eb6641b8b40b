//! The demonstration, in two acts: a Debian guest migrates while clients use it, first from one host to another in the same
//! network, then to a network far away, and back.

mod far;
mod near;

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::environment::Environment;
use crate::error::{Context, Result};
use crate::host::Host;

pub use far::FarReport;
pub use near::NearReport;

/// The name of the VM that migrates.
const VM: &str = "notes";

/// Results of the demonstration.
#[derive(Debug, Clone, Serialize)]
pub struct DemoReport {
    /// First act.
    #[serde(flatten)]
    pub near: NearReport,
    /// Second act.
    pub far: FarReport,
}

impl DemoReport {
    /// Returns true if everything succeeded.
    pub fn is_clean(&self) -> bool {
        self.near.is_clean() && self.far.is_clean()
    }
}

/// Runs the demonstration with the program `whimbrel`; `say` receives lines about its progress. Reports are written
/// into `directory`.
pub fn run_demo(whimbrel: &Path, directory: &Path, mut say: impl FnMut(&str)) -> Result<DemoReport> {
    let environment = Environment::discover();
    let near = near::play(whimbrel, &environment, &mut say)?;
    let far = far::play(whimbrel, &environment, &mut say)?;
    let report = DemoReport { near, far };
    fs::create_dir_all(directory).context(|| format!("cannot make {}", directory.display()))?;
    let path = directory.join("demo.json");
    let text = serde_json::to_string_pretty(&report).map_err(std::io::Error::from);
    fs::write(&path, text.context(|| "cannot write the report")?)
        .context(|| format!("cannot write {}", path.display()))?;
    say(&format!("All of it: {}", path.display()));
    Ok(report)
}

/// Parses the one JSON document that the program prints; other output is kept as text.
fn document(output: &str) -> Value {
    serde_json::from_str(output).unwrap_or_else(|_| Value::String(output.to_owned()))
}

fn runs_qemu(host: &Host) -> Result<bool> {
    let program = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    Ok(host.processes()?.iter().map(program).any(|path| path.display().to_string().contains("qemu-system")))
}

/// Returns the end of a connection in words.
fn ended(error: Option<&str>) -> &str {
    error.unwrap_or("its connection never broke")
}
