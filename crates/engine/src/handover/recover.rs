//! Advice for an operator, and the possible decisions, where a handover cannot end by itself.
//!
//! Contact is lost for good after COMMITTED, without a registry, or with a registry that the peer has won: the two
//! agents cannot know more than their journals. [`advise_source`] and [`advise_destination`] describe what is known at
//! a host, which decisions there are, and what each of them risks.

use serde::{Deserialize, Serialize};

use super::MigrationTerms;
use super::destination::DestinationState;
use super::source::SourceState;

/// Decision of an operator, at either host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "kebab-case")]
pub enum OperatorDecision {
    /// The guest is to run at this host.
    RunHere {
        /// At the source: also if the destination owns the VM in the registry.
        force: bool,
    },
    /// The guest is to run at the other host, or nowhere: this host's copy is given up.
    RunElsewhere,
    /// One of the two by the operator's decision alone: the registry is lost, and is not asked.
    WithoutRegistry {
        /// True if the guest is to run at this host.
        run_here: bool,
    },
}

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

const TWO: &str = "If it does run there, two copies write to the same disks and destroy them, or each to images of its own \
                   where disks were copied. Make sure that the other host is off or cut from storage and network before \
                   you decide this";

const GONE: &str = "only if the registry is lost for good, or has been made anew: one that comes back does not know of \
                    this decision, and may give the VM to the other host";

