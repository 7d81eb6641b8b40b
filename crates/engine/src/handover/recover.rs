//! What an operator is told, and can decide, when a handover cannot end by itself.
//!
//! Contact lost for good after COMMITTED, without a register, or with a register that the other side has won: the two
//! agents cannot know more than their journals. [`advise_source`] and [`advise_destination`] say what is known here,
//! which decisions there are, and what each of them risks.

use serde::{Deserialize, Serialize};

use super::Terms;
use super::destination::DestinationState;
use super::source::SourceState;

/// What an operator can decide, on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "kebab-case")]
pub enum Decision {
    /// The guest is to run on this side.
    RunHere {
        /// On the source, also when the destination owns the VM in the register.
        force: bool,
    },
    /// The guest is to run on the other side, or nowhere: this side's copy is given up.
    RunElsewhere,
}

/// A decision that can be made, and its price.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// What to decide.
    pub decision: Decision,
    /// What it leads to.
    pub then: String,
    /// What has to be true for it to be right, and what happens if it is not.
    pub risk: String,
}

/// The page that `whimbrel recover` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// What this side's journal proves.
    pub known: Vec<String>,
    /// What it cannot know.
    pub unknown: Vec<String>,
    /// What can be decided; empty where nothing needs to be.
    pub choices: Vec<Choice>,
}

const TWO: &str = "If it does run there, two copies write to the same disks and destroy them. Make sure that the \
                   other host is off or cut from storage and network before you decide this";

/// What the source's operator is told.
pub fn advise_source(terms: &Terms, state: &SourceState) -> Advice {
    let there = &terms.destination;
    let epoch = terms.epoch();
    match state {
        SourceState::Committed { incarnation, .. } => Advice {
            known: vec![
                format!(
                    "migration {} was committed to {there} (process {})",
                    terms.migration, incarnation.pid
                ),
                "the guest does not run on this host; its memory is held as it was when it was stopped"
                    .to_owned(),
                format!("neither RUNNING nor REFUSED of epoch {epoch} has arrived"),
                register_line(terms),
            ],
            unknown: vec![format!(
                "whether the guest runs on {there}, and whether it has written to its disks"
            )],
            choices: committed_choices(terms),
        },
        SourceState::Reclaiming { force, .. } => Advice {
            known: vec![
                "this host is asking the register of owners to give the VM back".to_owned(),
                "the guest does not run on this host".to_owned(),
            ],
            unknown: vec![
                "what the register will say; until it does, nothing can be decided here".to_owned(),
            ],
            choices: if *force { vec![] } else { vec![forced(terms)] },
        },
        SourceState::Bereft { .. } => Advice {
            known: vec![
                format!("this host's copy of the guest was lost during migration {}", terms.migration),
                format!("no entry says that the guest ran on after it was stopped for {there}"),
                register_line(terms),
            ],
            unknown: vec![format!("whether {there} has a complete copy, and whether it runs")],
            choices: vec![
                Choice {
                    decision: Decision::RunHere { force: false },
                    then: "this host owns the VM again; start it from its disks".to_owned(),
                    risk: format!("what the guest had only in memory is lost. {TWO}: {there}"),
                },
                Choice {
                    decision: Decision::RunElsewhere,
                    then: format!("this host forgets the VM; {there} keeps what it has"),
                    risk: format!("if {there} has no complete copy, nobody has one"),
                },
            ],
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

/// What the destination's operator is told.
pub fn advise_destination(terms: &Terms, state: &DestinationState) -> Advice {
    let there = &terms.source;
    let epoch = terms.epoch();
    match state {
        DestinationState::Ready { .. } => Advice {
            known: vec![
                format!(
                    "a complete copy of the guest is loaded here for migration {}, paused",
                    terms.migration
                ),
                "it has never run, and nothing here says whether it is to run".to_owned(),
                register_line(terms),
            ],
            unknown: vec![format!("whether {there} committed epoch {epoch}, or went on running the guest")],
            choices: vec![
                Choice {
                    decision: Decision::RunHere { force: false },
                    then: "the guest runs here from the moment at which it was stopped".to_owned(),
                    risk: format!(
                        "right only if {there} is gone and did not go on running the guest after that moment: what it \
                         wrote since does not fit this copy's memory, and the disks are destroyed. {TWO}: {there}"
                    ),
                },
                Choice {
                    decision: Decision::RunElsewhere,
                    then: format!("this copy is thrown away and {there}, when it comes back, is told so"),
                    risk: format!("if {there} does not come back, this was the only copy"),
                },
            ],
        },
        DestinationState::Taking { .. } | DestinationState::Refusing | DestinationState::Bereft => Advice {
            known: vec!["the register of owners decides, and is being asked".to_owned()],
            unknown: vec!["what it will say".to_owned()],
            choices: vec![],
        },
        DestinationState::Starting { again: true, .. } => Advice {
            known: vec!["the guest is this host's, but QEMU does not continue it".to_owned()],
            unknown: vec![
                "whether a `cont` sent before the agent restarted let it run for a while".to_owned(),
            ],
            choices: vec![Choice {
                decision: Decision::RunElsewhere,
                then: format!("this copy is thrown away and {there} continues its own"),
                risk: format!(
                    "right only if the guest has not run here: otherwise its disks do not fit {there}'s memory"
                ),
            }],
        },
        DestinationState::Starting { .. } | DestinationState::Active { .. } => {
            settled(format!("the guest is this host's since epoch {epoch}"))
        }
        DestinationState::Crashed { ran: true } => settled(format!(
            "the guest was this host's since epoch {epoch} and crashed here; start it from its disks"
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

fn committed_choices(terms: &Terms) -> Vec<Choice> {
    let there = &terms.destination;
    let mut choices = vec![if terms.register.is_some() {
        Choice {
            decision: Decision::RunHere { force: false },
            then: format!("the register is asked; the guest continues here if {there} has not taken it"),
            risk: "none: exactly one side succeeds".to_owned(),
        }
    } else {
        Choice {
            decision: Decision::RunHere { force: false },
            then: "the guest continues here from the moment at which it was stopped".to_owned(),
            risk: format!("right only if it never ran on {there}. {TWO}: {there}"),
        }
    }];
    if terms.register.is_some() {
        choices.push(forced(terms));
    }
    choices.push(Choice {
        decision: Decision::RunElsewhere,
        then: format!("the copy held here is thrown away; {there} has the guest"),
        risk: format!("if {there} cannot run it, its memory is lost and it has to be started from its disks"),
    });
    choices
}

fn forced(terms: &Terms) -> Choice {
    let there = &terms.destination;
    Choice {
        decision: Decision::RunHere { force: true },
        then: format!("this host takes the VM in the register, even from {there}, and continues the guest"),
        risk: format!(
            "right only if {there} took it and never ran it: a guest that ran there has changed its disks. {TWO}: \
             {there}"
        ),
    }
}

fn register_line(terms: &Terms) -> String {
    if terms.register.is_some() {
        "a register of owners is configured: no side runs the guest without winning there".to_owned()
    } else {
        "no register of owners is configured: only the two journals know".to_owned()
    }
}

fn settled(known: String) -> Advice {
    Advice { known: vec![known], unknown: vec![], choices: vec![] }
}
