//! `whimbrel recover`: what is known, what is risked, and then, with the operator's word, what is done.

use agent::api::{Client, RecoverAction, RecoverReport, RecoverRequest, Which};
use agent::progress::Standing;

use crate::Code;
use crate::cli::RecoverCommand;
use crate::failure::Failure;
use crate::output::Output;

/// Asks, describes, or carries out.
pub(crate) fn recover(client: &Client, command: &RecoverCommand, output: &Output) -> Result<Code, Failure> {
    let action = match (command.run_here, command.give_up) {
        (true, _) => RecoverAction::RunHere,
        (_, true) => RecoverAction::GiveUpHere,
        _ => RecoverAction::Ask,
    };
    let which = command.epoch.map_or(Which::Latest, Which::Epoch);
    let request = RecoverRequest { action, i_know_the_risk: command.i_know_the_risk };
    let report = client.recover(&command.vm, which, &request)?;
    output.show(&report, |report| text(report, command));
    Ok(match report.status.standing {
        Standing::InDoubt => Code::InDoubt,
        Standing::Underway | Standing::Done | Standing::Failed => Code::Done,
    })
}

fn text(report: &RecoverReport, command: &RecoverCommand) -> String {
    let status = &report.status;
    let mut text = format!("{} from {} to {}: {}\n", status.id, status.from, status.to, report.message);
    let mut list = |heading: &str, lines: &[String]| {
        if !lines.is_empty() {
            text.push_str(&format!("{heading}\n"));
            for line in lines {
                text.push_str(&format!("  - {line}\n"));
            }
        }
    };
    list("What is known:", &report.known);
    list("What is risked:", &report.risked);
    if status.standing != Standing::InDoubt || report.done {
        return text;
    }
    let vm = &command.vm;
    if command.run_here || command.give_up {
        let decision = if command.run_here { "--run-here" } else { "--give-up" };
        text.push_str(&format!(
            "Nothing was done. If it is right all the same: `whimbrel recover {vm} {decision} --i-know-the-risk`\n"
        ));
    } else {
        text.push_str(&format!(
            "It settles by itself when the other host or the register can be reached. What an operator can decide:\n  \
             `whimbrel recover {vm} --run-here`  the VM is to run on this host\n  \
             `whimbrel recover {vm} --give-up`   the other host has it, or nobody shall\n\
             Each says first what it risks, and does nothing yet.\n"
        ));
    }
    text
}
