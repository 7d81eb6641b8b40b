//! Client of the API: blocking, with one connection for each request.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use proto::{MigrationId, VmName};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;

use super::network_state::NetworkState;
use super::problem::Problem;
use super::types::{
    AdoptRequest, Adopted, AgentInfo, CancelOutcome, CheckReport, ClaimReport, ClaimRequest, Forgotten,
    LeftoverImage, Limits, MigrateRequest, MigrationStatus, RecoverReport, RecoverRequest, RunRequest,
    VmDetail, VmSummary,
};
use crate::progress::ProgressLine;
use crate::report::Report;

/// Size of the longest answer that is read, in bytes. Reports of many rounds are the largest.
const ANSWER_BYTES: usize = 64 << 20;

/// Longest time in which a running agent answers a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// A client of one agent. Its methods correspond to the paths of [the crate](crate).
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

/// Reason for which a request has no valid answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent listens on the socket.
    #[error(
        "no agent answers at {socket}; start it with `whimbrel agent --config /etc/whimbrel/agent.toml` (or its \
         systemd unit), or name its socket with --socket", socket = socket.display())]
    NoAgent {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// The user may not open the socket.
    #[error(
        "no permission to open the agent's socket {socket}; use the account that the agent runs as (root)",
        socket = socket.display()
    )]
    Forbidden {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// The connection ended before the answer.
    #[error("the agent closed the connection before it answered; the request may have been carried out")]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The agent refused the request.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// The answer cannot be decoded.
    #[error("the agent's answer is invalid; do client and agent have different versions?")]
    Answer(#[source] serde_json::Error),
    /// The request cannot be encoded.
    #[error("the request cannot be encoded")]
    Request(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client has no threads or descriptors left.
    #[error("cannot start the client")]
    Runtime(#[source] io::Error),
}

/// Selection of a VM's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationSelector {
    /// The one with the largest epoch that the agent knows.
    Latest,
    /// The one with this epoch.
    Epoch(u64),
}

impl Client {
    /// Creates a client of the agent behind a socket. Sends nothing yet.
    pub fn new(socket: &Path) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ClientError::Runtime)?;
        Ok(Self { socket: socket.to_owned(), runtime })
    }

    /// `GET /v1/agent`.
    pub fn agent(&self) -> Result<AgentInfo, ClientError> {
        self.get("/v1/agent")
    }

    /// `GET /v1/vms`.
    pub fn vms(&self) -> Result<Vec<VmSummary>, ClientError> {
        self.get("/v1/vms")
    }

    /// `GET /v1/vms/{vm}`.
    pub fn vm(&self, vm: &VmName) -> Result<VmDetail, ClientError> {
        self.get(&format!("/v1/vms/{vm}"))
    }

    /// `POST /v1/vms`.
    pub fn adopt(&self, request: &AdoptRequest) -> Result<Adopted, ClientError> {
        self.post("/v1/vms", request)
    }

    /// `POST /v1/vms/run`.
    pub fn run(&self, request: &RunRequest) -> Result<Adopted, ClientError> {
        self.post("/v1/vms/run", request)
    }

    /// `DELETE /v1/vms/{vm}`.
    pub fn forget(&self, vm: &VmName) -> Result<Forgotten, ClientError> {
        self.delete(&format!("/v1/vms/{vm}"))
    }

    /// `POST /v1/vms/{vm}/claim`.
    pub fn claim(&self, vm: &VmName, request: &ClaimRequest) -> Result<ClaimReport, ClientError> {
        self.post(&format!("/v1/vms/{vm}/claim"), request)
    }

    /// `POST /v1/migrations` with `check_only`.
    pub fn check(&self, request: &MigrateRequest) -> Result<CheckReport, ClientError> {
        self.post("/v1/migrations", &MigrateRequest { check_only: true, ..request.clone() })
    }

    /// `POST /v1/migrations`.
    pub fn migrate(&self, request: &MigrateRequest) -> Result<MigrationStatus, ClientError> {
        self.post("/v1/migrations", &MigrateRequest { check_only: false, ..request.clone() })
    }

    /// `GET /v1/migrations`.
    pub fn migrations(&self) -> Result<Vec<MigrationStatus>, ClientError> {
        self.get("/v1/migrations")
    }

    /// `GET /v1/migrations/{vm}/{epoch}`.
    pub fn migration(&self, vm: &VmName, which: MigrationSelector) -> Result<MigrationStatus, ClientError> {
        self.get(&path(vm, which, ""))
    }

    /// `GET …/report`.
    pub fn report(&self, vm: &VmName, which: MigrationSelector) -> Result<Report, ClientError> {
        self.get(&path(vm, which, "/report"))
    }

    /// `POST …/cancel`.
    pub fn cancel(&self, vm: &VmName, which: MigrationSelector) -> Result<CancelOutcome, ClientError> {
        self.post(&path(vm, which, "/cancel"), &())
    }

    /// `POST …/recover`.
    pub fn recover(
        &self,
        vm: &VmName,
        which: MigrationSelector,
        request: &RecoverRequest,
    ) -> Result<RecoverReport, ClientError> {
        self.post(&path(vm, which, "/recover"), request)
    }

    /// `POST …/limits`.
    pub fn set_limits(
        &self,
        vm: &VmName,
        which: MigrationSelector,
        limits: &Limits,
    ) -> Result<Limits, ClientError> {
        self.post(&path(vm, which, "/limits"), limits)
    }

    /// `GET /v1/images`.
    pub fn images(&self) -> Result<Vec<LeftoverImage>, ClientError> {
        self.get("/v1/images")
    }

    /// `DELETE /v1/images/{vm}`, or `…/{epoch}`.
    pub fn remove_images(&self, vm: &VmName, epoch: Option<u64>) -> Result<Vec<LeftoverImage>, ClientError> {
        let epoch = epoch.map_or_else(String::new, |epoch| format!("/{epoch}"));
        self.delete(&format!("/v1/images/{vm}{epoch}"))
    }

    /// `DELETE /v1/images/{vm}/ended`.
    pub fn remove_ended_images(&self, vm: &VmName) -> Result<Vec<LeftoverImage>, ClientError> {
        self.delete(&format!("/v1/images/{vm}/ended"))
    }

    /// `GET /v1/network`.
    pub fn network(&self) -> Result<NetworkState, ClientError> {
        self.get("/v1/network")
    }

    /// `DELETE /v1/network/{vm}`, or `…/all`.
    pub fn release_network(&self, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, ClientError> {
        self.delete(&format!("/v1/network/{vm}{}", if all { "/all" } else { "" }))
    }

    fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let body = self.exchange(&Method::DELETE, path, Bytes::new())?;
        serde_json::from_slice(&body).map_err(ClientError::Answer)
    }

    /// `GET …/progress`: progress line by line, until the migration is over or has no driver.
    pub fn progress(&self, vm: &VmName, which: MigrationSelector) -> Result<Lines<'_>, ClientError> {
        let body = self.runtime.block_on(async {
            let response = self.send(&Method::GET, &path(vm, which, "/progress"), Bytes::new()).await?;
            if response.status().is_success() {
                Ok(response.into_body())
            } else {
                Err(problem(response.status(), &whole(response).await?))
            }
        })?;
        Ok(Lines { runtime: &self.runtime, body: Some(body), pending: Vec::new() })
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let body = self.exchange(&Method::GET, path, Bytes::new())?;
        serde_json::from_slice(&body).map_err(ClientError::Answer)
    }

    fn post<T: DeserializeOwned>(&self, path: &str, request: &impl Serialize) -> Result<T, ClientError> {
        let request = serde_json::to_vec(request).map_err(|error| ClientError::Request(error.into()))?;
        let body = self.exchange(&Method::POST, path, request.into())?;
        serde_json::from_slice(&body).map_err(ClientError::Answer)
    }

    fn exchange(&self, method: &Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        self.runtime.block_on(async {
            let response = self.send(method, path, body).await?;
            let status = response.status();
            let body = whole(response).await?;
            if status.is_success() { Ok(body) } else { Err(problem(status, &body)) }
        })
    }

    async fn send(
        &self,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ClientError> {
        let stream = tokio::time::timeout(CONNECT, tokio::net::UnixStream::connect(&self.socket))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|source| {
                let socket = self.socket.clone();
                match source.kind() {
                    io::ErrorKind::PermissionDenied => ClientError::Forbidden { socket, source },
                    _ => ClientError::NoAgent { socket, source },
                }
            })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "agent")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| ClientError::Request(error.into()))?;
        sender.send_request(request).await.map_err(lost)
    }
}

