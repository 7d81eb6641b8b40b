//! `whimbrel fleet matrix`.

use engine::planner::{Inventory, MoveLimits, PlacementMatrix, PlacementMatrixCell, matrix};

use super::cli::{MatrixOptions, WhatIf};
use super::plan::read;
use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text};

/// Shows which VM could run where.
pub(crate) fn show(options: &MatrixOptions, output: &Output) -> Result<Code, Failure> {
    let mut inventory: Inventory = read(&options.inventory)?;
    for WhatIf { host, change } in &options.what_if {
        if !inventory.apply(host, change) {
            let cpu = change.cpu_of.as_ref().map(|platform| format!(" or platform {platform}"));
            return Err(Failure::NoSuchHost { host: host.clone(), other: cpu.unwrap_or_default() });
        }
    }
    let found = matrix(&inventory, &options.vm, MoveLimits::default().most_load_percent)?;
    output.show(&found, render);
    Ok(Code::Done)
}

fn render(matrix: &PlacementMatrix) -> String {
    let mut text = Text::default();
    for row in &matrix.rows {
        text.line(format_args!("{} on {}", row.vm, row.host));
        for PlacementMatrixCell { host, obstacles } in &row.cells {
            let Some((first, others)) = obstacles.split_first() else {
                text.line(format_args!("  {host}: yes"));
                continue;
            };
            text.line(format_args!("  {host}: no: {first}; {}", first.advice()));
            for obstacle in others {
                text.line(format_args!("    and {obstacle}; {}", obstacle.advice()));
            }
        }
    }
    match &matrix.common_cpu {
        Some(common) => {
            text.line(format_args!("highest CPU model of all hosts: {}", common.option));
            if let Some(next) = &common.next {
                text.line(format_args!("  without {} it would be {}", next.hosts.join(", "), next.model));
            }
        }
        None => text.line(format_args!(
            "no CPU model of all hosts: the inventory has no cpu_models, or none that all have"
        )),
    }
    text.finish()
}