/// Returns the advice for the source's operator.
pub fn advise_source(terms: &MigrationTerms, state: &SourceState) -> Advice {
    let there = &terms.destination;
    let epoch = terms.epoch();
    match state {
        SourceState::Committed { ran: true, .. } => Advice {
            known: vec![
                format!("the guest runs on {there} since epoch {epoch}, or has crashed there since"),
                format!("some of its memory was only on this host when {there} was last heard of"),
            ],
            unknown: vec![format!("whether {there} has all of it by now")],
            choices: vec![run_elsewhere_choice(terms)],
        },
        SourceState::Committed { incarnation, .. } => Advice {
            known: vec![
                format!(
                    "migration {} was committed to {there} (process {})",
                    terms.migration, incarnation.pid
                ),
                "the guest does not run on this host; its memory is held as it was when it was stopped"
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
            unknown: vec!["what the registry will say".to_owned()],
            choices: [(!force).then(|| forced_choice(terms))]
                .into_iter()
                .flatten()
                .chain(choices_without_registry(terms))
                .collect(),
        },
        SourceState::QemuLost { .. } => Advice {
            known: vec![
                format!("this host's copy of the guest was lost during migration {}", terms.migration),
                format!("no entry says that the guest ran on after it was stopped for {there}"),
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
            settled(format!("the guest is this host's: epoch {epoch} was not committed"))
        }
        SourceState::Returning | SourceState::Returned => {
            settled(format!("the guest is this host's: epoch {epoch} was committed and returned"))
        }
        SourceState::Done { .. } => settled(format!("the guest is {there}'s: epoch {epoch} is done")),
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
                "it has never run, and nothing here says whether it is to run".to_owned(),
                registry_line(terms),
            ],
            unknown: vec![format!("whether {there} committed epoch {epoch}, or went on running the guest")],
            choices: ready_choices(terms, *run),
        },
        DestinationState::Taking { .. } => Advice {
            known: vec![
                format!("{there} committed the guest to this host, where a complete copy is loaded, paused"),
                "the ownership registry decides, and is being asked".to_owned(),
            ],
            unknown: vec!["what it will say".to_owned()],
            choices: vec![
                Choice {
                    decision: OperatorDecision::RunElsewhere,
                    then: format!(
                        "the registry records that {there} has the guest, and this copy is discarded"
                    ),
                    risk: format!("if {there} does not come back, this was the only copy"),
                },
                Choice {
                    decision: OperatorDecision::WithoutRegistry { run_here: true },
                    then: "the guest runs here from the moment at which it was stopped".to_owned(),
                    risk: format!(
                        "right only if it has not been taken back by {there}, and {GONE}. {TWO}: {there}"
                    ),
                },
                Choice {
                    decision: OperatorDecision::WithoutRegistry { run_here: false },
                    then: format!("this copy is discarded, and {there} learns of it when it comes back"),
                    risk: format!("{GONE}. If {there} does not come back, this was the only copy"),
                },
            ],
        },
        DestinationState::Refusing => Advice {
            known: vec![
                "this host's copy cannot run, and never has".to_owned(),
                format!("the ownership registry is being asked to give the VM to {there}"),
            ],
            unknown: vec!["what it will say".to_owned()],
            choices: vec![Choice {
                decision: OperatorDecision::WithoutRegistry { run_here: false },
                then: format!("{there} learns that this copy cannot run, without an answer of the registry"),
                risk: GONE.to_owned(),
            }],
        },
        DestinationState::QemuLost if terms.registry.is_none() => Advice {
            known: vec!["this host was booted anew, and its copy of the guest is gone".to_owned()],
            unknown: vec![format!("whether the guest had run here: {there} may know, and is being asked")],
            choices: vec![Choice {
                decision: OperatorDecision::RunElsewhere,
                then: format!(
                    "{there} is not asked any more: it keeps what it has, what becomes of that is decided there, and what \
                     copied disks left here stays"
                ),
                risk: format!(
                    "none for the guest: this host has nothing to run. Decide so if {there} is gone for good"
                ),
            }],
        },
        DestinationState::QemuLost => Advice {
            known: vec!["this host was booted anew, and its copy of the guest is gone".to_owned()],
            unknown: vec![format!(
                "whether the guest had run here: the ownership registry is being asked, and {there}"
            )],
            choices: vec![Choice {
                decision: OperatorDecision::WithoutRegistry { run_here: false },
                then: format!(
                    "{there} learns that this copy is gone and may have run; it keeps its own, and its operator decides"
                ),
                risk: GONE.to_owned(),
            }],
        },
        DestinationState::Starting { again: true, .. } => Advice {
            known: vec![if terms.registry.is_some() {
                "the guest was this host's by the registry, which is asked again before it is continued"
                    .to_owned()
            } else {
                "the guest is this host's, but QEMU does not continue it".to_owned()
            }],
            unknown: vec![
                "whether a `cont` sent before the agent restarted let it run for a while".to_owned(),
            ],
            choices: starting_choices(terms),
        },
        DestinationState::Completing { .. } => settled(format!(
            "the guest is this host's since epoch {epoch} and runs; some of its memory is still at {there}: see that {there} \
             can be reached, and that nobody ends what it holds"
        )),
        DestinationState::Starting { .. } | DestinationState::Active { .. } => {
            settled(format!("the guest is this host's since epoch {epoch}"))
        }
        DestinationState::Crashed { ran: true } => settled(format!(
            "the guest was this host's since epoch {epoch} and crashed here; start it from the disks that it has here"
        )),
        DestinationState::Crashed { ran: false } => settled(format!(
            "this host's copy of epoch {epoch} is gone and may have run; {there} may hold the guest's memory as it was \
             when it was stopped: decide there"
        )),
        DestinationState::Idle
        | DestinationState::Prepared
        | DestinationState::Refused
        | DestinationState::Discarded => settled(format!(
            "the guest is not this host's: it has not run here in epoch {epoch}, and will not"
        )),
    }
}

