//! Requests of the drivers to the ownership registry.

use std::sync::Arc;
use std::thread;

use engine::handover::MigrationTerms;
use engine::handover::registry::RegistryAnswer;
use proto::message::{Finding, Ownership, RegistryRequest, Severity};
use proto::{Epoch, HostId, VmName};
use tracing::warn;

use crate::Context;
use api::progress::{Phase, Progress, Standing};
use store::registry::Registry;

/// Asks the registry with which the migration began. Blocks until it has answered or its time-outs have passed. Another
/// registry, which the configuration may name by now, is not asked.
pub fn ask(context: &Context, terms: &MigrationTerms, request: &RegistryRequest) -> RegistryAnswer {
    if witness_mismatch(context, terms).is_some() {
        return RegistryAnswer::Unreachable;
    }
    context.registry.as_ref().map_or(RegistryAnswer::Unreachable, |registry| registry.ask(request))
}

/// Asks in a thread of its own, which passes on the answer. Returns false if the thread cannot be started.
pub fn ask_in_thread(
    context: &Arc<Context>,
    terms: &MigrationTerms,
    request: RegistryRequest,
    answered: impl FnOnce(RegistryAnswer) + Send + 'static,
) -> bool {
    let (context, terms) = (Arc::clone(context), terms.clone());
    let asks = move || answered(ask(&context, &terms, &request));
    let asking = thread::Builder::new().name("registry".to_owned()).spawn(asks);
    if let Err(error) = &asking {
        warn!(%error, "cannot query the registry");
    }
    asking.is_ok()
}

/// Publishes that the registry has been silent for long, so that the migration now waits for an operator.
pub fn publish_silence(vm: &VmName, progress: &mut Progress) {
    progress.phase = Phase::InDoubt;
    progress.standing = Standing::InDoubt;
    progress.message =
        Some(format!("the registry does not answer; start the witness, or see `whimbrel recover {vm}`"));
}

/// Returns a message if the configuration does not name the registry with which a migration began.
pub fn witness_mismatch(context: &Context, terms: &MigrationTerms) -> Option<String> {
    let theirs = terms.witness.as_ref()?;
    let ours = context.config.registry.as_ref();
    (ours != Some(theirs)).then(|| {
        let names = ours.map_or("none".to_owned(), |ours| format!("the one at {ours}"));
        format!(
            "{} began with the ownership registry at {theirs}, and the configuration names {names}, which \
             does not decide this migration; name {theirs} under [registry] again, or see `whimbrel recover \
             {}`",
            terms.migration, terms.migration.vm
        )
    })
}

/// Reason for which a VM cannot be moved with this registry.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// The registry does not answer.
    #[error("the registry at {0} does not answer; start the witness, or make sure that it can be reached")]
    Unreachable(HostId),
    /// Another host owns the VM.
    #[error("according to the ownership registry {vm} belongs to {owner}, since epoch {epoch}")]
    Other {
        /// The VM.
        vm: VmName,
        /// The owner.
        owner: HostId,
        /// The epoch since which it is the owner.
        epoch: Epoch,
    },
    /// No registry is configured.
    #[error("no ownership registry is configured here")]
    NoRegistry,
}

/// Returns the registry, and the host that keeps it; none if no registry is configured.
fn configured(context: &Context) -> Option<(&dyn Registry, &HostId)> {
    Some((context.registry.as_deref()?, context.config.registry.as_ref()?))
}

/// Returns the registry's record of a VM; an error if the registry does not answer.
fn read(registry: &dyn Registry, witness: &HostId, vm: &VmName) -> Result<Option<Ownership>, OwnerError> {
    match registry.read(vm) {
        RegistryAnswer::Record(record) => Ok(record),
        RegistryAnswer::Unreachable | RegistryAnswer::Unknown => {
            Err(OwnerError::Unreachable(witness.clone()))
        }
    }
}

/// Makes this host the owner in place of the expected record, and returns the resulting record.
fn set_owner(
    context: &Context,
    (registry, witness): (&dyn Registry, &HostId),
    vm: &VmName,
    found: Option<&Ownership>,
    epoch: Epoch,
) -> Result<Option<Ownership>, OwnerError> {
    let new = Ownership { epoch, owner: context.config.host.clone(), offer: None, released: false };
    let expected = found.map(|record| (record.epoch, record.owner.clone()));
    match registry.compare_and_set(vm, expected, new) {
        RegistryAnswer::Record(record) => Ok(record),
        RegistryAnswer::Unknown => read(registry, witness, vm),
        RegistryAnswer::Unreachable => Err(OwnerError::Unreachable(witness.clone())),
    }
}

