//! The agent's API for users and programs: HTTP/1.1 with JSON on a Unix socket that only its owner may open.
//!
//! | method and path | request | answer |
//! |---|---|---|
//! | `GET /v1/agent` | | [`AgentInfo`] |
//! | `GET /v1/vms` | | list of [`VmSummary`] |
//! | `POST /v1/vms` | [`AdoptRequest`] | 201, [`Adopted`] |
//! | `POST /v1/vms/run` | [`RunRequest`] | 201, [`Adopted`] |
//! | `GET /v1/vms/{vm}` | | [`VmDetail`] |
//! | `DELETE /v1/vms/{vm}` | | 204 |
//! | `POST /v1/vms/{vm}/claim` | [`ClaimRequest`] | [`ClaimReport`] |
//! | `POST /v1/migrations` | [`MigrateRequest`] | 202, [`MigrationStatus`]; with `check_only` 200, [`CheckReport`] |
//! | `POST /v1/forecasts` | [`ForecastRequest`] | [`Forecast`] |
//! | `GET /v1/forecasts` | | [`CalibrationReport`] |
//! | `GET /v1/migrations` | | list of [`MigrationStatus`], newest first |
//! | `GET /v1/migrations/{vm}/{epoch}` | | [`MigrationStatus`] |
//! | `GET /v1/migrations/{vm}/{epoch}/progress` | | [`ProgressLine`](crate::progress::ProgressLine) per line, until it
//! is over |
//! | `GET /v1/migrations/{vm}/{epoch}/report` | | [`Report`](crate::report::Report) |
//! | `POST /v1/migrations/{vm}/{epoch}/cancel` | | [`CancelOutcome`] |
//! | `POST /v1/migrations/{vm}/{epoch}/recover` | [`RecoverRequest`] | [`RecoverReport`] |
//! | `POST /v1/migrations/{vm}/{epoch}/limits` | [`Limits`] | [`Limits`] |
//! | `GET /v1/images` | | list of [`LeftoverImage`] |
//! | `DELETE /v1/images/{vm}`, `…/{epoch}` | | the removed images |
//! | `DELETE /v1/images/{vm}/ended` | | the same, for a VM that ended here |
//! | `GET /v1/network` | | [`NetworkState`] |
//! | `DELETE /v1/network/{vm}`, `…/all` | | the migrations whose redirections were ended |
//! | `POST /v1/cordon`, `DELETE /v1/cordon` | | [`Cordon`] |
//! | `POST /v1/evacuation` | [`EvacuateHostRequest`] | 202, [`HostEvacuation`] |
//! | `GET /v1/evacuation` | | [`HostEvacuation`] |
//! | `GET /metrics` | | text format of Prometheus |
//!
//! `{epoch}` is a number or `latest`. Every failure returns a [`Problem`] with a matching status.
//!
//! The controller's API is that of [`fleet`].
//!
//! Within `/v1` fields are added, never removed; clients ignore fields that they do not know. Requests with fields that
//! the agent does not know are refused: a misspelt limit must not be a missing one.

mod choices;
mod client;
mod control;
pub mod fleet;
mod forecast;
mod http;
mod http_client;
mod leftover_image;
pub mod metrics;
mod names;
mod network_state;
mod new_address;
mod options;
mod problem;
pub mod progress;
mod rate;
pub mod report;
mod routes;
mod server;
mod types;

pub use choices::*;
pub use client::{Client, MigrationSelector};
pub use control::Control;
pub use engine::handover::Role;
pub use forecast::*;
pub use http_client::{ClientError, Lines};
pub use leftover_image::LeftoverImage;
pub use names::*;
pub use network_state::*;
pub use new_address::{BadNewAddress, NewAddress};
pub use options::{InvalidOption, MigrationOptions, MigrationSettings};
pub use problem::{Problem, ProblemKind, with_causes};
pub use proto::ids::BadName;
pub use proto::message::{DiskMode, EvacuationStanding, Finding, HostEvacuation, Severity};
pub use proto::{Epoch, HostId, MigrationId, VmName};
pub use rate::{BadRate, Rate};
pub use server::{Server, ServerError, serve, serve_fleet};
pub use types::*;
