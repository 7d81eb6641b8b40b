//! Evacuations: request, watch, list, cancel, resume.

mod text;

use std::thread;
use std::time::{Duration, Instant};

use api::fleet::{Deadline, EvacuateRequest, EvacuationInfo, FleetClient, MoveOptions, ReturnRequest};
use api::report::unix_ms_now;
use api::{Client, ClientError, EvacuateHostRequest, EvacuationStanding, HostEvacuation, Rate};
use engine::evacuation::{BlockedReason, BlockedVm, EvacuationOutcome};

use crate::Code;
use crate::cli::{EvacuateCommand, EvacuationCommand, MovesArgs, ReturnCommand};
use crate::failure::Failure;
use crate::output::{Output, plain};

/// Longest time for which a watched controller may be away.
const CONTROLLER_PATIENCE: Duration = Duration::from_mins(1);
/// Pause between two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(500);
/// Events before the answer to a request that are looked through for those of the evacuation.
const EARLIER_EVENTS: u64 = 100;

/// `whimbrel evacuate`.
pub(crate) fn evacuate(
    client: &FleetClient,
    command: EvacuateCommand,
    output: &Output,
) -> Result<Code, Failure> {
    let request = EvacuateRequest {
        hosts: command.hosts,
        to: command.to,
        deadline_unix_ms: command.by.map(|by| by.unix_ms(unix_ms_now())),
        accept_late: command.accept_late,
        partial: command.moves.partial,
        priorities: command.priority.into_iter().collect(),
        moves: move_options(&command.moves),
        dry_run: command.moves.dry_run,
    };
    if command.moves.dry_run {
        output.show(&client.preview(&request)?, text::plan);
        return Ok(Code::Done);
    }
    let begun = client.evacuate(&request)?;
    follow_or_detach(client, begun, command.moves.detach, output)
}

/// `whimbrel return`.
pub(crate) fn return_vms(
    client: &FleetClient,
    command: &ReturnCommand,
    output: &Output,
) -> Result<Code, Failure> {
    let request = ReturnRequest {
        moves: move_options(&command.moves),
        partial: command.moves.partial,
        dry_run: command.moves.dry_run,
    };
    if command.moves.dry_run {
        output.show(&client.preview_return(&command.host, &request)?, text::plan);
        return Ok(Code::Done);
    }
    let begun = client.return_vms(&command.host, &request)?;
    follow_or_detach(client, begun, command.moves.detach, output)
}

/// `whimbrel evacuation`.
pub(crate) fn manage(
    client: &FleetClient,
    command: EvacuationCommand,
    output: &Output,
) -> Result<Code, Failure> {
    match command {
        EvacuationCommand::List => output.show(&client.evacuations()?, |all| text::list(all)),
        EvacuationCommand::Show { id } => output.show(&client.evacuation(&id)?, text::one),
        EvacuationCommand::Watch { id } => {
            let known = client.evacuation(&id)?;
            return follow(client, known, output);
        }
        EvacuationCommand::Cancel { id } => {
            let cancelled = client.cancel(&id)?;
            return follow(client, cancelled, output).map(|code| match code {
                // That it is cancelled is what was asked for.
                Code::Failed => Code::Done,
                other => other,
            });
        }
        EvacuationCommand::Resume { id, detach } => {
            let resumed = client.resume(&id)?;
            return follow_or_detach(client, resumed, detach, output);
        }
        EvacuationCommand::Forget { id } => {
            output.show(&client.forget(&id)?, |one| format!("evacuation {} is forgotten\n", one.id));
        }
    }
    Ok(Code::Done)
}

