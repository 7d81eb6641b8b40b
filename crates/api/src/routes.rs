//! Mapping of paths to calls of [`Control`], and of their results to HTTP.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{delete, get, post};
use http_body_util::channel::Channel;
use proto::{Epoch, MigrationId, VmName};
use tokio::sync::watch;

use super::control::Control;
use super::http::{self, Answer, JsonBody, json};
use super::problem::{Problem, ProblemKind};
use super::types::MigrateRequest;
use crate::progress::{ProgressLine, Watcher};

/// Page of the manual that lists the paths.
const PAGE: &str = "docs/operations/api.md";

/// Shared state of the handlers.
#[derive(Clone)]
struct HandlerState {
    control: Arc<dyn Control>,
    /// True once the server ends; streams end with it.
    end: watch::Receiver<bool>,
}

/// Returns all routes.
pub(super) fn router(control: Arc<dyn Control>, end: watch::Receiver<bool>) -> Router {
    let migration = "/v1/migrations/{vm}/{epoch}";
    Router::new()
        .route("/v1/agent", get(agent))
        .route("/v1/vms", get(vms).post(adopt))
        .route("/v1/vms/run", post(run))
        .route("/v1/vms/{vm}", get(vm).delete(forget))
        .route("/v1/vms/{vm}/claim", post(claim))
        .route("/v1/images", get(images))
        .route("/v1/images/{vm}", delete(remove_images_of))
        .route("/v1/images/{vm}/ended", delete(remove_ended_images))
        .route("/v1/images/{vm}/{epoch}", delete(remove_images_of_one))
        .route("/v1/cordon", post(cordon).delete(uncordon))
        .route("/v1/evacuation", get(evacuation).post(ask_for_evacuation))
        .route("/metrics", get(metrics))
        .route("/v1/network", get(network))
        .route("/v1/network/{vm}", delete(release_network))
        .route("/v1/network/{vm}/all", delete(release_all_of_network))
        .route("/v1/forecasts", get(calibration).post(forecast))
        .route("/v1/migrations", get(migrations).post(migrate))
        .route(migration, get(one_migration))
        .route(&format!("{migration}/progress"), get(progress))
        .route(&format!("{migration}/report"), get(report))
        .route(&format!("{migration}/cancel"), post(cancel))
        .route(&format!("{migration}/recover"), post(recover))
        .route(&format!("{migration}/limits"), post(limits))
        .fallback(async |request: Request| http::no_such_path(&request, PAGE))
        .method_not_allowed_fallback(async |request: Request| http::no_such_method(&request, PAGE))
        .with_state(HandlerState { control, end })
}

async fn agent(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(|control| Ok(control.agent())).await?)
}

async fn vms(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(Control::vms).await?)
}

async fn adopt(
    State(shared): State<HandlerState>,
    JsonBody(request): JsonBody<super::AdoptRequest>,
) -> Answer {
    let named = [request.pid.is_some(), request.qmp.is_some(), request.qemu_name.is_some()];
    if named.into_iter().filter(|named| *named).count() != 1 {
        return Err(Problem::new(
            ProblemKind::BadRequest,
            "it is not clear which VM is meant",
            "give exactly one of `pid`, `qmp` and `qemu_name`",
        ));
    }
    json(StatusCode::CREATED, &shared.call(|control| control.adopt(request)).await?)
}

async fn run(State(shared): State<HandlerState>, JsonBody(request): JsonBody<super::RunRequest>) -> Answer {
    json(StatusCode::CREATED, &shared.call(|control| control.run(request)).await?)
}

async fn vm(State(shared): State<HandlerState>, Path(vm): Path<String>) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.vm(&vm)).await?)
}

async fn forget(State(shared): State<HandlerState>, Path(vm): Path<String>) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.forget(&vm)).await?)
}

async fn claim(
    State(shared): State<HandlerState>,
    Path(vm): Path<String>,
    JsonBody(request): JsonBody<super::ClaimRequest>,
) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.claim(&vm, request)).await?)
}

async fn images(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(Control::images).await?)
}

async fn remove_images_of(State(shared): State<HandlerState>, Path(vm): Path<String>) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.remove_images(&vm, None)).await?)
}

async fn remove_images_of_one(
    State(shared): State<HandlerState>,
    Path((vm, epoch)): Path<(String, String)>,
) -> Answer {
    let (vm, epoch) = (vm_name(vm)?, epoch_number(&epoch)?);
    json(StatusCode::OK, &shared.call(move |control| control.remove_images(&vm, Some(epoch))).await?)
}

async fn remove_ended_images(State(shared): State<HandlerState>, Path(vm): Path<String>) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.remove_ended_images(&vm)).await?)
}

async fn cordon(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(|control| control.set_cordoned(true)).await?)
}

async fn uncordon(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(|control| control.set_cordoned(false)).await?)
}

async fn evacuation(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(Control::evacuation).await?)
}

async fn ask_for_evacuation(
    State(shared): State<HandlerState>,
    JsonBody(request): JsonBody<super::EvacuateHostRequest>,
) -> Answer {
    json(StatusCode::ACCEPTED, &shared.call(move |control| control.ask_for_evacuation(&request)).await?)
}

async fn metrics(State(shared): State<HandlerState>) -> Answer {
    Ok(http::metrics(shared.call(Control::metrics).await?))
}

async fn network(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(Control::network).await?)
}

async fn release_network(State(shared): State<HandlerState>, Path(vm): Path<String>) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.release_network(&vm, false)).await?)
}

