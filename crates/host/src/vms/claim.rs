//! Correction of a VM's owner in the ownership registry, by an operator.

use tracing::info;

use crate::Context;
use crate::ownership::{self, RegisteredOwner};
use api::{ClaimReport, ClaimRequest, Problem, ProblemKind};
use store::journal::{JournalError, VmRecord};

/// Makes this host the owner of one of its VMs in the ownership registry, or reports the risk.
pub fn claim(context: &Context, record: &VmRecord, request: &ClaimRequest) -> Result<ClaimReport, Problem> {
    let vm = &record.vm;
    if record.process(&context.boot_id).is_err() {
        let error = format!("{vm} has ended here: a VM that does not run needs no owner");
        return Err(Problem::new(ProblemKind::Conflict, error, format!("run `whimbrel vm forget {vm}`")));
    }
    let problem = |error: ownership::OwnerError| {
        let found = ownership::finding(&error);
        Problem::new(ProblemKind::Unavailable, found.what, found.advice)
    };
    let found = match ownership::read_owner(context, vm).map_err(problem)? {
        RegisteredOwner::Held => {
            let owner = Some(context.config.host.clone());
            return Ok(ClaimReport { vm: vm.clone(), owner, risked: Vec::new(), done: true });
        }
        RegisteredOwner::Other(found) => found,
    };
    let risked = found.iter().filter(|found| !found.released).flat_map(|found| {
        let (owner, epoch) = (&found.owner, found.epoch);
        [
            format!(
                "according to the registry {owner} may run {vm}, since epoch {epoch}: if it does, two copies \
                 run, and disks that both write to are destroyed"
            ),
            format!(
                "an unfinished migration of {vm} from or to {owner} stays in doubt, and an operator must \
                 decide it"
            ),
            format!(
                "first make sure that neither {owner} runs it (`whimbrel vm show {vm}` there), nor any host \
                 to which {owner} has migrated it"
            ),
        ]
    });
    let mut report = ClaimReport {
        vm: vm.clone(),
        owner: found.as_ref().map(|found| found.owner.clone()),
        risked: risked.collect(),
        done: false,
    };
    if report.risked.is_empty() || request.accept_risk {
        let failed =
            |error: JournalError| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log");
        let largest = context.journal.largest_epoch(vm).map_err(failed)?;
        let epoch = ownership::claim(context, vm, found.as_ref(), largest).map_err(problem)?;
        context.journal.learn_epoch(vm, epoch).map_err(failed)?;
        info!(%vm, %epoch, was = ?found, "claimed in the ownership registry");
        report.done = true;
    }
    Ok(report)
}
