//! Failures of commands, with their exit codes.

use std::io;
use std::path::PathBuf;

use agent::daemon::StartError;
use api::report::SCHEMA;
use api::{ClientError, Problem, ProblemKind, with_causes};
use controller::ControllerError;
use controller::config::ControllerConfigError;
use engine::planner::Refusal;
use fleet::trace::TraceError;
use host::config::ConfigError;

use crate::Code;

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The agent returned an error, or cannot be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The connection to the agent was lost during a migration.
    #[error(
        "the agent stopped; it resumes the migration when it is restarted, see `whimbrel migrations` then"
    )]
    Unwatched(#[source] ClientError),
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The agent cannot start.
    #[error("the agent cannot start")]
    Agent(#[from] StartError),
    /// The configuration of the controller cannot be used.
    #[error(transparent)]
    ControllerConfig(#[from] ControllerConfigError),
    /// The controller cannot start.
    #[error("the controller cannot start")]
    Controller(#[from] ControllerError),
    /// A file cannot be read.
    #[error("cannot read {path}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a report.
    #[error("{path} contains no report", path = path.display())]
    NotAReport {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A report of another version.
    #[error(
        "{path} has schema {schema:?}, and this version reads {SCHEMA:?}: replay it with the version that wrote it",
        path = path.display()
    )]
    OtherReport {
        /// The file.
        path: PathBuf,
        /// The schema in the file.
        schema: String,
    },
    /// The report has no decision that could be repeated.
    #[error(
        "the report in {path} has no traces: nothing was decided, or the agent that wrote it recorded none",
        path = path.display()
    )]
    NoTraces {
        /// The file.
        path: PathBuf,
    },
    /// A trace of a simulation cannot be used.
    #[error("{path} cannot be simulated", path = path.display())]
    Trace {
        /// The file, or the name of a generated trace.
        path: PathBuf,
        /// The cause.
        source: TraceError,
    },
    /// A trace has no such day.
    #[error("{path} has no day {day}", path = path.display())]
    NoSuchDay {
        /// The file.
        path: PathBuf,
        /// The day.
        day: String,
    },
    /// An inventory, or settings of plans, cannot be read.
    #[error("{path} cannot be used", path = path.display())]
    Inventory {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A host, or what it is to be like, is not in the inventory.
    #[error("the inventory has no host {host}{other}")]
    NoSuchHost {
        /// The host.
        host: String,
        /// The platform that it is to be like.
        other: String,
    },
    /// There is no plan.
    #[error(transparent)]
    Unplanned(#[from] Refusal),
    /// A setting of a simulation is impossible.
    #[error("the simulation is impossible")]
    Setting(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A basic operation of the system failed.
    #[error("{what}")]
    System {
        /// The operation.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl Failure {
    /// Converts the error of a request that migrates a VM or decides about one: without an answer its result is
    /// unknown.
    pub(crate) fn of_migration(error: ClientError) -> Self {
        match error {
            ClientError::Lost(_) => Self::Unwatched(error),
            other => other.into(),
        }
    }

    /// Returns the exit code.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Client(ClientError::Problem(problem)) => match problem.kind {
                ProblemKind::BadRequest | ProblemKind::NotFound => Code::Usage,
                ProblemKind::Gone => Code::VmEnded,
                ProblemKind::Conflict
                | ProblemKind::Refused
                | ProblemKind::Unavailable
                | ProblemKind::Internal => Code::Failed,
            },
            Self::Config(_)
            | Self::ControllerConfig(_)
            | Self::File { .. }
            | Self::NotAReport { .. }
            | Self::OtherReport { .. }
            | Self::NoTraces { .. }
            | Self::Trace { .. }
            | Self::NoSuchDay { .. }
            | Self::Setting(_)
            | Self::Inventory { .. }
            | Self::NoSuchHost { .. }
            | Self::Controller(ControllerError::Identity(_))
            | Self::Agent(StartError::Identity(_)) => Code::Usage,
            Self::Unplanned(refusal) => {
                if refusal.is_bad_input() {
                    Code::Usage
                } else {
                    Code::Failed
                }
            }
            Self::Unwatched(_) => Code::InDoubt,
            Self::Client(_) | Self::Agent(_) | Self::Controller(_) | Self::System { .. } => Code::Failed,
        }
    }

    /// Returns the failure in the form of the API: for `--json`, and for the text.
    pub(crate) fn problem(&self) -> Problem {
        match self {
            Self::Client(ClientError::Problem(problem)) => problem.clone(),
            Self::Config(_)
            | Self::ControllerConfig(_)
            | Self::File { .. }
            | Self::NotAReport { .. }
            | Self::OtherReport { .. }
            | Self::NoTraces { .. }
            | Self::Trace { .. }
            | Self::NoSuchDay { .. }
            | Self::NoSuchHost { .. }
            | Self::Setting(_) => Problem::new(ProblemKind::BadRequest, with_causes(self), ""),
            Self::Inventory { .. } => {
                let advice = "see docs/operations/planning.md for all fields";
                Problem::new(ProblemKind::BadRequest, with_causes(self), advice)
            }
            Self::Unplanned(refusal) => {
                let is_bad_input = refusal.is_bad_input();
                let kind = if is_bad_input { ProblemKind::BadRequest } else { ProblemKind::Refused };
                Problem::new(kind, with_causes(self), refusal.advice())
            }
            Self::Agent(StartError::Identity(_)) | Self::Controller(ControllerError::Identity(_)) => {
                let advice = "see docs/operations/certificates.md for their required content";
                Problem::new(ProblemKind::BadRequest, with_causes(self), advice)
            }
            Self::Client(ClientError::NoAgent { .. } | ClientError::NoController { .. })
            | Self::Unwatched(_) => Problem::new(ProblemKind::Unavailable, with_causes(self), ""),
            _ => Problem::new(ProblemKind::Internal, with_causes(self), ""),
        }
    }
}
