//! Mapping of paths to calls of [`FleetControl`], and of their results to HTTP.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{delete, get, post};
use http_body_util::channel::{Channel, Sender};
use proto::{Epoch, HostId, MigrationId, VmName};
use serde::Deserialize;
use tokio::sync::watch;

use super::control::FleetControl;
use super::types::{EvacuateRequest, FleetEvent, ReturnRequest};
use crate::http::{self, Answer, JsonBody, json};
use crate::problem::{Problem, ProblemKind};

/// Page of the manual that lists the paths.
const PAGE: &str = "docs/operations/controller.md";

/// Most events that are read at a time.
const EVENTS: u32 = 500;

/// Shared state of the handlers.
#[derive(Clone)]
struct FleetState {
    control: Arc<dyn FleetControl>,
    /// True once the server ends; streams end with it.
    end: watch::Receiver<bool>,
}

/// Returns all routes.
pub(crate) fn router(control: Arc<dyn FleetControl>, end: watch::Receiver<bool>) -> Router {
    Router::new()
        .route("/v1/fleet", get(info))
        .route("/v1/hosts", get(hosts))
        .route("/v1/hosts/{host}", delete(forget_host))
        .route("/v1/hosts/{host}/cordon", post(cordon).delete(uncordon))
        .route("/v1/hosts/{host}/return", post(return_vms))
        .route("/v1/vms", get(vms))
        .route("/v1/inventory", get(inventory))
        .route("/v1/events", get(events))
        .route("/v1/evacuations", get(evacuations).post(evacuate))
        .route("/v1/evacuations/{id}", get(evacuation).delete(forget))
        .route("/v1/evacuations/{id}/cancel", post(cancel))
        .route("/v1/evacuations/{id}/resume", post(resume))
        .route("/v1/reports/{host}/{vm}/{epoch}", get(report))
        .route("/metrics", get(metrics))
        .fallback(async |request: Request| http::no_such_path(&request, PAGE))
        .method_not_allowed_fallback(async |request: Request| http::no_such_method(&request, PAGE))
        .with_state(FleetState { control, end })
}

impl FleetState {
    /// Calls the control on a thread that may block.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn FleetControl) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let control = Arc::clone(&self.control);
        http::blocking(move || work(control.as_ref())).await
    }
}

async fn info(State(shared): State<FleetState>) -> Answer {
    json(StatusCode::OK, &shared.call(FleetControl::info).await?)
}

async fn hosts(State(shared): State<FleetState>) -> Answer {
    json(StatusCode::OK, &shared.call(FleetControl::hosts).await?)
}

async fn vms(State(shared): State<FleetState>) -> Answer {
    json(StatusCode::OK, &shared.call(FleetControl::vms).await?)
}

async fn inventory(State(shared): State<FleetState>) -> Answer {
    json(StatusCode::OK, &shared.call(FleetControl::inventory).await?)
}

async fn cordon(State(shared): State<FleetState>, Path(host): Path<String>) -> Answer {
    let host = host_id(host)?;
    json(StatusCode::OK, &shared.call(move |control| control.set_cordoned(&host, true)).await?)
}

async fn uncordon(State(shared): State<FleetState>, Path(host): Path<String>) -> Answer {
    let host = host_id(host)?;
    json(StatusCode::OK, &shared.call(move |control| control.set_cordoned(&host, false)).await?)
}

async fn forget_host(State(shared): State<FleetState>, Path(host): Path<String>) -> Answer {
    let host = host_id(host)?;
    json(StatusCode::OK, &shared.call(move |control| control.forget_host(&host)).await?)
}

async fn evacuate(State(shared): State<FleetState>, JsonBody(request): JsonBody<EvacuateRequest>) -> Answer {
    if request.dry_run {
        json(StatusCode::OK, &shared.call(move |control| control.preview(&request)).await?)
    } else {
        json(StatusCode::ACCEPTED, &shared.call(move |control| control.evacuate(&request)).await?)
    }
}

