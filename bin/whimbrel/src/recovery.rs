//! `whimbrel recover`: shows the state and the risks, and carries out the operator's decision.

use api::progress::Standing;
use api::{Client, MigrationSelector, RecoverAction, RecoverReport, RecoverRequest, RegistryUse};

use crate::Code;
use crate::cli::RecoverCommand;
use crate::failure::Failure;
use crate::output::{Output, Text};

/// Requests a settlement, describes a decision, or carries it out.
pub(crate) fn recover(client: &Client, command: &RecoverCommand, output: &Output) -> Result<Code, Failure> {
    let action = match (command.run_here, command.discard_copy) {
        (true, _) => RecoverAction::RunHere,
        (_, true) => RecoverAction::DiscardCopy,
        _ => RecoverAction::Ask,
    };
    let which = command.epoch.map_or(MigrationSelector::Latest, MigrationSelector::Epoch);
    let registry = match (command.overrule_registry, command.without_registry) {
        (true, _) => RegistryUse::Overridden,
        (_, true) => RegistryUse::None,
        _ => RegistryUse::Asked,
    };
    let request = RecoverRequest { action, registry, accept_risk: command.accept_risk };
    let report = client.recover(&command.vm, which, &request).map_err(Failure::of_migration)?;
    output.show(&report, |report| text(report, command));
    // A decision that was not carried out, or has not settled the migration, is not done.
    let open = match action {
        RecoverAction::Ask => report.status.standing == Standing::InDoubt,
        RecoverAction::RunHere | RecoverAction::DiscardCopy => !report.done,
    };
    Ok(if open { Code::InDoubt } else { Code::Done })
}

fn text(report: &RecoverReport, command: &RecoverCommand) -> String {
    let mut text = Text::default();
    let status = &report.status;
    text.line(format_args!("{} from {} to {}: {}", status.id, status.from, status.to, report.message));
    for (heading, lines) in [("Known:", &report.known), ("Risk:", &report.risked)] {
        if !lines.is_empty() {
            text.line(format_args!("{heading}"));
        }
        for line in lines {
            text.line(format_args!("  - {line}"));
        }
    }
    let vm = &command.vm;
    let decides = command.run_here || command.discard_copy;
    if report.done || (!decides && status.standing != Standing::InDoubt) {
        return text.finish();
    }
    if decides {
        let decision = if command.run_here { "--run-here" } else { "--discard-copy" };
        let registry = match (command.overrule_registry, command.without_registry) {
            (true, _) => " --overrule-registry",
            (_, true) => " --without-registry",
            _ => "",
        };
        if !command.accept_risk && !report.risked.is_empty() {
            text.line(format_args!(
                "Nothing was done. To do it anyway: `whimbrel recover {vm} {decision}{registry} \
                 --accept-risk`"
            ));
        }
    } else {
        text.line(format_args!(
            "It settles by itself when the other host or the registry can be reached. An operator can decide:"
        ));
        for (decision, what) in [
            ("--run-here", "--run-here`      the VM is to run on this host"),
            ("--discard-copy", "--discard-copy`  the other host has it, or no host shall run it"),
        ] {
            if report.risked.iter().any(|choice| choice.starts_with(decision)) {
                text.line(format_args!("  `whimbrel recover {vm} {what}"));
            }
        }
        text.line(format_args!("Each command only describes its risk, and does nothing yet."));
    }
    text.finish()
}