fn ready_choices(terms: &MigrationTerms, run: bool) -> Vec<Choice> {
    let there = &terms.source;
    let then = if run {
        "the guest runs here from the moment at which it was stopped"
    } else {
        "the guest is here from now on, paused as its user left it"
    };
    let run_here = |decision, only: &str| Choice {
        decision,
        then: then.to_owned(),
        risk: format!(
            "right only if {there} is gone and did not go on running the guest after that moment: what it wrote since \
             does not fit this copy's memory, and the disks are destroyed. {only}{TWO}: {there}"
        ),
    };
    let mut choices = vec![
        run_here(OperatorDecision::RunHere { force: false }, ""),
        Choice {
            decision: OperatorDecision::RunElsewhere,
            then: format!("this copy is discarded, and {there} learns of it when it comes back"),
            risk: format!("if {there} does not come back, this was the only copy"),
        },
    ];
    if terms.registry.is_some() {
        choices
            .push(run_here(OperatorDecision::WithoutRegistry { run_here: true }, &format!("And {GONE}. ")));
    }
    choices
}

fn starting_choices(terms: &MigrationTerms) -> Vec<Choice> {
    let there = &terms.source;
    let give_up = |decision, only: &str| Choice {
        decision,
        then: format!("this copy is discarded, and {there} continues its own"),
        risk: format!(
            "right only if the guest has not run here: otherwise its disks do not fit {there}'s memory{only}"
        ),
    };
    let mut choices = vec![give_up(OperatorDecision::RunElsewhere, "")];
    if terms.registry.is_some() {
        choices.push(Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: true },
            then: "the guest is continued here".to_owned(),
            risk: format!(
                "right only if {there}'s operator has not taken it back, and {GONE}. {TWO}: {there}"
            ),
        });
        choices
            .push(give_up(OperatorDecision::WithoutRegistry { run_here: false }, &format!(". And {GONE}")));
    }
    choices
}

fn qemu_lost_choices(terms: &MigrationTerms) -> Vec<Choice> {
    let there = &terms.destination;
    let run_here = |decision, only: &str| Choice {
        decision,
        then: "this host owns the VM again; start it from its disks".to_owned(),
        risk: format!("what the guest had only in memory is lost. {only}{TWO}: {there}"),
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
        decision: OperatorDecision::RunElsewhere,
        then: format!("this host forgets the VM; {there} keeps what it has"),
        risk: format!("if {there} has no complete copy, nobody has one"),
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
            risk: format!("right only if it never ran on {there}, and {GONE}. {TWO}: {there}"),
        },
        Choice {
            decision: OperatorDecision::WithoutRegistry { run_here: false },
            then: format!("the copy that is held here is discarded; {there} has the guest"),
            risk: format!(
                "if {there} has it not, or cannot run it, its memory is lost and it has to be started from its disks; \
                 and {GONE}"
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
            risk: format!("right only if it never ran on {there}. {TWO}: {there}"),
        }
    }];
    if terms.registry.is_some() {
        let [run_here, _] = choices_without_registry(terms);
        choices.extend([forced_choice(terms), run_here]);
    }
    choices.push(run_elsewhere_choice(terms));
    choices
}

fn run_elsewhere_choice(terms: &MigrationTerms) -> Choice {
    let there = &terms.destination;
    Choice {
        decision: OperatorDecision::RunElsewhere,
        then: format!("the copy held here is discarded; {there} has the guest"),
        risk: format!(
            "if {there} cannot run it, or has not all of its memory yet, its memory is lost and it has to be started \
             from its disks"
        ),
    }
}

fn forced_choice(terms: &MigrationTerms) -> Choice {
    let there = &terms.destination;
    Choice {
        decision: OperatorDecision::RunHere { force: true },
        then: format!("this host takes the VM in the registry, even from {there}, and continues the guest"),
        risk: format!(
            "right only if {there} took it and never ran it: a guest that ran there has changed its disks. {TWO}: \
             {there}"
        ),
    }
}

fn registry_line(terms: &MigrationTerms) -> String {
    if terms.registry.is_some() {
        "an ownership registry is configured: no side runs the guest without winning there".to_owned()
    } else {
        "no ownership registry is configured: only the two journals know".to_owned()
    }
}

fn settled(known: String) -> Advice {
    Advice { known: vec![known], unknown: vec![], choices: vec![] }
}