async fn release_all_of_network(State(shared): State<HandlerState>, Path(vm): Path<String>) -> Answer {
    let vm = vm_name(vm)?;
    json(StatusCode::OK, &shared.call(move |control| control.release_network(&vm, true)).await?)
}

async fn forecast(
    State(shared): State<HandlerState>,
    JsonBody(request): JsonBody<super::ForecastRequest>,
) -> Answer {
    json(StatusCode::OK, &shared.call(|control| control.forecast(request)).await?)
}

async fn calibration(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(Control::calibration).await?)
}

async fn migrate(State(shared): State<HandlerState>, JsonBody(request): JsonBody<MigrateRequest>) -> Answer {
    if request.forecast && !request.check_only {
        let (error, advice) =
            ("a migration is not forecast while it begins", "give `check_only`, or use /v1/forecasts");
        return Err(Problem::new(ProblemKind::BadRequest, error, advice));
    }
    if request.check_only {
        json(StatusCode::OK, &shared.call(|control| control.check(request)).await?)
    } else {
        json(StatusCode::ACCEPTED, &shared.call(|control| control.migrate(request)).await?)
    }
}

async fn migrations(State(shared): State<HandlerState>) -> Answer {
    json(StatusCode::OK, &shared.call(Control::migrations).await?)
}

async fn one_migration(State(shared): State<HandlerState>, Path(which): Path<(String, String)>) -> Answer {
    let status = shared.call(move |control| control.migration(&resolve(control, which)?)).await?;
    json(StatusCode::OK, &status)
}

async fn report(State(shared): State<HandlerState>, Path(which): Path<(String, String)>) -> Answer {
    let report = shared.call(move |control| control.report(&resolve(control, which)?)).await?;
    json(StatusCode::OK, &report)
}

async fn cancel(State(shared): State<HandlerState>, Path(which): Path<(String, String)>) -> Answer {
    let outcome = shared.call(move |control| control.cancel(&resolve(control, which)?)).await?;
    json(StatusCode::OK, &outcome)
}

async fn recover(
    State(shared): State<HandlerState>,
    Path(which): Path<(String, String)>,
    JsonBody(request): JsonBody<super::RecoverRequest>,
) -> Answer {
    let report = shared.call(move |control| control.recover(&resolve(control, which)?, request)).await?;
    json(StatusCode::OK, &report)
}

async fn limits(
    State(shared): State<HandlerState>,
    Path(which): Path<(String, String)>,
    JsonBody(request): JsonBody<super::Limits>,
) -> Answer {
    let limits = shared.call(move |control| control.set_limits(&resolve(control, which)?, request)).await?;
    json(StatusCode::OK, &limits)
}

async fn progress(State(shared): State<HandlerState>, Path(which): Path<(String, String)>) -> Answer {
    let (id, watcher) = shared
        .call(move |control| {
            let id = resolve(control, which)?;
            let watcher = control.watch(&id)?;
            Ok((id, watcher))
        })
        .await?;
    let (sender, body) = Channel::<Bytes, std::convert::Infallible>::new(1);
    tokio::spawn(stream(id, watcher, sender, shared.end));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::new(body)).into_response())
}

/// Streams a migration's progress, line by line, until the migration is over, the driver or the client is gone, or the
/// server ends. A slow client misses lines, but not the last one.
async fn stream(
    migration: MigrationId,
    mut watcher: Watcher,
    mut sender: http_body_util::channel::Sender<Bytes, std::convert::Infallible>,
    mut end: watch::Receiver<bool>,
) {
    loop {
        let progress = watcher.borrow_and_update().clone();
        let over = progress.standing.is_over();
        let Ok(mut line) = serde_json::to_vec(&ProgressLine { migration: migration.clone(), progress })
        else {
            return;
        };
        line.push(b'\n');
        if sender.send_data(Bytes::from(line)).await.is_err() || over {
            return;
        }
        tokio::select! {
            changed = watcher.changed() => if changed.is_err() { return },
            _ = end.wait_for(|end| *end) => return,
        }
    }
}

impl HandlerState {
    /// Calls the control on a thread that may block.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Control) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let control = Arc::clone(&self.control);
        http::blocking(move || work(control.as_ref())).await
    }
}

fn vm_name(name: String) -> Result<VmName, Problem> {
    VmName::new(name).map_err(|error| Problem::new(ProblemKind::BadRequest, error.to_string(), ""))
}

fn epoch_number(epoch: &str) -> Result<u64, Problem> {
    let unknown = |_| {
        Problem::new(
            ProblemKind::BadRequest,
            format!("{epoch:?} is not a valid epoch"),
            "give a number, or `latest` of a migration",
        )
    };
    epoch.parse().map_err(unknown)
}

/// Resolves the migration of a path: an epoch, or `latest`.
fn resolve(control: &dyn Control, (vm, epoch): (String, String)) -> Result<MigrationId, Problem> {
    let vm = vm_name(vm)?;
    if epoch != "latest" {
        return Ok(MigrationId { vm, epoch: Epoch(epoch_number(&epoch)?) });
    }
    let of_vm = |id: &MigrationId| id.vm == vm;
    let latest = control.migrations()?.into_iter().map(|status| status.id).filter(of_vm).max();
    latest.ok_or_else(|| {
        let text = format!("this host has no migration of {vm}");
        Problem::new(
            ProblemKind::NotFound,
            text,
            "`whimbrel vm list` lists the VMs of the host on which it is run",
        )
    })
}