/// `whimbrel evacuate --this-host`.
pub(crate) fn this_host(
    client: &Client,
    command: &EvacuateCommand,
    output: &Output,
) -> Result<Code, Failure> {
    let within_s = command.by.map(|by| match by {
        Deadline::In(time) => time.as_secs(),
        Deadline::At(_) => by.unix_ms(0).saturating_sub(unix_ms_now()) / 1000,
    });
    let mut shown = client.ask_for_evacuation(&EvacuateHostRequest { within_s })?;
    let until = within_s.map(|s| Instant::now() + Duration::from_secs(s));
    let mut last_text = String::new();
    while shown.standing == EvacuationStanding::Underway && !command.moves.detach {
        if last_text != shown.text {
            last_text.clone_from(&shown.text);
            progress(output, &shown.text);
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            break;
        }
        thread::sleep(PAUSE);
        shown = client.evacuation()?;
    }
    output.show(&shown, |shown: &HostEvacuation| format!("{}\n", shown.text));
    Ok(match shown.standing {
        EvacuationStanding::Done => Code::Done,
        EvacuationStanding::Underway if command.moves.detach => Code::Done,
        EvacuationStanding::Underway | EvacuationStanding::Failed => Code::Failed,
    })
}

fn move_options(args: &MovesArgs) -> MoveOptions {
    MoveOptions {
        bandwidth_bytes_per_s: args.bandwidth.map(|Rate(rate)| rate).filter(|rate| *rate > 0),
        per_host: args.per_host,
        policy: args.policy.map(Into::into),
        verify: args.verify,
    }
}

fn follow_or_detach(
    client: &FleetClient,
    begun: EvacuationInfo,
    detach: bool,
    output: &Output,
) -> Result<Code, Failure> {
    if detach {
        output.show(&begun, |begun| {
            let id = &begun.id;
            format!(
                "evacuation {id} has begun; `whimbrel evacuation watch {id}` shows its progress, `whimbrel evacuation \
                 cancel {id}` cancels it\n"
            )
        });
        return Ok(Code::Done);
    }
    follow(client, begun, output)
}

/// Shows the events of an evacuation until it has ended, and then its outcome. The controller may be restarted in between.
fn follow(client: &FleetClient, begun: EvacuationInfo, output: &Output) -> Result<Code, Failure> {
    let id = begun.id;
    let mut after = begun.last_event.saturating_sub(EARLIER_EVENTS);
    let mut away_since = None;
    loop {
        let shown = show_events(client, &id, &mut after, output).and_then(|()| client.evacuation(&id));
        match shown {
            Ok(known) => {
                away_since = None;
                if let Some(outcome) = known.status.outcome.clone() {
                    output.show(&known, text::one);
                    return Ok(code(&outcome));
                }
            }
            Err(error @ (ClientError::NoController { .. } | ClientError::Lost(_))) => {
                let since = *away_since.get_or_insert_with(|| {
                    progress(
                        output,
                        "the controller is away; the evacuation goes on when it is started again",
                    );
                    Instant::now()
                });
                if since.elapsed() >= CONTROLLER_PATIENCE {
                    return Err(error.into());
                }
            }
            Err(error) => return Err(error.into()),
        }
        thread::sleep(PAUSE);
    }
}

/// Shows events until the evacuation has ended, or the connection has.
fn show_events(client: &FleetClient, id: &str, after: &mut u64, output: &Output) -> Result<(), ClientError> {
    // It may have ended before.
    if client.evacuation(id)?.status.outcome.is_some() {
        return Ok(());
    }
    for event in client.events(*after, true)? {
        let event = event?;
        *after = event.number;
        if event.evacuation.as_deref() != Some(id) {
            continue;
        }
        progress(output, &event.text);
        if event.kind == "evacuation-ended" {
            return Ok(());
        }
    }
    Ok(())
}

fn progress(output: &Output, text: &str) {
    if output.wants_lines() {
        eprintln!("{}", plain(text));
    }
}

fn code(outcome: &EvacuationOutcome) -> Code {
    let is_in_doubt =
        |vms: &[BlockedVm]| vms.iter().any(|vm| matches!(vm.why, BlockedReason::InDoubt { .. }));
    match outcome {
        EvacuationOutcome::Done { .. } => Code::Done,
        EvacuationOutcome::Incomplete { vms, .. } | EvacuationOutcome::Cancelled { unsettled: vms, .. }
            if is_in_doubt(vms) =>
        {
            Code::InDoubt
        }
        EvacuationOutcome::Refused { .. }
        | EvacuationOutcome::Incomplete { .. }
        | EvacuationOutcome::Cancelled { .. } => Code::Failed,
    }
}