async fn return_vms(
    State(shared): State<FleetState>,
    Path(host): Path<String>,
    JsonBody(request): JsonBody<ReturnRequest>,
) -> Answer {
    let host = host_id(host)?;
    if request.dry_run {
        json(StatusCode::OK, &shared.call(move |control| control.preview_return(&host, &request)).await?)
    } else {
        json(StatusCode::ACCEPTED, &shared.call(move |control| control.return_vms(&host, &request)).await?)
    }
}

async fn evacuations(State(shared): State<FleetState>) -> Answer {
    json(StatusCode::OK, &shared.call(FleetControl::evacuations).await?)
}

async fn evacuation(State(shared): State<FleetState>, Path(id): Path<String>) -> Answer {
    json(StatusCode::OK, &shared.call(move |control| control.evacuation(&id)).await?)
}

async fn cancel(State(shared): State<FleetState>, Path(id): Path<String>) -> Answer {
    json(StatusCode::OK, &shared.call(move |control| control.cancel(&id)).await?)
}

async fn resume(State(shared): State<FleetState>, Path(id): Path<String>) -> Answer {
    json(StatusCode::OK, &shared.call(move |control| control.resume(&id)).await?)
}

async fn forget(State(shared): State<FleetState>, Path(id): Path<String>) -> Answer {
    json(StatusCode::OK, &shared.call(move |control| control.forget(&id)).await?)
}

async fn report(
    State(shared): State<FleetState>,
    Path((host, vm, epoch)): Path<(String, String, u64)>,
) -> Answer {
    let host = host_id(host)?;
    let vm = VmName::new(vm).map_err(|error| bad_request(&error))?;
    let id = MigrationId { vm, epoch: Epoch(epoch) };
    json(StatusCode::OK, &shared.call(move |control| control.report(&host, &id)).await?)
}

async fn metrics(State(shared): State<FleetState>) -> Answer {
    Ok(http::metrics(shared.call(FleetControl::metrics).await?))
}

/// Events that a request asks for.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct EventQuery {
    /// Number of the last event that is known.
    after: u64,
    /// Wait for further events.
    follow: bool,
}

async fn events(State(shared): State<FleetState>, query: Query<EventQuery>) -> Answer {
    let Query(EventQuery { after, follow }) = query;
    let (sender, body) = Channel::<Bytes, std::convert::Infallible>::new(1);
    // The first ones here, so that a failure has a status.
    let watcher = shared.control.watch_events();
    let first = shared.call(move |control| control.events(after, EVENTS)).await?;
    tokio::spawn(stream_events(shared, first, (after, follow), watcher, sender));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::new(body)).into_response())
}

/// Streams events, line by line, until there are no more, or for ever if they are followed: until the client is gone or the
/// server ends.
async fn stream_events(
    shared: FleetState,
    mut events: Vec<FleetEvent>,
    (mut after, follow): (u64, bool),
    mut watcher: watch::Receiver<u64>,
    mut sender: Sender<Bytes, std::convert::Infallible>,
) {
    let mut end = shared.end.clone();
    loop {
        for event in &events {
            after = event.number;
            let Ok(mut line) = serde_json::to_vec(event) else { return };
            line.push(b'\n');
            if sender.send_data(Bytes::from(line)).await.is_err() {
                return;
            }
        }
        if events.len() < EVENTS as usize {
            if !follow {
                return;
            }
            tokio::select! {
                new = watcher.wait_for(|last| *last > after) => if new.is_err() { return },
                _ = end.wait_for(|end| *end) => return,
            }
        }
        match shared.call(move |control| control.events(after, EVENTS)).await {
            Ok(next) => events = next,
            Err(_) => return,
        }
    }
}

fn host_id(name: String) -> Result<HostId, Problem> {
    HostId::new(name).map_err(|error| bad_request(&error))
}

fn bad_request(error: &dyn std::error::Error) -> Problem {
    Problem::new(ProblemKind::BadRequest, error.to_string(), "")
}
