//! Advice for an operator, and the possible decisions, where a handover cannot end by itself.
//!
//! Contact is lost for good after COMMITTED, without a registry, or with a registry that the peer has won: the two
//! agents cannot know more than their journals. [`advise_source`] and [`advise_destination`] describe what is known at
//! a host, which decisions there are, and what each of them risks.

use serde::{Deserialize, Serialize};

use super::destination::DestinationState;
use super::source::SourceState;
use super::terms::MigrationTerms;

pub use super::operator::OperatorDecision;

/// A possible decision, and its risk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The decision.
    pub decision: OperatorDecision,
    /// Its consequence.
    pub then: String,
    /// Condition under which it is right, and the damage if the condition does not hold.
    pub risk: String,
}

/// Output of `whimbrel recover`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// Facts that this host's journal proves.
    pub known: Vec<String>,
    /// Facts that this host cannot know.
    pub unknown: Vec<String>,
    /// Possible decisions; empty where none is needed.
    pub choices: Vec<Choice>,
}

const TWO: &str = "If it does run there, two copies write to the same disks and destroy them, or, where \
                   disks were copied, their disks diverge. Before you decide this, make sure that the other \
                   host is off, or cut off from storage and network";

const GONE: &str = "only if the registry is lost for good, or was created anew: a registry that returns does \
                    not know of this decision, and may give the VM to the other host";

/// Returns the advice for the source's operator.
pub fn advise_source(terms: &MigrationTerms, state: &SourceState) -> Advice {
    let there = &terms.destination;
    let epoch = terms.epoch();
    match state {
        SourceState::Committed { has_run: true, .. } => Advice {
            known: vec![
                format!("the guest has been running on {there} since epoch {epoch}, or has crashed there"),
                format!("some of its memory was only on this host when {there} last reported"),
            ],
            unknown: vec![format!("whether {there} has received all of its memory")],
            choices: vec![discard_copy_choice(terms)],
        },
        SourceState::Committed { incarnation, .. } => Advice {
            known: vec![
                format!(
                    "migration {} was committed to {there} (process {})",
                    terms.migration, incarnation.pid
                ),
                "the guest does not run on this host; its memory is kept as it was when it was stopped"
                    .to_owned(),
                format!("neither RUNNING nor REFUSED of epoch {epoch} has arrived"),
                registry_line(terms),
            ],
            unknown: vec![format!(
                "whether the guest runs on {there}, and whether it has written to its disks"
            )],
            choices: committed_choices(terms),
        },
        SourceState::Reclaiming { force, .. } => Advice {
            known: vec![
                "this host is asking the ownership registry to give the VM back".to_owned(),
                "the guest does not run on this host".to_owned(),
            ],
            unknown: vec!["what the registry will decide".to_owned()],
            choices: [(!force).then(|| forced_choice(terms))]
                .into_iter()
                .flatten()
                .chain(choices_without_registry(terms))
                .collect(),
        },
        SourceState::QemuLost { .. } => Advice {
            known: vec![
                format!("this host's copy of the guest was lost during migration {}", terms.migration),
                format!("no journal entry shows that the guest ran after it was stopped for {there}"),
                registry_line(terms),
            ],
            unknown: vec![format!("whether {there} has a complete copy, and whether it runs")],
            choices: qemu_lost_choices(terms),
        },
        SourceState::Idle
        | SourceState::Prepared { .. }
        | SourceState::Stopped { .. }
        | SourceState::Aborting
        | SourceState::Aborted => {
            already_over(format!("this host owns the guest: epoch {epoch} was not committed"))
        }
        SourceState::Returning | SourceState::Returned => already_over(format!(
            "this host owns the guest: epoch {epoch} was committed, and the guest was returned"
        )),
        SourceState::Done { .. } => {
            already_over(format!("{there} owns the guest: epoch {epoch} is complete"))
        }
    }
}