/// Lines of progress, as [`Client::progress`] returns them.
#[derive(Debug)]
pub struct Lines<'a> {
    runtime: &'a Runtime,
    body: Option<Incoming>,
    pending: Vec<u8>,
}

impl Iterator for Lines<'_> {
    type Item = Result<ProgressLine, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let rest = self.pending.split_off(end + 1);
                let line = std::mem::replace(&mut self.pending, rest);
                return Some(serde_json::from_slice(&line).map_err(ClientError::Answer));
            }
            let body = self.body.as_mut()?;
            match self.runtime.block_on(body.frame()) {
                Some(Ok(frame)) => {
                    self.pending.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
                }
                Some(Err(error)) => {
                    self.body = None;
                    return Some(Err(lost(error)));
                }
                None => self.body = None,
            }
        }
    }
}

fn path(vm: &VmName, which: MigrationSelector, rest: &str) -> String {
    match which {
        MigrationSelector::Latest => format!("/v1/migrations/{vm}/latest{rest}"),
        MigrationSelector::Epoch(epoch) => format!("/v1/migrations/{vm}/{epoch}{rest}"),
    }
}

async fn whole(response: Response<Incoming>) -> Result<Bytes, ClientError> {
    let body = http_body_util::Limited::new(response.into_body(), ANSWER_BYTES);
    body.collect().await.map(http_body_util::Collected::to_bytes).map_err(ClientError::Lost)
}

fn problem(status: StatusCode, body: &[u8]) -> ClientError {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) => problem.into(),
        Err(error) => {
            tracing::debug!(%status, "an error without a problem document");
            ClientError::Answer(error)
        }
    }
}

fn lost(error: hyper::Error) -> ClientError {
    ClientError::Lost(error.into())
}
