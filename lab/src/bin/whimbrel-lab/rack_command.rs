//! `whimbrel-lab rack`: the hosts that a failing test left, for a person to look into.

use std::path::Path;

use lab::Environment;
use lab::rack::Rack;

use crate::Code;
use crate::failure::Failure;

pub(crate) fn run(directory: &Path) -> Result<Code, Failure> {
    let rack = Rack::resume(&Environment::discover(), directory)?;
    println!("The hosts run as they did when the test failed. A command on each:");
    for host in &rack.hosts {
        println!("  {:10} {}", host.name(), host.describe_shell());
    }
    println!("Press Enter to end them.");
    // An error ends them as well.
    drop(std::io::stdin().read_line(&mut String::new()));
    Ok(Code::Done)
}
