//! The demonstration of `make demo`: `whimbrel-demo PATH-OF-WHIMBREL [DIRECTORY-FOR-REPORTS]`.

use std::path::PathBuf;
use std::process::ExitCode;

use whimbrel_lab::demo::run_demo;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let Some(whimbrel) = arguments.next() else {
        eprintln!("usage: whimbrel-demo PATH-OF-WHIMBREL [DIRECTORY-FOR-REPORTS]");
        return ExitCode::from(2);
    };
    let directory = arguments.next().unwrap_or_else(|| PathBuf::from("target/demo"));
    match run_demo(&whimbrel, &directory, |line| println!("{line}")) {
        Ok(report) if report.is_clean() => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("The demonstration did not go as it should.");
            ExitCode::FAILURE
        }
        Err(error) => {
            let mut error: &dyn std::error::Error = &error;
            eprintln!("{error}");
            while let Some(source) = error.source() {
                eprintln!("  because: {source}");
                error = source;
            }
            ExitCode::FAILURE
        }
    }
}
