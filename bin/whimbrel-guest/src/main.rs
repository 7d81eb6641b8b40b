//! `whimbrel-guest [--port DEVICE]`: answers the host's requests as long as the guest runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use whimbrel_guest::port::{find, serve};
use whimbrel_guest::protocol::PORT;

const ROOT: &str = "/";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let device = match words[..] {
        [] => None,
        ["--port", device] => Some(PathBuf::from(device)),
        ["--version"] => {
            println!("whimbrel-guest {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        ["--help"] => {
            println!("{}", help());
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{}", help());
            return ExitCode::from(2);
        }
    };
    let root = Path::new(ROOT);
    let served = device.map_or_else(|| find(root), Ok).and_then(|device| serve(root, &device));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("whimbrel-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

fn help() -> String {
    format!(
        "Usage: whimbrel-guest [--port DEVICE]\n\nReports to the host which memory of this guest need not be \
         sent in a migration.\nMust run as root in the guest. DEVICE: a virtio-serial port; by default the \
         one named {PORT}."
    )
}