/// Returns the advice for the destination's operator.
pub fn advise_destination(terms: &MigrationTerms, state: &DestinationState) -> Advice {
    let there = &terms.source;
    let epoch = terms.epoch();
    match state {
        DestinationState::Ready { run, .. } => Advice {
            known: vec![
                format!(
                    "a complete copy of the guest is loaded here for migration {}, paused",
                    terms.migration
                ),
                "it has never run, and this host does not know whether it is to run".to_owned(),
                registry_line(terms),
            ],
            unknown: vec![format!("whether {there} committed epoch {epoch}, or continued running the guest")],
            choices: ready_choices(terms, *run),
        },
        DestinationState::Acquiring { .. } => Advice {
            known: vec![
                format!("{there} committed the guest to this host, where a complete copy is loaded, paused"),
                "the ownership registry decides, and is being asked".to_owned(),
            ],
            unknown: vec!["what the registry will decide".to_owned()],
            choices: acquiring_choices(terms),
        },
        DestinationState::Refusing => Advice {
            known: vec![
                "this host's copy cannot run, and has never run".to_owned(),
                format!("the ownership registry is being asked to give the VM to {there}"),
            ],
            unknown: vec!["what the registry will decide".to_owned()],
            choices: vec![Choice {
                decision: OperatorDecision::WithoutRegistry { run_here: false },
                then: format!("{there} is notified that this copy cannot run, without asking the registry"),
                risk: GONE.to_owned(),
            }],
        },
        DestinationState::QemuLost => advise_rebooted_destination(terms),
        DestinationState::Starting { again: true, .. } => Advice {
            known: vec![if terms.registry.is_some() {
                "according to the registry this host owned the guest; it is asked again before the guest is \
                 resumed"
                    .to_owned()
            } else {
                "this host owns the guest, but QEMU does not resume it".to_owned()
            }],
            unknown: vec![
                "whether a `cont` sent before the agent restarted let it run for a while".to_owned(),
            ],
            choices: starting_choices(terms),
        },
        DestinationState::Completing { .. } => already_over(format!(
            "this host has owned the guest since epoch {epoch}, and runs it; some of its memory is still at \
             {there}: make sure that {there} can be reached, and do not end its QEMU there"
        )),
        DestinationState::Starting { .. } | DestinationState::Active { .. } => {
            already_over(format!("this host has owned the guest since epoch {epoch}"))
        }
        DestinationState::Crashed { has_run: true } => already_over(format!(
            "this host had owned the guest since epoch {epoch}, and it crashed here; start it from its disks \
             on this host"
        )),
        DestinationState::Crashed { has_run: false } => already_over(format!(
            "this host's copy of epoch {epoch} is lost and may have run; {there} may have the guest's memory \
             as it was when it was stopped: decide there"
        )),
        DestinationState::Idle
        | DestinationState::Prepared
        | DestinationState::Refused
        | DestinationState::CopyDestroyed => already_over(format!(
            "this host does not own the guest: it has not run here in epoch {epoch}, and will not"
        )),
    }
}

/// Returns the advice for a destination whose copy was lost in a reboot.
fn advise_rebooted_destination(terms: &MigrationTerms) -> Advice {
    let there = &terms.source;
    if terms.registry.is_none() {
        return Advice {
            known: vec!["this host was rebooted, and its copy of the guest is lost".to_owned()],
            unknown: vec![format!("whether the guest has run here: {there} may know, and is being asked")],
            choices: vec![Choice {
                decision: OperatorDecision::DiscardCopy,
                then: format!(
                    "{there} is not asked any more: it keeps its copy, and its operator decides; images of \
                     copied disks stay here"
                ),
                risk: format!(
                    "none for the guest: this host has no copy to run. Choose this if {there} is lost for \
                     good"
                ),
            }],
        };
    }
    Advice {
        known: vec!["this host was rebooted, and its copy of the guest is lost".to_owned()],
        unknown: vec![format!(
            "whether the guest has run here: the ownership registry and {there} are being asked"
        )],
        choices: vec![Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: false },
            then: format!(
                "{there} is notified that this copy is lost and may have run; it keeps its own copy, and \
                 its operator decides"
            ),
            risk: GONE.to_owned(),
        }],
    }
}

fn ready_choices(terms: &MigrationTerms, run: bool) -> Vec<Choice> {
    let there = &terms.source;
    let then = if run {
        "the guest runs here from the moment at which it was stopped"
    } else {
        "this host owns the guest from now on; it stays paused, as its user left it"
    };
    let run_here = |decision, only: &str| Choice {
        decision,
        then: then.to_owned(),
        risk: format!(
            "correct only if {there} is lost and did not run the guest after that moment: its later writes \
             do not fit this copy's memory, and the disks would be destroyed. {only}{TWO}: {there}"
        ),
    };
    let mut choices = vec![
        run_here(OperatorDecision::RunHere { force: false }, ""),
        Choice {
            decision: OperatorDecision::DiscardCopy,
            then: format!("this copy is discarded, and {there} is notified when it returns"),
            risk: format!("if {there} does not return, this was the only copy"),
        },
    ];
    if terms.registry.is_some() {
        choices
            .push(run_here(OperatorDecision::WithoutRegistry { run_here: true }, &format!("And {GONE}. ")));
    }
    choices
}

fn acquiring_choices(terms: &MigrationTerms) -> Vec<Choice> {
    let there = &terms.source;
    vec![
        Choice {
            decision: OperatorDecision::DiscardCopy,
            then: format!("the registry records {there} as the owner, and this copy is discarded"),
            risk: format!("if {there} does not return, this was the only copy"),
        },
        Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: true },
            then: "the guest runs here from the moment at which it was stopped".to_owned(),
            risk: format!("correct only if {there} has not taken it back, and {GONE}. {TWO}: {there}"),
        },
        Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: false },
            then: format!("this copy is discarded, and {there} is notified when it returns"),
            risk: format!("{GONE}. If {there} does not return, this was the only copy"),
        },
    ]
}

