//! Migrations: check, start, watch, list, cancel, limit, report.

use std::path::Path;

use api::progress::Standing;
use api::report::{Report, explain, rate, render, to_the_second};
use api::{
    CancelOutcome, CheckReport, Client, HostId, Limits, MigrateRequest, MigrationId, MigrationSelector,
    MigrationStatus, VmName,
};

use crate::Code;
use crate::cli::{MigrateCommand, RequestArgs};
use crate::failure::Failure;
use crate::forecast_text;
use crate::output::{Output, Text, findings, table};
use crate::watching::{self, Ended};

/// Returns the request that these arguments describe.
pub(crate) fn request(vm: VmName, to: HostId, args: RequestArgs) -> MigrateRequest {
    MigrateRequest {
        vm,
        to,
        check_only: false,
        forecast: false,
        options: args.options,
        verify: args.verify,
        ram: args.ram,
        allow_options: args.allow_options,
        disks: args.disks.into(),
        disk: args.disk.into_iter().map(|(name, mode)| (name, mode.into())).collect(),
        drop_snapshots: args.without_snapshots,
        new_addresses: args.new_addresses,
    }
}

/// `whimbrel migrate --check`.
pub(crate) fn check(client: &Client, command: MigrateCommand, output: &Output) -> Result<Code, Failure> {
    let forecast = command.forecast;
    let request = MigrateRequest { forecast, ..request(command.vm, command.to, command.request) };
    let report = client.check(&request)?;
    output.show(&report, |report: &CheckReport| {
        let verdict = if report.possible { "can be migrated" } else { "cannot be migrated" };
        let ram =
            report.ram_kind.as_ref().map_or_else(String::new, |kind| format!(", its RAM would be {kind}"));
        format!(
            "{} {verdict} from {} to {}{ram}\n{}{}{}",
            report.vm,
            report.from,
            report.to,
            findings(&report.source_findings),
            findings(&report.destination_findings),
            report.forecast.as_deref().map_or_else(String::new, forecast_text::forecast)
        )
    });
    Ok(if report.possible { Code::Done } else { Code::Failed })
}

/// `whimbrel migrate`.
pub(crate) fn migrate(
    client: &Client,
    command: MigrateCommand,
    socket: &Path,
    output: &Output,
) -> Result<Code, Failure> {
    let detach = command.detach;
    let request = request(command.vm, command.to, command.request);
    let status = client.migrate(&request).map_err(Failure::of_migration)?;
    if detach {
        output.show(&status, |status: &MigrationStatus| {
            let vm = &status.id.vm;
            format!(
                "{} is under way; `whimbrel watch {vm}` shows its progress, `whimbrel cancel {vm}` aborts \
                 it\n",
                status.id
            )
        });
        return Ok(Code::Done);
    }
    watch_to_end(client, &status.id, socket, output)
}

/// `whimbrel watch`.
pub(crate) fn watch(client: &Client, vm: &VmName, socket: &Path, output: &Output) -> Result<Code, Failure> {
    let id = client.migration(vm, MigrationSelector::Latest)?.id;
    watch_to_end(client, &id, socket, output)
}

/// Watches a migration, and shows its result: the report, or the status from a side without one.
fn watch_to_end(client: &Client, id: &MigrationId, socket: &Path, output: &Output) -> Result<Code, Failure> {
    let ended = watching::watch(id, socket, output)?;
    let which = MigrationSelector::Epoch(id.epoch.0);
    let vm = &id.vm;
    let Ended::Settled(standing) = ended else {
        let status = client.migration(vm, which)?;
        eprintln!("{id} continues without being watched.");
        eprintln!("  `whimbrel watch {vm}` watches it again, `whimbrel cancel {vm}` aborts it.");
        output.show(&status, |_| String::new());
        return Ok(Code::Interrupted);
    };
    match client.report(vm, which) {
        Ok(report) => output.show(&report, render),
        Err(_) => output.show(&client.migration(vm, which)?, |status| table(HEADING, [row(status)])),
    }
    if standing == Standing::InDoubt {
        eprintln!(
            "{id} is in doubt: it is not known which host owns the VM. `whimbrel recover {vm}` shows what \
             can be done."
        );
    }
    Ok(code(standing))
}