/// Returns the epoch in which this host is the owner of a VM in the registry; a VM that the registry does not know, or
/// that its owner has released, is registered. None if no registry is configured.
pub fn owned_since(context: &Context, vm: &VmName) -> Result<Option<Epoch>, OwnerError> {
    let Some((registry, witness)) = configured(context) else { return Ok(None) };
    let mut found = read(registry, witness, vm)?;
    let epoch = match &found {
        None => Some(Epoch(0)),
        Some(record) => record.released.then(|| record.epoch.next()),
    };
    if let Some(epoch) = epoch {
        found = set_owner(context, (registry, witness), vm, found.as_ref(), epoch)?;
    }
    match found {
        Some(record) if record.owner == context.config.host => Ok(Some(record.epoch)),
        Some(record) => Err(OwnerError::Other { vm: vm.clone(), owner: record.owner, epoch: record.epoch }),
        None => Err(OwnerError::Unreachable(witness.clone())),
    }
}

/// Returns the reason for which a migration of a VM from this host would be refused because of its owner. Changes no
/// record.
pub fn refused(context: &Context, vm: &VmName) -> Option<Finding> {
    let (registry, witness) = configured(context)?;
    let error = match read(registry, witness, vm) {
        Ok(Some(record)) if record.owner != context.config.host && !record.released => {
            OwnerError::Other { vm: vm.clone(), owner: record.owner, epoch: record.epoch }
        }
        Ok(_) => return None,
        Err(error) => error,
    };
    Some(finding(&error))
}

/// Converts an error to a finding.
pub fn finding(error: &OwnerError) -> Finding {
    let (code, advice) = match error {
        OwnerError::Unreachable(_) => (
            "registry-unusable",
            "start the witness, make sure that the source can reach it, or remove [registry] on both hosts"
                .to_owned(),
        ),
        OwnerError::NoRegistry => {
            ("registry-unusable", "name a witness, a third host, under [registry]".to_owned())
        }
        OwnerError::Other { vm, owner, .. } => (
            "owned-elsewhere",
            format!(
                "migrate it from {owner}; if it does not run there and never will again, run `whimbrel vm \
                 claim {vm}` here"
            ),
        ),
    };
    Finding { severity: Severity::Blocker, code: code.to_owned(), what: error.to_string(), advice }
}

/// Owner according to the registry, before a claim.
pub(crate) enum RegisteredOwner {
    /// This host is the owner already.
    Held,
    /// Another host is the owner, or none.
    Other(Option<Ownership>),
}

/// Returns the registry's record of a VM that this host claims.
///
/// # Errors
/// When no registry is configured, or it does not answer.
pub(crate) fn read_owner(context: &Context, vm: &VmName) -> Result<RegisteredOwner, OwnerError> {
    let (registry, witness) = configured(context).ok_or(OwnerError::NoRegistry)?;
    Ok(match read(registry, witness, vm)? {
        Some(record) if record.owner == context.config.host && !record.released => RegisteredOwner::Held,
        other => RegisteredOwner::Other(other),
    })
}

/// Makes this host the owner of a VM, whichever host is: only an operator can decide that this is right. The epoch is
/// larger than any that is known here, so that no request of an earlier migration matches its expected record.
///
/// # Errors
/// When the registry does not answer, or another host has become the owner in between.
pub fn claim(
    context: &Context,
    vm: &VmName,
    found: Option<&Ownership>,
    largest: Epoch,
) -> Result<Epoch, OwnerError> {
    let configured = configured(context).ok_or(OwnerError::NoRegistry)?;
    let epoch = found.map_or(largest, |record| record.epoch.max(largest)).next();
    match set_owner(context, configured, vm, found, epoch)? {
        Some(record) if record.owner == context.config.host => Ok(record.epoch),
        Some(record) => Err(OwnerError::Other { vm: vm.clone(), owner: record.owner, epoch: record.epoch }),
        None => Err(OwnerError::Unreachable(configured.1.clone())),
    }
}

/// Releases a VM that has ended here and was forgotten, if this host is its owner. Returns true if that succeeded; none
/// if there is nothing to release.
pub(crate) fn release(context: &Context, vm: &VmName) -> Option<bool> {
    let (registry, witness) = configured(context)?;
    let record = match read(registry, witness, vm) {
        Ok(record) => record.filter(|record| record.owner == context.config.host && !record.released)?,
        Err(_) => return Some(false),
    };
    let expected = (record.epoch, record.owner.clone());
    let new = Ownership { released: true, offer: None, ..record };
    let answer = registry.compare_and_set(vm, Some(expected), new);
    Some(matches!(answer, RegistryAnswer::Record(Some(record)) if record.released))
}