fn starting_choices(terms: &MigrationTerms) -> Vec<Choice> {
    let there = &terms.source;
    let discard_copy = |decision, only: &str| Choice {
        decision,
        then: format!("this copy is discarded, and {there} resumes its own copy"),
        risk: format!(
            "correct only if the guest has not run here: otherwise its disks do not fit {there}'s \
             memory{only}"
        ),
    };
    let mut choices = vec![discard_copy(OperatorDecision::DiscardCopy, "")];
    if terms.registry.is_some() {
        choices.push(Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: true },
            then: "the guest is resumed here".to_owned(),
            risk: format!(
                "correct only if {there}'s operator has not taken it back, and {GONE}. {TWO}: {there}"
            ),
        });
        choices.push(discard_copy(
            OperatorDecision::WithoutRegistry { run_here: false },
            &format!(". And {GONE}"),
        ));
    }
    choices
}

fn qemu_lost_choices(terms: &MigrationTerms) -> Vec<Choice> {
    let there = &terms.destination;
    let run_here = |decision, only: &str| Choice {
        decision,
        then: "this host owns the VM again; start it from its disks".to_owned(),
        risk: format!("the guest's memory is lost. {only}{TWO}: {there}"),
    };
    let mut choices = vec![run_here(OperatorDecision::RunHere { force: false }, "")];
    if terms.registry.is_some() {
        choices.push(run_here(
            OperatorDecision::RunHere { force: true },
            &format!("The registry gives the VM to this host even if {there} has taken it. "),
        ));
        choices
            .push(run_here(OperatorDecision::WithoutRegistry { run_here: true }, &format!("And {GONE}. ")));
    }
    choices.push(Choice {
        decision: OperatorDecision::DiscardCopy,
        then: format!("this host forgets the VM; {there} keeps its copy"),
        risk: format!("if {there} has no complete copy, there is none"),
    });
    choices
}

/// Returns the source's two decisions without the registry.
fn choices_without_registry(terms: &MigrationTerms) -> [Choice; 2] {
    let there = &terms.destination;
    [
        Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: true },
            then: "the guest continues here from the moment at which it was stopped".to_owned(),
            risk: format!("correct only if it never ran on {there}, and {GONE}. {TWO}: {there}"),
        },
        Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: false },
            then: format!("the copy kept here is discarded; {there} owns the guest"),
            risk: format!(
                "if {there} does not have it, or cannot run it, its memory is lost and it must be started \
                 from its disks; and {GONE}"
            ),
        },
    ]
}

fn committed_choices(terms: &MigrationTerms) -> Vec<Choice> {
    let there = &terms.destination;
    let mut choices = vec![if terms.registry.is_some() {
        Choice {
            decision: OperatorDecision::RunHere { force: false },
            then: format!("the registry is asked; the guest continues here if {there} has not taken it"),
            risk: "none: exactly one side succeeds".to_owned(),
        }
    } else {
        Choice {
            decision: OperatorDecision::RunHere { force: false },
            then: "the guest continues here from the moment at which it was stopped".to_owned(),
            risk: format!("correct only if it never ran on {there}. {TWO}: {there}"),
        }
    }];
    if terms.registry.is_some() {
        let [run_here, _] = choices_without_registry(terms);
        choices.extend([forced_choice(terms), run_here]);
    }
    choices.push(discard_copy_choice(terms));
    choices
}

fn discard_copy_choice(terms: &MigrationTerms) -> Choice {
    let there = &terms.destination;
    Choice {
        decision: OperatorDecision::DiscardCopy,
        then: format!("the copy kept here is discarded; {there} owns the guest"),
        risk: format!(
            "if {there} cannot run it, or does not have all of its memory yet, its memory is lost and it \
             must be started from its disks"
        ),
    }
}

fn forced_choice(terms: &MigrationTerms) -> Choice {
    let there = &terms.destination;
    Choice {
        decision: OperatorDecision::RunHere { force: true },
        then: format!("this host claims the VM in the registry, even from {there}, and resumes the guest"),
        risk: format!(
            "correct only if {there} acquired it and never ran it: a guest that ran there has changed its \
             disks. {TWO}: {there}"
        ),
    }
}

fn registry_line(terms: &MigrationTerms) -> String {
    if terms.registry.is_some() {
        "an ownership registry is configured: a host runs the guest only if the registry records it as the \
         owner"
            .to_owned()
    } else {
        "no ownership registry is configured: only the journals of the two hosts decide".to_owned()
    }
}

fn already_over(known: String) -> Advice {
    Advice { known: vec![known], unknown: vec![], choices: vec![] }
}