fn code(standing: Standing) -> Code {
    match standing {
        Standing::Done | Standing::Underway => Code::Done,
        Standing::Failed => Code::Failed,
        Standing::VmEnded => Code::VmEnded,
        Standing::InDoubt => Code::InDoubt,
    }
}

const HEADING: [&str; 6] = ["MIGRATION", "FROM", "TO", "STATE", "SINCE", "REMARK"];

fn row(status: &MigrationStatus) -> [String; 6] {
    let standing = match status.standing {
        Standing::Underway => "under way",
        Standing::Done => "done",
        Standing::Failed => "failed",
        Standing::VmEnded => "VM ended",
        Standing::InDoubt => "in doubt",
    };
    let remark = [&status.message, &status.advice].into_iter().flatten().cloned().collect::<Vec<_>>();
    [
        status.id.to_string(),
        status.from.to_string(),
        status.to.to_string(),
        if status.state == standing { standing.to_owned() } else { format!("{standing} ({})", status.state) },
        to_the_second(&status.created),
        remark.join("; "),
    ]
}

/// `whimbrel migrations`.
pub(crate) fn list(client: &Client, output: &Output) -> Result<Code, Failure> {
    output.show(&client.migrations()?, |migrations: &Vec<MigrationStatus>| {
        if migrations.is_empty() {
            "no migrations\n".to_owned()
        } else {
            table(HEADING, migrations.iter().map(row))
        }
    });
    Ok(Code::Done)
}

/// `whimbrel cancel`.
pub(crate) fn cancel(client: &Client, vm: &VmName, output: &Output) -> Result<Code, Failure> {
    let outcome = client.cancel(vm, MigrationSelector::Latest).map_err(Failure::of_migration)?;
    output.show(&outcome, |outcome| match outcome {
        CancelOutcome::Cancelled => format!("aborted; {vm} stays at its source\n"),
        CancelOutcome::TooLate { state, .. } => format!(
            "too late to cancel: the handover is {state}, and only the other host can return {vm}; if it \
             does not end by itself, see `whimbrel recover {vm}`\n"
        ),
        CancelOutcome::AlreadyOver { standing: Standing::Done } => format!("{vm} was already migrated\n"),
        CancelOutcome::AlreadyOver { .. } => format!("the migration of {vm} had already ended\n"),
    });
    Ok(match outcome {
        CancelOutcome::Cancelled | CancelOutcome::AlreadyOver { standing: Standing::Failed } => Code::Done,
        CancelOutcome::TooLate { standing: Standing::InDoubt, .. }
        | CancelOutcome::AlreadyOver { standing: Standing::InDoubt } => Code::InDoubt,
        CancelOutcome::TooLate { .. } | CancelOutcome::AlreadyOver { .. } => Code::Failed,
    })
}

/// `whimbrel limit`.
pub(crate) fn limit(client: &Client, vm: &VmName, limits: &Limits, output: &Output) -> Result<Code, Failure> {
    let limits = client.set_limits(vm, MigrationSelector::Latest, limits)?;
    output.show(&limits, |limits: &Limits| {
        let cap = match limits.bandwidth_bytes_per_s {
            None | Some(0) => "none".to_owned(),
            Some(cap) => rate(cap),
        };
        let mut text = Text::default();
        text.line(format_args!("bandwidth     {cap}"));
        if let Some(ms) = limits.max_downtime_ms {
            text.line(format_args!("max downtime  {ms} ms"));
        }
        if let Some(passes) = limits.max_passes {
            text.line(format_args!("max passes    {passes}"));
        }
        if let Some(ms) = limits.max_total_ms {
            text.line(format_args!("max total     {} s", ms / 1000));
        }
        text.finish()
    });
    Ok(Code::Done)
}

/// `whimbrel report`.
pub(crate) fn report(
    client: &Client,
    vm: &VmName,
    epoch: Option<u64>,
    why: bool,
    output: &Output,
) -> Result<Code, Failure> {
    let report: Report =
        client.report(vm, epoch.map_or(MigrationSelector::Latest, MigrationSelector::Epoch))?;
    output.show(&report, if why { explain } else { render });
    Ok(Code::Done)
}
