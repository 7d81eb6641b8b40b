//! The register of owners, as the drivers use it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::Terms;
use engine::handover::register::RegisterAnswer;
use proto::message::{Ownership, RegisterRequest};
use proto::{Epoch, HostId, VmName};
use tracing::warn;

use crate::context::Context;
use crate::progress::{Phase, Progress, Standing};

/// Asks the register that a migration began with. Blocks until it has answered or its time-outs have passed. Another
/// one, which the configuration may name by now, has no say in it.
pub(crate) fn ask(context: &Context, terms: &Terms, request: &RegisterRequest) -> RegisterAnswer {
    if other_witness(context, terms).is_some() {
        return RegisterAnswer::Unreachable;
    }
    context.register.as_ref().map_or(RegisterAnswer::Unreachable, |register| register.ask(request))
}

/// Asks in a thread of its own, which passes the answer on. Says whether there is one.
pub(crate) fn ask_aside(
    context: &Arc<Context>,
    terms: &Terms,
    request: RegisterRequest,
    answered: impl FnOnce(RegisterAnswer) + Send + 'static,
) -> bool {
    let (context, terms) = (Arc::clone(context), terms.clone());
    let asks = move || answered(ask(&context, &terms, &request));
    let asking = thread::Builder::new().name("register".to_owned()).spawn(asks);
    if let Err(error) = &asking {
        warn!(%error, "cannot ask the register");
    }
    asking.is_ok()
}

/// What waits for the register's word waits for an operator, when the register has been silent for long.
pub(crate) fn tell_of_silence(vm: &VmName, progress: &mut Progress) {
    progress.phase = Phase::InDoubt;
    progress.standing = Standing::InDoubt;
    progress.message =
        Some(format!("the register does not answer; start the witness, or see `whimbrel recover {vm}`"));
}

/// What is wrong where the configuration does not name the register that a migration began with.
pub(crate) fn other_witness(context: &Context, terms: &Terms) -> Option<String> {
    let theirs = terms.witness.as_ref()?;
    let ours = context.config.register.as_ref();
    (ours != Some(theirs)).then(|| {
        let names = ours.map_or("none".to_owned(), |ours| format!("the one at {ours}"));
        format!(
            "{} began with the register of owners at {theirs}, and the configuration names {names}: its word does not \
             count here; name {theirs} under [register] again, or see `whimbrel recover {}`",
            terms.migration, terms.migration.vm
        )
    })
}

/// One driver's questions to the register: one at a time, so that a register that does not answer gathers no threads. A
/// question that comes meanwhile waits; a later one takes its place, because the state machine asks again what it
/// needs.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    busy: bool,
    waiting: Option<RegisterRequest>,
    silent_since: Option<Instant>,
}

impl Desk {
    /// A driver has a question. Given back if it can be asked now.
    pub(crate) fn question(&mut self, request: RegisterRequest) -> Option<RegisterRequest> {
        if self.busy {
            self.waiting = Some(request);
            return None;
        }
        self.busy = true;
        Some(request)
    }

    /// How long the register has not answered now.
    pub(crate) fn silence(&mut self, answer: &RegisterAnswer) -> Duration {
        if matches!(answer, RegisterAnswer::Stands(_)) {
            self.silent_since = None;
        } else {
            self.silent_since.get_or_insert_with(Instant::now);
        }
        self.silent_since.map(|since| since.elapsed()).unwrap_or_default()
    }

    /// The answer has come. The question to be asked now, if one has waited.
    pub(crate) fn answered(&mut self) -> Option<RegisterRequest> {
        self.busy = false;
        self.waiting.take().and_then(|request| self.question(request))
    }
}

/// Why a VM cannot be moved with this register.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnerError {
    /// The register does not answer.
    #[error("the register at {0} does not answer; start the witness, or see that it can be reached")]
    Unreachable(HostId),
    /// Another host owns the VM.
    #[error(
        "by the register {owner} owns {vm} since epoch {epoch}; if that is wrong, see `whimbrel recover {vm}` there"
    )]
    Other {
        /// The VM.
        vm: VmName,
        /// Who owns it.
        owner: HostId,
        /// Since which epoch.
        epoch: Epoch,
    },
}

/// The epoch in which this host holds a VM by the register; a VM that the register does not know is entered. None where
/// no register is configured.
pub(crate) fn held_since(context: &Context, vm: &VmName) -> Result<Option<Epoch>, OwnerError> {
    let (Some(register), Some(witness)) = (&context.register, &context.config.register) else {
        return Ok(None);
    };
    let host = &context.config.host;
    let unreachable = || OwnerError::Unreachable(witness.clone());
    let mut answer = register.read(vm);
    if answer == RegisterAnswer::Stands(None) {
        let first = Ownership { epoch: Epoch(0), owner: host.clone(), offer: None };
        answer = register.compare_and_set(vm, None, first);
        if answer == RegisterAnswer::Unknown {
            answer = register.read(vm);
        }
    }
    match answer {
        RegisterAnswer::Stands(Some(record)) if record.owner == *host => Ok(Some(record.epoch)),
        RegisterAnswer::Stands(Some(record)) => {
            Err(OwnerError::Other { vm: vm.clone(), owner: record.owner, epoch: record.epoch })
        }
        RegisterAnswer::Stands(None) | RegisterAnswer::Unreachable | RegisterAnswer::Unknown => {
            Err(unreachable())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_question_at_a_time_and_the_latest_waits() {
        let ask = |vm: &str| RegisterRequest::Read { vm: VmName::new(vm).unwrap() };
        let mut desk = Desk::default();
        assert_eq!(desk.question(ask("one")), Some(ask("one")));
        assert_eq!(desk.question(ask("two")), None);
        assert_eq!(desk.question(ask("three")), None);
        assert_eq!(desk.answered(), Some(ask("three")));
        assert_eq!(desk.answered(), None);
        assert_eq!(desk.question(ask("four")), Some(ask("four")));
    }
}
