//! The controller's API for users and programs: HTTP/1.1 with JSON on a Unix socket that only its owner may open.
//!
//! | method and path | request | answer |
//! |---|---|---|
//! | `GET /v1/fleet` | | [`FleetInfo`] |
//! | `GET /v1/hosts` | | list of [`FleetHost`] |
//! | `POST /v1/hosts/{host}/cordon`, `DELETE …` | | [`FleetHost`] |
//! | `DELETE /v1/hosts/{host}` | | [`FleetHost`], which is forgotten |
//! | `POST /v1/hosts/{host}/return` | [`ReturnRequest`] | 202, [`EvacuationInfo`]; with `dry_run` 200, [`EvacuationPlan`] |
//! | `GET /v1/vms` | | list of [`FleetVm`] |
//! | `GET /v1/inventory` | | [`Inventory`], for `whimbrel fleet plan` |
//! | `GET /v1/events?after=NUMBER&follow=true` | | a [`FleetEvent`] a line |
//! | `GET /v1/evacuations` | | list of [`EvacuationInfo`], newest first |
//! | `POST /v1/evacuations` | [`EvacuateRequest`] | 202, [`EvacuationInfo`]; with `dry_run` 200, [`EvacuationPlan`] |
//! | `GET /v1/evacuations/{id}` | | [`EvacuationInfo`] |
//! | `POST /v1/evacuations/{id}/cancel` | | [`EvacuationInfo`] |
//! | `POST /v1/evacuations/{id}/resume` | | [`EvacuationInfo`] |
//! | `DELETE /v1/evacuations/{id}` | | [`EvacuationInfo`], which is forgotten |
//! | `GET /v1/reports/{host}/{vm}/{epoch}` | | [`Report`](crate::report::Report), from the agent of that host |
//! | `GET /metrics` | | text format of Prometheus |
//!
//! Every failure returns a [`Problem`](crate::Problem) with a matching status.

mod client;
mod control;
mod deadline;
mod routes;
mod types;

pub use client::FleetClient;
pub use control::{EventSignal, EventWatcher, FleetControl};
pub use deadline::{BadDeadline, Deadline};
pub use engine::evacuation::{EvacuationPlan, EvacuationStatus};
pub use engine::planner::Inventory;
pub use proto::message::{HostLoad, MovePolicy};
pub(crate) use routes::router;
pub use types::*;
